"""Names of `hyper_parallel.core.tensor_parallel` for type checkers. Written by build/stubs.py: edit the table, not this file."""

from hp_core import ColwiseParallel as ColwiseParallel
from hp_core import NoParallel as NoParallel
from hp_core import ParallelStyle as ParallelStyle
from hp_core import PrepareModuleInput as PrepareModuleInput
from hp_core import PrepareModuleInputOutput as PrepareModuleInputOutput
from hp_core import PrepareModuleOutput as PrepareModuleOutput
from hp_core import RowwiseParallel as RowwiseParallel
from hp_core import SequenceParallel as SequenceParallel
from hp_core import loss_parallel as loss_parallel
from hp_core import parallelize_module as parallelize_module

__all__ = [
    "ColwiseParallel",
    "NoParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "loss_parallel",
    "parallelize_module",
]
