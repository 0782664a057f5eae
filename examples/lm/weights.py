"""Initial weights that depend on the sizes, the element type and the seed alone: not on the mesh, and not on the framework.

They come from the library's layout-independent generator, which gives the same bits on PyTorch and on MindSpore.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from hp_core import DeviceMesh, manual_seed, randn
from hp_core.process_group import get_rank

INIT_STD = 0.02


def draw_matrices(
    shapes: Iterable[tuple[str, tuple[int, ...]]], layers: int, dtype: Any, seed: int
) -> Iterator[tuple[str, Any]]:
    """The values of the model's matrices, normal around zero.

    Projections that write to the residual stream start smaller by the root of their number (as in GPT-2), so that its
    variance does not grow with depth.

    Args:
        shapes: Name and shape of each matrix, in the model's order, which decides the numbers that it gets.
        layers: Number of blocks.
        dtype: The framework's element type.
        seed: Of the run.

    Yields:
        Name and values, whole on every rank.
    """
    manual_seed(seed)
    alone = DeviceMesh((1,), ("rank",), (get_rank(),))
    for name, shape in shapes:
        into_stream = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
        std = INIT_STD / (2 * layers) ** 0.5 if into_stream else INIT_STD
        yield name, randn(*shape, dtype=dtype, device_mesh=alone).to_local() * std
