"""Samples of reductions."""

from __future__ import annotations

from hp_core.platform.mindspore.op_samples.calls import calls
from hp_core.platform.protocol import OpSample

__all__ = ["SAMPLES"]

SAMPLES: list[OpSample] = [
    *calls("sum", "x.sum(); x.sum(0); x.sum(1); mint.sum(x, (0, 1)); mint.sum(x, 0, True)", "5x3"),
    *calls("sum", "x.sum(-1); mint.sum(x, (0, 2), True)", "2x4x3"),
    *calls("mean", "x.mean(); x.mean(0); mint.mean(x, -1, True)", "5x3"),
    *calls("amax", "ops.ReduceMax()(x, 0); ops.ReduceMax(keep_dims=True)(x, 1)", "5x3"),
    *calls("amin", "ops.ReduceMin()(x, 0)", "5x3"),
    *calls("max", "x.max(); mint.max(x)", "5x3"),
    *calls("min", "x.min()", "5x3"),
    *calls("all", "x.all(); ops.ReduceAll()(x, 0)", "b:5x3"),
    *calls("any", "x.any(); ops.ReduceAny(keep_dims=True)(x, 1)", "b:5x3"),
]
