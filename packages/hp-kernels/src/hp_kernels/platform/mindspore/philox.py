"""Random numbers by global element index into MindSpore's CPU tensors; see `hp_kernels.philox.fill_random`.

Needs the native kernel: hp_core, which has the portable Philox, fills its own tensors with or without it.
"""

from __future__ import annotations

from collections.abc import Sequence

from mindspore import Tensor

from hp_kernels.errors import KernelArgumentError
from hp_kernels.philox import FILLS, philox_fill
from hp_kernels.platform.mindspore.arrays import array_of, writable

__all__ = ["fill_random"]


def fill_random(
    out: Tensor,
    kind: str,
    global_shape: Sequence[int],
    box: Sequence[tuple[int, int]],
    seed: int,
    offset: int,
    p: float = 0.0,
) -> None:
    """Fill a tensor with a box of a global random one."""
    if kind not in FILLS:
        raise KernelArgumentError(f"fill_random: kind is one of {', '.join(FILLS)}, not {kind!r}.")
    parameters = (p,) if kind == "keep" else ()
    philox_fill(kind, array_of(writable(out)), global_shape, box, seed, offset, *parameters)
