"""Samples of elementwise ops: broadcasting, numbers on either side, casts, new tensors, in-place variants."""

from __future__ import annotations

from hp_core.platform.protocol import OpSample
from hp_core.platform.torch.op_samples.calls import calls, each

__all__ = ["SAMPLES"]

FUNCTIONAL = """
    relu relu6 gelu silu mish logsigmoid hardsigmoid hardswish hardtanh tanhshrink softplus softsign elu selu celu
    leaky_relu hardshrink softshrink
"""
UNARY = """
    exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square abs reciprocal sin cos tan asin acos atan sinh cosh asinh
    atanh erf erfc erfinv lgamma digamma sign sgn floor ceil round trunc frac isnan isinf isfinite isneginf isposinf signbit
    sigmoid tanh logical_not deg2rad rad2deg sinc logit neg positive clone i0 nan_to_num real conj resolve_conj resolve_neg
"""
BINARY = """
    add sub mul div pow maximum minimum fmax fmin atan2 hypot copysign xlogy logaddexp logaddexp2 eq ne lt le gt ge remainder
    fmod isclose rsub
"""
ANY_BINARY = "logical_and logical_or logical_xor"
INTEGER_BINARY = "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift"
SIZES = "-; 1; 4; 5; 1x3; 2x4x3"
BROADCAST = "p:5x3 p:3; p:3 p:4x3; p:5x1 p:1x3; p:2x1x3 p:4x1; p:5x3 p:-; p:1 p:5x3"
INPLACE_UNARY = """
    relu exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square abs reciprocal sin cos tan asin acos atan sinh cosh
    erf erfc erfinv lgamma digamma sign sgn floor ceil round trunc frac sigmoid tanh logical_not deg2rad rad2deg sinc
    logit neg i0 nan_to_num zero
"""
INPLACE_FUNCTIONAL = "celu elu leaky_relu relu relu6 selu silu mish hardtanh hardsigmoid hardswish"
INPLACE_BINARY = """
    pow atan2 hypot copysign xlogy eq ne lt le gt ge remainder fmod logical_and logical_or logical_xor
"""

SAMPLES: list[OpSample] = [
    *each(FUNCTIONAL, "F.OP(x)", "5x3"),
    *each(UNARY, "torch.OP(x)", "u:5x3"),
    *calls("acosh", "x.add(1).acosh()", "p:5x3"),
    *calls("acosh", "x.detach().add(1).acosh_()", "p:5x3", inplace=True),
    *each("relu neg exp", "x.OP()", SIZES),
    *calls("abs", "abs(x)", "5x3"),
    *calls("clamp", "x.clamp(-0.3, 0.4); x.clamp(min=-0.3); x.clip(max=0.2)", "5x3"),
    *calls("clamp", "torch.clamp(x, y, z)", "5x3 f:3 p:5x3"),
    *calls("clamp_min", "torch.clamp_min(x, 0.1)", "5x3"),
    *calls("clamp_max", "torch.clamp_max(x, max=0.1)", "5x3"),
    *calls("gelu", "F.gelu(x, approximate='tanh')", "5x3"),
    *calls("round", "x.round(decimals=1)", "5x3"),
    *calls("nan_to_num", "x.log().nan_to_num(0.5)", "5x3"),
    *calls("threshold", "F.threshold(x, 0.1, 0.5)", "5x3"),
    *calls("softplus", "F.softplus(x, beta=2.0)", "5x3"),
    *calls("contiguous", "x.contiguous()", "5x3"),
    *calls("bitwise_not", "~x", "i9:5x3; b:5x3"),
    *calls("imag", "x.imag", "c:5x3"),
    *calls("real", "x.real", "c:5x3"),
    *calls("conj", "x.conj().resolve_conj()", "c:5x3"),
    # two operands
    *calls("add", "x + y", BROADCAST),
    *calls("sub", "x - y", BROADCAST),
    *calls("mul", "x * y", BROADCAST),
    *calls("div", "x / y", BROADCAST),
    *each(BINARY, "torch.OP(x, y)", "p:5x3 p:3; p:5x1 p:1x3"),
    *each(ANY_BINARY, "torch.OP(x, y)", "5x3 3; b:5x3 b:3"),
    *each(INTEGER_BINARY, "torch.OP(x, y)", "i9:5x3 i9:3"),
    *each("nextafter heaviside", "torch.OP(x, y)", "n:5x3 n:3"),
    *calls("pow", "x ** y", "p:5x3 p:3"),
    *calls("add", "torch.add(x, y, alpha=3)", "5x3 3"),
    *calls("sub", "torch.sub(x, y, alpha=0.5)", "5x3 3"),
    *calls("rsub", "torch.rsub(x, y, alpha=2)", "5x3 5x3"),
    *calls("mul", "x * x + x; torch.mul(input=x, other=3.0)", "5x3"),
    *calls("mul", "x * y + z", "5x3 3 5x3"),
    *calls("div", "torch.div(x, y, rounding_mode='floor')", "5x3 p:5x3"),
    *calls("floor_divide", "x // y", "n:5x3 n:5x3"),
    *calls("floor_divide", "torch.floor_divide(x, y + 1)", "i9:5x3 i9:3"),
    *calls("remainder", "x % y", "n:5x3 p:5x3"),
    *calls("isclose", "torch.isclose(x, y, rtol=0.5)", "5x3 5x3"),
    *each("gt le eq ne", "torch.OP(x, y)", "5x3 3"),
    # numbers on both sides
    *calls("add", "x + 2; 2 + x", "5x3; -"),
    *calls("sub", "x - 1.5", "5x3"),
    *calls("rsub", "1.5 - x; torch.rsub(x, 1.5, alpha=2)", "5x3"),
    *calls("mul", "x * 2.5; 2.5 * x", "5x3; -"),
    *calls("mul", "x * torch.tensor(2.0, dtype=torch.float64)", "5x3"),
    *calls("div", "x / 3", "5x3"),
    *calls("rdiv", "3 / x", "p:5x3"),
    *calls("floor_divide", "x // 0.3; 1 // x", "n:5x3"),
    *calls("remainder", "x % 0.3; 1 % x", "n:5x3"),
    *calls("pow", "x ** 2; 2 ** x", "5x3"),
    *calls("gt", "x > 0", "5x3"),
    *calls("lt", "x < 0", "5x3"),
    *calls("eq", "x == 0", "5x3"),
    # three operands
    *calls("where", "torch.where(x, y, z)", "b:5x3 5x3 3; b:5x1 1x3 5x3"),
    *calls("where", "torch.where(x, y, 0.5); torch.where(x, 0.5, y)", "b:5x3 5x3"),
    *calls("where", "x.where(y, z)", "5x3 b:5x3 5x3"),
    *calls("masked_fill", "x.masked_fill(y, 0.5)", "5x3 b:5x3; 5x3 b:3; 4x6 b:4x1"),
    *calls("masked_fill", "x.masked_fill(y, float('-inf')).exp()", "5x3 b:5x3"),
    *calls("addcmul", "torch.addcmul(x, y, z, value=0.5)", "5x3 5x3 3"),
    *calls("addcdiv", "torch.addcdiv(x, y, z, value=0.5)", "5x3 5x3 p:3"),
    *calls("lerp", "torch.lerp(x, y, 0.3)", "5x3 3"),
    *calls("lerp", "torch.lerp(x, y, z)", "5x3 5x3 3"),
    # integers, bools, mixed
    *calls("bitwise_and", "x & y", "i9:5x3 i9:3; b:5x3 b:3"),
    *calls("bitwise_or", "x | y", "i9:5x3 i9:3; b:5x3 b:3"),
    *calls("bitwise_xor", "x ^ y", "i9:5x3 i9:3; b:5x3 b:3"),
    *calls("bitwise_left_shift", "x << y", "i9:5x3 i3:3"),
    *calls("bitwise_right_shift", "x >> y", "i9:5x3 i3:3"),
    *calls("add", "x + y", "i9:5x3 i9:3; 5x3 i9:3; s:5x3 3"),
    *calls("mul", "x * y", "i9:5x3 i9:3; 5x3 i9:3; 5x3 b:5x3; h:5x3 s:3"),
    *calls("sub", "x - 2", "i9:5x3"),
    *calls("floor_divide", "x // 2", "i9:5x3"),
    *calls("div", "x / 2", "i9:5x3"),
    # casts
    *calls("to", "x.to(torch.float64); x.to(dtype=torch.float64); x.to('cpu')", "5x3"),
    *calls("to", "x.to(torch.float32); x.to('cpu', torch.int64); x.to(torch.int64, copy=True)", "n:5x3"),
    *calls("to", "x.to(torch.float64)", "s:5x3; h:5x3"),
    *calls("to", "x.to(torch.float32)", "h:5x3"),
    *calls("to", "x.to(y)", "i9:5x3 5x3"),
    *calls("type_as", "x.type_as(y)", "i9:5x3 5x3"),
    *calls("double", "x.double()", "5x3; i9:5x3; s:5x3"),
    *calls("float", "x.float()", "s:5x3; h:5x3; i9:5x3"),
    *each("half bfloat16 long short", "x.OP()", "n:5x3"),
    *calls("int", "(x * 10).int()", "n:5x3"),
    *calls("bool", "x.bool()", "i2:5x3"),
    # new tensors
    *each("zeros_like ones_like", "torch.OP(x)", "5x3"),
    *calls("ones_like", "torch.ones_like(x, dtype=torch.int64); x + torch.ones_like(x)", "5x3"),
    *calls("full_like", "torch.full_like(x, 2.5)", "5x3"),
    *calls("empty_like", "torch.empty_like(x).zero_()", "5x3"),
    # in place
    *each(INPLACE_UNARY, "x.clone().OP_()", "u:5x3", inplace=True),
    *each("asinh atanh", "x.detach().clone().OP_()", "u:5x3", inplace=True),
    *each(INPLACE_FUNCTIONAL, "F.OP(x.clone(), inplace=True)", "5x3", inplace=True),
    *each(INPLACE_BINARY, "x.detach().clone().OP_(y)", "p:5x3 p:3", inplace=True),
    *calls("floor_divide", "x.clone().floor_divide_(y)", "n:5x3 n:3", inplace=True),
    *each("bitwise_and bitwise_or bitwise_xor", "x.clone().OP_(y)", "i9:5x3 i9:3", inplace=True),
    *each("bitwise_left_shift bitwise_right_shift", "x.clone().OP_(y)", "i9:5x3 i3:3", inplace=True),
    *calls("bitwise_not", "x.clone().bitwise_not_()", "i9:5x3", inplace=True),
    *calls("nextafter", "x.clone().nextafter_(y)", "n:5x3 n:3", inplace=True),
    *calls("heaviside", "x.clone().heaviside_(y)", "n:5x3 n:3", inplace=True),
    *each("clamp_min clamp_max", "x.clone().OP_(0.1)", "5x3", inplace=True),
    *calls("threshold", "F.threshold(x.clone(), 0.1, 0.5, inplace=True)", "5x3", inplace=True),
    *calls("add", "x.clone().add_(y); x.clone().add_(y, alpha=-0.5)", "5x3 5x3; 5x3 3", inplace=True),
    *calls("add", "x.clone().add_(2)", "5x3", inplace=True),
    *calls("add", "augmented(x, y)", "5x3 5x3", inplace=True),
    *calls("sub", "x.clone().sub_(y)", "5x3 3", inplace=True),
    *calls("mul", "x.clone().mul_(y)", "5x3 5x3; 5x3 3", inplace=True),
    *calls("mul", "x.clone().mul_(2.5)", "5x3", inplace=True),
    *calls("div", "x.clone().div_(y)", "5x3 p:3", inplace=True),
    *calls("clamp", "x.clone().clamp_(min=0.1)", "5x3", inplace=True),
    *calls("fill", "x.clone().fill_(2.5)", "5x3", inplace=True),
    *calls("copy", "x.clone().copy_(y)", "5x3 5x3; 5x3 3", inplace=True),
    *calls("masked_fill", "x.clone().masked_fill_(y, 0.5)", "5x3 b:5x3", inplace=True),
    *calls("lerp", "x.clone().lerp_(y, 0.3)", "5x3 5x3", inplace=True),
    *calls("addcmul", "x.clone().addcmul_(y, z, value=0.5)", "5x3 5x3 5x3", inplace=True),
    *calls("addcdiv", "x.clone().addcdiv_(y, z, value=0.5)", "5x3 5x3 p:5x3", inplace=True),
]  # fmt: skip
