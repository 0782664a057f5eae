"""Names of `hyper_parallel.core.dtensor.init_weights` for type checkers. Written by build/stubs.py: edit the table, not this file."""

from hp_core import init_empty_weights as init_empty_weights
from hp_core import init_on_device as init_on_device
from hp_core import init_parameters as init_parameters

__all__ = [
    "init_empty_weights",
    "init_on_device",
    "init_parameters",
]
