"""A tensor of uneven size and all the ways in which these tests lay it out on four ranks."""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import cloudpickle
import numpy as np

import hp_core as hp
from hp_core import Layout, Partial, RaggedShard, Replicate, Shard, init_device_mesh

__all__ = ["SHAPE", "WEIGHT", "WHOLE", "grid", "lay", "layouts", "own"]

SHAPE = (5, 7)
WHOLE = (np.arange(35, dtype=np.float32).reshape(SHAPE) - 17) / 4
WEIGHT = np.random.default_rng(1).integers(-4, 5, SHAPE).astype(np.float32)


def grid() -> Any:
    """Four ranks as two axes of two."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def layouts(mesh: Any) -> list[Layout]:
    """Replicated, cut evenly and not, by both axes in both orders, pending, and ragged."""
    base = Layout.from_device_mesh(mesh)
    pairs = product([Replicate(), Shard(0), Shard(1), Partial()], repeat=2)
    return [*[base(*pair) for pair in pairs], base(("tp", "dp")), base(Replicate(), RaggedShard((2, 3)))]


def own(value: Any, layout: Layout) -> Any:
    """What this rank holds of a value; where a sum is pending, one of unequal addends."""
    for axis, _ in layout.partials:
        value = value * 3 - 1 if layout.mesh.require_coordinate()[axis] == 0 else value * -2 + 1
    return value[tuple(slice(start, stop) for start, stop in layout.bounds(value.shape))]


def lay(framework: Any, value: Any, layout: Layout) -> Any:
    """The DTensor of this global value."""
    return hp.DTensor.from_local(framework.tensor(own(value, layout)), layout, shape=value.shape)


# Ranks can't import this folder: whatever of it a test names is sent to them whole.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
