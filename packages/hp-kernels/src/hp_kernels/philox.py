"""Random numbers by global element index, written to memory: the format of `hp_core/random/philox.py`, bit for bit.

`philox_fill` writes to memory that its caller names, which is how hp_core fills its tensors where this package is installed;
`fill_random` takes a framework's tensor, on any device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_kernels.frameworks import platform_module
from hp_kernels.loading import require_native
from hp_kernels.memory import Array

__all__ = ["FILLS", "fill_random", "philox_fill"]

FILLS = ("uniform", "normal", "keep")
"""Uniform in [0, 1); standard normal; and 1 where the uniform float32 number is at least p, else 0 (dropout's mask)."""

_LOW_64 = (1 << 64) - 1


def fill_random(
    out: Any,
    kind: str,
    global_shape: Sequence[int],
    box: Sequence[tuple[int, int]],
    seed: int,
    offset: int,
    p: float = 0.0,
) -> None:
    """Fill a tensor with a box of a global random one: each element is a function of seed, offset and global index alone.

    Args:
        out: dense, of as many elements as the box; written to.
        kind: "uniform" in [0, 1), "normal", or "keep": 1 (True) where the uniform float32 number is at least `p`, into
            uint8 or bool.
        global_shape: of the global tensor.
        box: of each dim, the half-open interval that is wanted.
        seed: the key; its low 64 bits count.
        offset: number of the random call under this seed; its low 64 bits count.
        p: for "keep", the probability of 0.

    Raises:
        KernelArgumentError: the box is no part of the shape, `out` doesn't fit it, or p is no probability.
    """
    platform_module(out, "philox", "fill_random").fill_random(out, kind, global_shape, box, seed, offset, p)


def philox_fill(
    kind: str,
    out: Array,
    global_shape: Sequence[int],
    box: Sequence[tuple[int, int]],
    seed: int,
    offset: int,
    *parameters: float,
) -> None:
    """Fill memory with a box of a global random tensor; the same bits for any box and any number of threads.

    Args:
        kind: one of `FILLS`; "keep" writes uint8, the others floating-point numbers.
        out: an array of as many elements as the box has, row-major; written to.
        global_shape: of the global tensor.
        box: of each dim, the half-open interval that is wanted.
        seed: the key; its low 64 bits count.
        offset: number of the random call under this seed; its low 64 bits count.
        *parameters: p, for "keep".

    Raises:
        KernelArgumentError: the box is no part of the shape, `out` doesn't fit it, or p is no probability.
        ImportError: `_native` isn't there.
    """
    fill: Any = getattr(require_native(), f"philox_{kind}")
    fill(out, tuple(global_shape), tuple(box), seed & _LOW_64, offset & _LOW_64, *parameters)
