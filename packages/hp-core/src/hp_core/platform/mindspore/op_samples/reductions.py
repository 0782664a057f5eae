"""Samples of reductions."""

from __future__ import annotations

from hp_core.platform.mindspore.op_samples.calls import calls
from hp_core.platform.protocol import OpSample

__all__ = ["SAMPLES"]

SAMPLES: list[OpSample] = [
    *calls("sum", "x.sum(); x.sum(0); x.sum(1); mint.sum(x, (0, 1)); mint.sum(x, 0, True)", "5x3"),
    *calls("sum", "x.sum(-1); mint.sum(x, (0, 2), True)", "2x4x3"),
    *calls("mean", "x.mean(); x.mean(0); mint.mean(x, -1, True); x.mean(-1, keep_dims=True)", "5x3"),
    *calls("amax", "ops.ReduceMax()(x, 0); ops.ReduceMax(keep_dims=True)(x, 1)", "5x3"),
    *calls("amin", "ops.ReduceMin()(x, 0)", "5x3"),
    *calls("max", "x.max(); mint.max(x)", "5x3"),
    *calls("min", "x.min()", "5x3"),
    *calls("max", "mint.max(x, 1); mint.max(x, 0, True); ops.max(x, 0)", "5x3"),
    *calls("min", "mint.min(x, 0); ops.min(x, 1)", "5x3"),
    *calls("argmax", "ops.argmax(x, 0); ops.argmax(x, -1); x.argmax(0); ops.Argmax()(x)", "n:5x3"),
    *calls("argmin", "ops.argmin(x, axis=0)", "n:5x3"),
    *calls("all", "x.all(); ops.ReduceAll()(x, 0)", "b:5x3"),
    *calls("any", "x.any(); ops.ReduceAny(keep_dims=True)(x, 1)", "b:5x3"),
    *calls("cumsum", "ops.cumsum(x, 0); ops.cumsum(x, 1)", "5x3"),
    *calls("topk", "ops.topk(x, 2)", "5x3; 3x5"),
    *calls("sort", "ops.sort(x, 1); ops.sort(x, 0, True)", "5x3"),
]
