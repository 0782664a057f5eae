"""`loss_parallel`: insist that cross entropy runs on logits cut along the classes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["loss_parallel"]


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Inside, cross entropy on logits whose classes are not cut is refused.

    Cross entropy on cut logits never gathers them, inside this context or outside; the context makes sure that they *are* cut,
    so that a forgotten `use_local_output=False` or a gathered head is an error instead of memory and time lost.
    """
    from hp_core.dtensor.dispatch import dispatch_cache_clear
    from hp_core.rules.loss import require_cut_classes

    require_cut_classes.append(True)
    dispatch_cache_clear()
    try:
        yield
    finally:
        require_cut_classes.pop()
        dispatch_cache_clear()
