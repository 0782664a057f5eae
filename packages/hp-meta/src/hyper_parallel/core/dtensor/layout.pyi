"""Names of `hyper_parallel.core.dtensor.layout` for type checkers. Written by build/stubs.py: edit the table, not this file."""

from hp_core import Layout as Layout

__all__ = [
    "Layout",
]
