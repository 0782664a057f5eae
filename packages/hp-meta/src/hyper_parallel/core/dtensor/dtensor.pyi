"""Names of `hyper_parallel.core.dtensor.dtensor` for type checkers. Written by build/stubs.py: edit the table, not this file."""

from hp_core import DTensor as DTensor
from hp_core import SkipDTensorDispatch as SkipDTensorDispatch
from hp_core import distribute_module as distribute_module
from hp_core import distribute_tensor as distribute_tensor

__all__ = [
    "DTensor",
    "SkipDTensorDispatch",
    "distribute_module",
    "distribute_tensor",
]
