"""Samples of what changes shapes: views, transpositions, pieces, concatenation."""

from __future__ import annotations

from hp_core.platform.mindspore.op_samples.calls import calls
from hp_core.platform.protocol import OpSample

__all__ = ["SAMPLES"]

SAMPLES: list[OpSample] = [
    *calls("reshape", "x.reshape(4, 2, 3); x.reshape(2, 2, 6); x.view(2, 2, 6); x.reshape(-1)", "4x6"),
    *calls("reshape", "x.reshape(8, 3); x.reshape(4, 6)", "4x2x3"),
    *calls("reshape", "mint.reshape(x, (5, 3))", "15"),
    *calls("flatten", "mint.flatten(x, 1, 2); mint.flatten(x)", "4x2x6"),
    *calls("unsqueeze", "x.unsqueeze(1); mint.unsqueeze(x, 0)", "5x3"),
    *calls("squeeze", "x.squeeze(1)", "4x1x6"),
    *calls("permute", "mint.permute(x, (2, 0, 1)); x.swapaxes(1, 2); ops.transpose(x, (1, 0, 2))", "2x5x3"),
    *calls("permute", "x.T", "5x3"),
    *calls("transpose", "x.transpose(0, 1); mint.transpose(x, -1, -2)", "5x3; 2x5x3"),
    *calls("broadcast_to", "mint.broadcast_to(x, (4, 5, 3))", "5x3; 5x1"),
    *calls("tile", "ops.tile(x, (2, 1))", "5x3"),
    *calls("narrow", "mint.narrow(x, 0, 1, 3)", "5x3"),
    *calls("narrow", "mint.narrow(x, 1, 1, 3)", "4x6"),
    *calls("split", "mint.split(x, 2, 0); mint.split(x, (1, 4), 0)", "5x3"),
    *calls("chunk", "mint.chunk(x, 3, 1); mint.chunk(x, 2, 0)", "4x6"),
    *calls("chunk", "ops.split(x, 2)", "4x6"),
    *calls("flip", "ops.flip(x, (0,))", "5x3"),
    *calls("stack", "ops.stack((x, y), 0); ops.stack((x, y), -1)", "5x3 5x3"),
    *calls("unbind", "mint.unbind(x, 0)", "n:4x6"),
    *calls("cat", "mint.cat([x, y], 0); ops.cat((x, y), 0)", "5x3 2x3"),
    *calls("cat", "mint.cat([x, y], 1)", "4x6 4x2"),
    *calls("getitem", "x[1:3]; x[..., 1:]; x[1]; x[-1]; x[None]; x[:, 0]; x[::2]; x[1:4, 1]", "5x3"),
]
