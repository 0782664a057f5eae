"""Ops of MindSpore on DTensors, through the same rules as torch's, against dense."""

from __future__ import annotations

import mindspore as ms
import pytest
from mindspore import mint, ops

from .oracle import check_ops

F = mint.nn.functional

ELEMENTWISE = [
    ("add", lambda x, y: x + y, "4x6 4x6"),
    ("add_broadcast", lambda x, y: x + y, "4x6 6"),
    ("add_number", lambda x: x + 1.5, "4x6"),
    ("sub", lambda x, y: x - y, "4x6 4x6"),
    ("number_sub", lambda x: 2 - x, "4x6"),
    ("mul", lambda x, y: x * y, "4x6 4x6"),
    ("mul_number", lambda x: 2.0 * x, "4x6"),
    ("div", lambda x, y: x / y, "4x6 p:4x6"),
    ("number_div", lambda x: 1 / x, "p:4x6"),
    ("pow", lambda x: x**2, "4x6"),
    ("neg", lambda x: -x, "4x6"),
    ("exp", lambda x: mint.exp(x), "4x6"),
    ("log", lambda x: mint.log(x), "p:4x6"),
    ("rsqrt", lambda x: mint.rsqrt(x), "p:4x6"),
    ("silu", lambda x: F.silu(x), "4x6"),
    ("gelu", lambda x: ops.gelu(x), "4x6"),
    ("relu", lambda x: F.relu(x), "4x6"),
    ("tanh", lambda x: mint.tanh(x), "4x6"),
    ("sigmoid", lambda x: mint.sigmoid(x), "4x6"),
    ("maximum", lambda x, y: mint.maximum(x, y), "4x6 4x6"),
    ("clamp", lambda x: mint.clamp(x, -0.5, 0.5), "4x6"),
    ("where", lambda m, x, y: mint.where(m, x, y), "b:4x6 4x6 4x6"),
    ("compare", lambda x, y: x > y, "4x6 4x6"),
    ("masked_fill", lambda x, m: x.masked_fill(m, -1.0), "4x6 b:4x6"),
    ("cast", lambda x: x.astype(ms.float16).astype(ms.float32), "4x6"),
]

PRODUCTS = [
    ("linear", lambda x, w, b: F.linear(x, w, b), "3x4 6x4 6"),
    ("linear_3d", lambda x, w: F.linear(x, w), "2x3x4 6x4"),
    ("matmul", lambda x, y: mint.matmul(x, y), "4x6 6x5"),
    ("matmul_operator", lambda x, y: x @ y, "2x4x6 6x5"),
    ("bmm", lambda x, y: mint.bmm(x, y), "2x4x6 2x6x5"),
    ("matmul_4d", lambda x, y: ops.matmul(x, y), "2x2x3x4 2x2x4x3"),
    ("matmul_transposed", lambda x, y: x @ y.transpose(0, 1), "4x6 5x6"),
]

SHAPES = [
    ("reshape", lambda x: x.reshape(4, 2, 3), "4x6"),
    ("reshape_back", lambda x: x.reshape(8, 3), "4x2x3"),
    ("view", lambda x: x.view(2, 2, 6), "4x6"),
    ("transpose", lambda x: x.transpose(0, 1), "4x6"),
    ("permute", lambda x: mint.permute(x, (2, 0, 1)), "2x4x6"),
    ("swapaxes", lambda x: x.swapaxes(1, 2), "2x4x6"),
    ("T", lambda x: x.T, "4x6"),
    ("unsqueeze", lambda x: x.unsqueeze(1), "4x6"),
    ("squeeze", lambda x: x.squeeze(1), "4x1x6"),
    ("flatten", lambda x: mint.flatten(x, 1, 2), "4x2x6"),
    ("broadcast_to", lambda x: mint.broadcast_to(x, (3, 4, 6)), "4x6"),
    ("split", lambda x: mint.split(x, 2, 1), "4x6"),
    ("chunk", lambda x: mint.chunk(x, 3, 1), "4x6"),
    ("cat", lambda x, y: mint.cat([x, y], 1), "4x6 4x2"),
    ("slice", lambda x: x[1:3], "4x6"),
    ("slice_last", lambda x: x[..., 2:], "4x6"),
    ("select", lambda x: x[1], "4x6"),
    ("narrow", lambda x: mint.narrow(x, 1, 1, 3), "4x6"),
    ("unbind", lambda x: mint.unbind(x, 0), "n:4x6"),
]

REDUCTIONS = [
    ("sum", lambda x: x.sum(), "4x6"),
    ("sum_dim", lambda x: x.sum(1), "4x6"),
    ("sum_keepdim", lambda x: mint.sum(x, 0, True), "4x6"),
    ("mean", lambda x: x.mean(), "4x6"),
    ("mean_dim", lambda x: mint.mean(x, -1, True), "5x6"),
    ("softmax", lambda x: F.softmax(x, dim=-1), "4x6"),
    ("softmax_first", lambda x: ops.softmax(x, axis=0), "4x6"),
    (
        "softmax_empty_pieces",
        lambda x: ops.softmax(x, axis=0),
        "2x4x3",
    ),  # two axes cut a dim of two: half the ranks are empty
    ("log_softmax", lambda x: ops.log_softmax(x, axis=-1), "4x6"),
]

LAYERS = [
    ("bias_add", lambda x, b: ops.bias_add(x, b), "4x6 6"),
    ("matmul_of_layer", lambda x, y: ops.MatMul(transpose_b=True)(x, y), "4x6 5x6"),
    ("layer_norm", lambda x, w, b: ops.LayerNorm(begin_norm_axis=-1, begin_params_axis=-1)(x, w, b)[0], "4x6 6 6"),
]

INDICES = [
    ("embedding", lambda i, w: ops.gather(w, i, 0), "i8:2x3 8x4"),
    ("gather", lambda x, i: mint.gather(x, 1, i), "4x6 i6:4x2"),
]


FAMILIES = {
    "elementwise": ELEMENTWISE,
    "products": PRODUCTS,
    "shapes": SHAPES,
    "reductions": REDUCTIONS,
    "indices": INDICES,
    # primitives that layers of nn call: a transposed MatMul, BiasAdd, LayerNorm
    "layers": LAYERS,
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_ops_equal_dense(family: str, ranks: int) -> None:
    check_ops(ranks, FAMILIES[family])
