"""Samples of products of matrices."""

from __future__ import annotations

from hp_core.platform.mindspore.op_samples.calls import calls
from hp_core.platform.protocol import OpSample

__all__ = ["SAMPLES"]

SAMPLES: list[OpSample] = [
    *calls("linear", "F.linear(x, y)", "5x4 3x4; 2x5x4 3x4"),
    *calls("linear", "F.linear(x, y, z)", "5x4 3x4 3; 2x3x4 6x4 6"),
    *calls("linear", "ops.MatMul(transpose_b=True)(x, y)", "5x4 3x4"),
    *calls("matmul", "mint.matmul(x, y); x @ y", "4x6 6x5; 2x4x6 6x5"),
    *calls("matmul", "ops.matmul(x, y)", "2x2x3x4 2x2x4x3"),
    *calls("matmul", "x @ y.transpose(0, 1)", "4x6 5x6"),
    *calls("bmm", "mint.bmm(x, y)", "2x4x6 2x6x5; 3x2x4 3x4x2"),
]
