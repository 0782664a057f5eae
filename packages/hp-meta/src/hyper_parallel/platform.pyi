"""Names of `hyper_parallel.platform` for type checkers. Written by build/stubs.py: edit the table, not this file."""

from hp_core import get_platform as get_platform

__all__ = [
    "get_platform",
]
