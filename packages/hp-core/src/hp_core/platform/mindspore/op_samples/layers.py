"""Samples of what layers are made of: softmax, norms, dropout, losses."""

from __future__ import annotations

from hp_core.platform.mindspore.op_samples.calls import calls
from hp_core.platform.protocol import OpSample

__all__ = ["SAMPLES"]

SAMPLES: list[OpSample] = [
    *calls("softmax", "F.softmax(x, dim=-1); ops.softmax(x, axis=0)", "5x3; 2x4x3"),
    *calls("log_softmax", "ops.log_softmax(x, axis=-1); ops.log_softmax(x, axis=0)", "5x3"),
    *calls("layer_norm", "ops.LayerNorm(begin_norm_axis=-1, begin_params_axis=-1)(x, y, z)[0]", "4x6 6 6; 2x3x5 5 5"),
    *calls("add", "ops.bias_add(x, y)", "4x6 6"),
    *calls("dropout", "F.dropout(x, 0.25); ops.dropout(x, 0.25)", "8x6", draws=True),
    *calls("nll_loss", "F.nll_loss(x, y); F.nll_loss(x, y, reduction='none')", "5x3 i3:5"),
    *calls("nll_loss", "F.nll_loss(x, y, ignore_index=1)", "5x3 i3:5"),
    *calls("nll_loss", "F.nll_loss(x, y, z)", "5x3 i3:5 n:3"),
    # losses of class indices, which MindSpore computes from these ops
    *calls("log_softmax", "ops.nll_loss(ops.log_softmax(x, -1), y)", "5x3 i3:5"),
    *calls("gather", "ops.cross_entropy(x, y); ops.cross_entropy(x, y, reduction='sum')", "5x3 i3:5; 6x4 i4:6"),
]
