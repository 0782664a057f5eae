"""Samples of elementwise ops: broadcasting, numbers on either side, comparison, casts."""

from __future__ import annotations

from hp_core.platform.mindspore.op_samples.calls import calls, each
from hp_core.platform.protocol import OpSample

__all__ = ["SAMPLES"]

UNARY = "exp expm1 log log1p sqrt rsqrt square abs reciprocal sin cos tan sinh cosh tanh erf erfc sign floor ceil"
FUNCTIONAL = "silu relu sigmoid hardswish hardsigmoid"

SAMPLES: list[OpSample] = [
    *each(UNARY, "mint.OP(x)", "u:5x3"),
    *each("round trunc", "mint.OP(x)", "n:5x3"),
    *each("isnan isinf isfinite", "ops.OP(x)", "n:5x3"),
    *each(FUNCTIONAL, "F.OP(x)", "5x3"),
    *calls("gelu", "ops.gelu(x, approximate='tanh')", "5x3"),
    *calls("isclose", "mint.isclose(x, y)", "n:5x3 n:5x3"),
    *calls("neg", "-x; mint.neg(x)", "5x3; -; 2x4x3"),
    *calls("exp", "mint.exp(x)", "-; 1; 1x3; 2x4x3"),
    *calls("erf", "ops.gelu(x)", "5x3"),  # MindSpore computes it so
    # two operands
    *calls("add", "x + y", "5x3 3; 5x1 1x3; 2x1x3 4x1; 5x3 -; 1 5x3"),
    *calls("sub", "x - y", "5x3 3; 3 4x3"),
    *calls("mul", "x * y", "5x3 3; 5x1 1x3; 5x3 -"),
    *calls("mul", "x * x + x", "5x3"),
    *calls("div", "x / y", "5x3 p:3; 5x1 p:1x3"),
    *each("maximum minimum", "mint.OP(x, y)", "5x3 3; 5x3 5x3"),
    *calls("pow", "mint.pow(x, y)", "p:5x3 n:3"),
    *calls("remainder", "x % y", "n:5x3 n:5x3"),
    *calls("floor_divide", "x // y", "n:5x3 p:3"),
    *calls("gt", "x > y; x > 0", "5x3 3"),
    *calls("ge", "x >= y", "5x3 3"),
    *calls("lt", "x < y; x < 0.5", "5x3 3"),
    *calls("le", "x <= y", "5x3 3"),
    *calls("eq", "x == y", "i3:5x3 i3:3"),
    *calls("ne", "x != y; x != 1", "i3:5x3 i3:3"),
    *each("logical_and logical_or logical_xor", "mint.OP(x, y)", "b:5x3 b:3"),
    *calls("logical_not", "mint.logical_not(x)", "b:5x3"),
    *calls("bitwise_and", "x & y", "i9:5x3 i9:3"),
    *calls("bitwise_or", "x | y", "i9:5x3 i9:3"),
    # numbers on both sides
    *calls("add", "x + 2; 2 + x", "5x3; -"),
    *calls("add", "ops.addn((x, y))", "5x3 5x3"),  # MindSpore hands over a list
    *calls("sub", "x - 1.5", "5x3"),
    *calls("rsub", "1.5 - x", "5x3"),
    *calls("mul", "x * 2.5; 2.5 * x", "5x3; -"),
    *calls("div", "x / 3", "5x3"),
    *calls("reciprocal", "3 / x", "p:5x3"),
    *calls("pow", "x ** 2; 2 ** x", "5x3"),
    # three operands
    *calls("where", "mint.where(x, y, z)", "b:5x3 5x3 3; b:5x1 1x3 5x3"),
    *calls("masked_fill", "x.masked_fill(y, 0.5)", "5x3 b:5x3; 5x3 b:3"),
    *calls("masked_fill", "mint.exp(x.masked_fill(y, float('-inf')))", "5x3 b:5x3"),
    *calls("clamp", "mint.clamp(x, -0.3, 0.4); mint.clamp(x, min=-0.3)", "5x3"),
    # casts
    *calls("to", "x.astype(ms.float32); x.astype(ms.float64)", "h:5x3; 5x3"),
    *calls("to", "x.astype(ms.int32); x.astype(ms.float16).astype(ms.float32)", "n:5x3"),
    *calls("to", "x.astype(ms.float32)", "i9:5x3; b:5x3"),
    *calls("zeros_like", "ops.zeros_like(x)", "5x3"),
    *calls("ones_like", "ops.ones_like(x)", "5x3"),
]  # fmt: skip
