"""Samples of what picks entries: embedding, gather, index tensors."""

from __future__ import annotations

from hp_core.platform.mindspore.op_samples.calls import calls
from hp_core.platform.protocol import OpSample

__all__ = ["SAMPLES"]

SAMPLES: list[OpSample] = [
    *calls("embedding", "ops.gather(y, x, 0)", "i5:2x3 5x4; i8:6 8x3"),
    *calls("index_select", "ops.gather(x, y, 1); ops.gather(x, y, -1)", "5x3 i3:4"),
    *calls("gather", "mint.gather(x, 1, y)", "5x3 i3:5x2"),
    *calls("gather", "mint.gather(x, 0, y)", "5x3 i5:2x3"),
    *calls("getitem", "x[y]; x[:, y]", "4x4 i4:3"),
]
