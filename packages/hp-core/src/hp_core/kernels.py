"""The one door to hp-kernels, which is optional: a native kernel, or None where its portable twin is to be used.

`HP_KERNELS=off` closes it, `on` insists, `auto` (the default) opens it where the package is installed and built.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from hp_core.errors import PlatformError
from hp_core.geometry import Box, box_numel

__all__ = ["Memory", "philox_filler"]

Memory = tuple[int, int, str]
"""Address in the host's memory, bytes held from there on, and name of the element type of a dense row-major tensor."""

Filler = Callable[[str, Memory, Sequence[int], Sequence[Box], int, int, Sequence[float]], None]


@lru_cache(maxsize=1)
def philox_filler() -> Filler | None:
    """What fills the memory of a tensor with boxes of a global random one, one after the other; None without hp-kernels.

    Asked once per process.

    Raises:
        PlatformError: `HP_KERNELS=on`, and the native kernels aren't there.
    """
    try:
        from hp_kernels.loading import native
        from hp_kernels.memory import array
        from hp_kernels.philox import philox_fill
    except ModuleNotFoundError as error:
        if os.environ.get("HP_KERNELS") == "on":
            raise PlatformError("HP_KERNELS=on, but hp-kernels isn't installed: pip install hp-kernels.") from error
        return None
    try:
        if native() is None:
            return None
    except ImportError as error:
        raise PlatformError(str(error)) from error

    def fill(
        kind: str,
        memory: Memory,
        global_shape: Sequence[int],
        boxes: Sequence[Box],
        seed: int,
        offset: int,
        parameters: Sequence[float],
    ) -> None:
        address, held, dtype = memory
        for box in boxes:
            numel = box_numel(box)
            out: Any = array(address, held, dtype, (numel,))
            philox_fill(kind, out, global_shape, box, seed, offset, *parameters)
            size = numel * _ITEM_SIZES[dtype]
            address, held = address + size, held - size

    return fill


_ITEM_SIZES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "bool": 1}
