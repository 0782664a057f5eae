"""`loss_parallel`: insist that cross entropy runs on logits cut along the classes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hp_core.rules.loss import cut_classes_required

__all__ = ["loss_parallel"]


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Inside, cross entropy on logits whose classes are not cut is refused.

    Cross entropy on cut logits never gathers them, inside this context or outside; the context makes sure that they *are* cut,
    so that a forgotten `use_local_output=False` or a gathered head is an error instead of memory and time lost.
    """
    token = cut_classes_required.set(True)
    try:
        yield
    finally:
        cut_classes_required.reset(token)
