"""Names of `hyper_parallel.debug` for type checkers. Written by build/stubs.py: edit the table, not this file."""

from hp_core import Description as Description
from hp_core import Fingerprint as Fingerprint
from hp_core import describe as describe
from hp_core import dispatch_cache_info as dispatch_cache_info
from hp_core import explain_redistribute as explain_redistribute
from hp_core import fingerprint as fingerprint
from hp_core import record_collectives as record_collectives
from hp_core import redistribute_cache_info as redistribute_cache_info

__all__ = [
    "Description",
    "Fingerprint",
    "describe",
    "dispatch_cache_info",
    "explain_redistribute",
    "fingerprint",
    "record_collectives",
    "redistribute_cache_info",
]
