"""Ops on DTensors equal the dense op, forward and backward, on both frameworks: one table, in one spelling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hp_core.platform.protocol import OpSample
from hp_core.testing.validator.runs import check_samples

MESHES = {2: "2", 4: "2x2"}
MOST_COMBINATIONS = {2: 8, 4: 5}

Case = tuple[str, Callable[..., Any], str]
"""What it is, the function of a framework (`f`) and tensors, and the tensors: see `OpSample`."""

ELEMENTWISE: list[Case] = [
    ("add", lambda f, x, y: x + y, "5x6 5x6"),
    ("add a row", lambda f, x, y: x + y, "5x6 6"),
    ("add a column", lambda f, x, y: x + y, "2x3x4 3x1"),
    ("add a number", lambda f, x: x + 1.5, "5x6"),
    ("multiply by a number", lambda f, x: 2.0 * x, "4x6"),
    ("divide", lambda f, x, y: x / y, "4x6 p:4x6"),
    ("rsqrt", lambda f, x: f.ops.rsqrt(x), "p:4x6"),
    ("silu", lambda f, x: f.functional.silu(x), "4x6"),
    ("gelu", lambda f, x: f.gelu(x), "4x6"),
    ("maximum", lambda f, x, y: f.ops.maximum(x, y), "5x3 5x3"),
    ("clamp", lambda f, x: f.ops.clamp(x, -0.5, 0.5), "4x6"),
    ("where", lambda f, m, x, y: f.ops.where(m, x, y), "b:4x6 4x6 4x6"),
    ("compare", lambda f, x, y: x > y, "4x6 4x6"),
    ("masked_fill", lambda f, x, m: x.masked_fill(m, -1.0), "4x6 b:4x6"),
    ("cast", lambda f, x: x.to(f.dtype("float16")).to(f.dtype("float32")), "n:4x6"),
]

PRODUCTS: list[Case] = [
    ("linear", lambda f, x, w, b: f.functional.linear(x, w, b), "3x4 6x4 6"),
    ("linear of three dims", lambda f, x, w, b: f.functional.linear(x, w, b), "2x3x4 6x4 6"),
    ("matmul", lambda f, x, y: f.ops.matmul(x, y), "5x6 6x4"),
    ("matmul of a batch", lambda f, x, y: x @ y, "2x4x6 6x5"),
    ("bmm", lambda f, x, y: f.ops.bmm(x, y), "2x4x6 2x6x5"),
    ("matmul of four dims", lambda f, x, y: f.ops.matmul(x, y), "2x2x3x4 2x2x4x3"),
    ("matmul with a transpose", lambda f, x, y: x @ y.transpose(0, 1), "4x6 5x6"),
]

SHAPES: list[Case] = [
    ("split a dim", lambda f, x: x.reshape(4, 2, 3), "4x6"),
    ("merge dims", lambda f, x: x.reshape(8, 3), "4x2x3"),
    ("view", lambda f, x: x.view(2, 2, 6), "4x6"),
    ("transpose", lambda f, x: x.transpose(0, 1), "5x6"),
    ("permute", lambda f, x: f.ops.permute(x, (2, 0, 1)), "2x4x6"),
    ("unsqueeze", lambda f, x: x.unsqueeze(1), "5x6"),
    ("squeeze", lambda f, x: x.squeeze(1), "4x1x6"),
    ("flatten", lambda f, x: f.ops.flatten(x, 1, 2), "4x2x6"),
    ("broadcast_to", lambda f, x: f.ops.broadcast_to(x, (3, 4, 6)), "4x6"),
    ("split", lambda f, x: f.ops.split(x, 2, 1), "4x6"),
    ("chunk", lambda f, x: f.ops.chunk(x, 3, 1), "4x6"),
    ("cat", lambda f, x, y: f.ops.cat([x, y], 1), "4x6 4x2"),
    ("narrow", lambda f, x: f.ops.narrow(x, 1, 1, 3), "4x6"),
]

SLICES: list[Case] = [
    ("rows", lambda f, x: x[1:3], "4x6"),
    ("columns", lambda f, x: x[..., 2:], "4x6"),
    ("every other row", lambda f, x: x[::2], "5x6"),
    ("a row", lambda f, x: x[1], "4x6"),
    ("the last row", lambda f, x: x[-1], "4x6"),
    ("a column with a new dim", lambda f, x: x[:, 1:2, None], "4x6"),
]

REDUCTIONS: list[Case] = [
    ("sum", lambda f, x: x.sum(), "5x6"),
    ("sum of a dim", lambda f, x: x.sum(1), "5x6"),
    ("sum that keeps the dim", lambda f, x: f.ops.sum(x, 0, True), "4x6"),
    ("mean", lambda f, x: x.mean(), "5x6"),
    ("mean of a dim", lambda f, x: f.ops.mean(x, -1, True), "5x6"),
    ("largest of a dim", lambda f, x: f.ops.amax(x, 1), "4x6"),
    ("softmax", lambda f, x: f.functional.softmax(x, dim=-1), "5x6"),
    ("softmax of the first dim", lambda f, x: f.functional.softmax(x, dim=0), "2x4x3"),
    ("log_softmax", lambda f, x: f.log_softmax(x, -1), "4x6"),
]

LAYERS: list[Case] = [
    ("layer_norm", lambda f, x, w, b: f.layer_norm(x, w, b), "4x6 6 6"),
    ("rms norm", lambda f, x, w: x * f.ops.rsqrt(f.ops.mean(x * x, -1, True) + 1e-5) * w, "4x6 6"),
    ("embedding", lambda f, i, w: f.embedding(i, w), "i8:2x3 8x4"),
    ("gather", lambda f, x, i: f.ops.gather(x, 1, i), "4x6 i6:4x2"),
    ("scores of attention", lambda f, q, k: f.functional.softmax(q @ k.transpose(1, 2), dim=-1), "2x4x6 2x4x6"),
    (
        "cross entropy",
        lambda f, x, t: -f.ops.gather(f.log_softmax(x, -1), -1, t.unsqueeze(-1)).mean(),
        "4x6 i6:4",
    ),
]

FAMILIES = {
    "elementwise": ELEMENTWISE,
    "products": PRODUCTS,
    "shapes": SHAPES,
    "slices": SLICES,
    "reductions": REDUCTIONS,
    "layers": LAYERS,
}


def _on(framework: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*tensors: Any) -> Any:
        return function(framework, *tensors)

    return call


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_ops_equal_dense_forward_and_backward(framework: Any, family: str, ranks: int) -> None:
    samples = [OpSample("", name, _on(framework, function), given) for name, function, given in FAMILIES[family]]
    faults = check_samples(samples, MESHES[ranks], MOST_COMBINATIONS[ranks])
    assert not faults, f"differs from dense on {framework.name}:\n" + "\n".join(faults)
