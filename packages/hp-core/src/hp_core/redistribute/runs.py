"""What compiled steps are made of: closures over local tensors, and what a started one leaves to be done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_core.geometry import origin_box
from hp_core.platform import get_platform
from hp_core.platform.protocol import Tensor, Work

__all__ = ["Arrivals", "Run", "conclude", "padded"]

Run = Callable[..., Tensor]
"""`run(local)`; if it communicates, also `run(local, arrivals)`."""

Arrivals = list[Callable[[], None]]
"""What is still to be done, in this order, before a tensor may be used: wait, then put things in place."""


def conclude(work: Work | None, unpack: Callable[[], None] | None, arrivals: Arrivals | None, *alive: Tensor) -> None:
    """What follows a communication: now, or (tensors kept alive until then) when its result is needed."""
    if arrivals is None:
        if unpack is not None:
            unpack()
        return
    kept: list[Any] = list(alive)

    def arrive() -> None:
        if work is not None:
            work.wait()
        if unpack is not None:
            unpack()
        kept.clear()

    arrivals.append(arrive)


def padded(local: Tensor, own: tuple[int, ...], largest: tuple[int, ...]) -> Tensor:
    """A dense tensor of shape `largest` that begins, along every dim, with `local` of shape `own`."""
    tensors = get_platform().tensors
    if own == largest:
        return tensors.contiguous(local)
    result = tensors.zeros(largest, local)
    tensors.paste(result, origin_box(own), local)
    return result
