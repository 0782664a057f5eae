"""Names of `hyper_parallel.core.optimizer` for type checkers. Written by build/stubs.py: edit the table, not this file."""

from hp_fsdp import get_hyper_optimizer as get_hyper_optimizer

__all__ = [
    "get_hyper_optimizer",
]
