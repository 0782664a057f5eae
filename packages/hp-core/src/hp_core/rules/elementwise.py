"""Elementwise ops with broadcasting: tables of names; what differs is only in which operands an op is linear.

In-place variants have the same rules, with the written operand pinned to its layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_core.errors import ShardingRuleError
from hp_core.platform import get_platform
from hp_core.rules.registry import rule
from hp_core.rules.rule import ADDEND, FACTOR, PLAIN, OpCall, Operand, Output, Strategy, solve
from hp_core.rules.spec import TensorSpec

__all__ = ["broadcast_labels", "elementwise"]

NONLINEAR_UNARY = """
    relu relu6 gelu silu mish sigmoid logsigmoid hardsigmoid hardswish hardtanh tanh tanhshrink softplus softsign elu selu
    celu leaky_relu hardshrink softshrink threshold exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square abs reciprocal
    sin cos tan asin acos atan sinh cosh asinh acosh atanh erf erfc erfinv lgamma digamma sign sgn floor ceil round trunc
    frac isnan isinf isfinite isneginf isposinf signbit logical_not bitwise_not clamp clamp_min clamp_max nan_to_num
    deg2rad rad2deg sinc i0 logit
"""
NONLINEAR_BINARY = """
    rdiv pow remainder fmod floor_divide maximum minimum fmax fmin atan2 hypot copysign xlogy logaddexp logaddexp2
    eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor
    bitwise_left_shift bitwise_right_shift isclose nextafter heaviside
"""
UNARY_PARAMETERS = {
    "gelu": "input approximate",
    "clamp": "input min max",
    "clamp_min": "input min",
    "clamp_max": "input max",
    "clone": "input memory_format",
    "contiguous": "input memory_format",
    "hardtanh": "input min_val max_val inplace",
    "softplus": "input beta threshold",
    "elu": "input alpha inplace",
    "celu": "input alpha inplace",
    "leaky_relu": "input negative_slope inplace",
    "threshold": "input threshold value inplace",
    "round": "input decimals",
    "nan_to_num": "input nan posinf neginf",
    "logit": "input eps",
    "isclose": "input other rtol atol equal_nan",
    "relu": "input inplace",
    "relu6": "input inplace",
    "silu": "input inplace",
    "mish": "input inplace",
    "selu": "input inplace",
    "hardsigmoid": "input inplace",
    "hardswish": "input inplace",
}


def broadcast_labels(specs: Sequence[TensorSpec]) -> tuple[list[tuple[Any, ...]], tuple[Any, ...], tuple[int, ...]]:
    """Labels of operands that broadcast together, of their result, and its shape.

    A dim of size 1 that is stretched has no label: it must be whole.
    """
    ndim = max(spec.ndim for spec in specs)
    shape = [1] * ndim
    for spec in specs:
        for dim, size in enumerate(spec.shape, ndim - spec.ndim):
            if size != 1:
                if shape[dim] not in (1, size):
                    shapes = ", ".join(str(tuple(other.shape)) for other in specs)
                    raise ShardingRuleError(f"operands of shapes {shapes} don't broadcast: {shape[dim]} meets {size}.")
                shape[dim] = size
    labels = []
    for spec in specs:
        offset = ndim - spec.ndim
        labels.append(
            tuple(offset + dim if size == shape[offset + dim] else None for dim, size in enumerate(spec.shape))
        )
    return labels, tuple(range(ndim)), tuple(shape)


def elementwise(call: OpCall, roles: Sequence[str], *, keeps: frozenset[str] | None = None) -> Strategy:
    """The strategy of an elementwise op whose operands have these roles, in order of appearance."""
    labels, result, shape = broadcast_labels(call.specs)
    operands = [Operand(spec, own, role) for spec, own, role in zip(call.specs, labels, roles, strict=True)]
    keeps = frozenset({"sum", "avg"}) if keeps is None else keeps
    return solve(operands, [Output(result, shape)], keeps=keeps, pinned=0 if call.inplace else None)


def _nonlinear(call: OpCall) -> Strategy:
    return elementwise(call, [PLAIN] * len(call.specs))


for _name in NONLINEAR_UNARY.split():
    rule(_name, UNARY_PARAMETERS.get(_name, "input"))(_nonlinear)
for _name in NONLINEAR_BINARY.split():
    rule(_name, UNARY_PARAMETERS.get(_name, "input other"))(_nonlinear)


@rule("neg positive", "input")
@rule("clone contiguous", "input memory_format")
@rule("conj resolve_conj resolve_neg real imag", "input")
def _linear_unary(call: OpCall) -> Strategy:
    moving = frozenset({"sum", "avg", "max", "min"}) if call.name in ("clone", "contiguous", "positive") else None
    return elementwise(call, [FACTOR], keeps=moving)


@rule("add sub", "input other alpha")
@rule("rsub", "input other alpha")
def _additive(call: OpCall) -> Strategy:
    # adding a number to a pending sum would add it once per rank
    roles = [ADDEND, ADDEND] if len(call.specs) == 2 else [PLAIN]
    return elementwise(call, roles)


@rule("mul", "input other")
def _multiplicative(call: OpCall) -> Strategy:
    return elementwise(call, [FACTOR] * len(call.specs))


@rule("div", "input other rounding_mode")
def _division(call: OpCall) -> Strategy:
    rounded = call.get("rounding_mode") is not None
    numerator = FACTOR if isinstance(call.get("input"), TensorSpec) and not rounded else PLAIN
    return elementwise(
        call, [numerator, PLAIN][: len(call.specs)] if numerator == FACTOR else [PLAIN] * len(call.specs)
    )


@rule("addcmul addcdiv", "input tensor1 tensor2 value")
def _add_product(call: OpCall) -> Strategy:
    return elementwise(call, [ADDEND, FACTOR, FACTOR if call.name == "addcmul" else PLAIN])


@rule("lerp", "input end weight")
def _lerp(call: OpCall) -> Strategy:
    return elementwise(call, [ADDEND, ADDEND] if len(call.specs) == 2 else [PLAIN] * len(call.specs))


@rule("where", "condition input other")
def _where(call: OpCall) -> Strategy:
    # the condition is known by its type: it comes first in where(condition, x, y), second in x.where(condition, y)
    flag = get_platform().ops.named_dtypes["bool"]
    roles = [PLAIN if spec.dtype is flag else ADDEND for spec in call.specs]
    return elementwise(call, roles if roles.count(ADDEND) == 2 else [PLAIN] * len(call.specs))


@rule("masked_fill", "input mask value")
def _masked_fill(call: OpCall) -> Strategy:
    return elementwise(call, [PLAIN] * len(call.specs))


@rule("to type float double half bfloat16 int long bool short type_as", "input dtype")
def _cast(call: OpCall) -> Strategy:
    """A cast to a wider floating type is linear and keeps a pending sum; one that rounds or truncates must not come first."""
    tensors = get_platform().tensors
    source = call.specs[0].dtype
    target = _target_dtype(call)
    if len(call.specs) == 2:  # to(other), type_as(other): only the other's element type matters
        alone = _cast(OpCall(call.name, {"input": call.specs[0], "dtype": call.specs[1].dtype}, call.specs[:1]))
        return Strategy((*alone.layouts, call.specs[1].layout), alone.outputs, complete=frozenset({0}))
    widening = (
        target is not None
        and tensors.is_floating(target)
        and (not tensors.is_floating(source) or tensors.itemsize(target) >= tensors.itemsize(source))
    )
    if target is source:
        return elementwise(call, [FACTOR], keeps=frozenset({"sum", "avg", "max", "min"}))
    return elementwise(call, [FACTOR if widening else PLAIN])


@rule("copy", "input src non_blocking")
def _copy(call: OpCall) -> Strategy:
    return elementwise(call, [ADDEND] * len(call.specs), keeps=frozenset({"sum", "avg", "max", "min"}))


@rule("zero", "input")
def _zero(call: OpCall) -> Strategy:
    return elementwise(call, [FACTOR])


@rule("fill", "input value")
def _fill(call: OpCall) -> Strategy:
    return elementwise(call, [PLAIN] * len(call.specs))


@rule("zeros_like ones_like empty_like", "input dtype")
@rule("full_like", "input fill_value dtype")
def _like(call: OpCall) -> Strategy:
    """A new tensor of the operand's shape and cuts; nothing is read, so nothing is reduced."""
    spec = call.specs[0]
    return Strategy((spec.layout,), ((spec.layout.gradient, tuple(spec.shape)),))


def _target_dtype(call: OpCall) -> Any:
    names = get_platform().ops.named_dtypes
    if call.name in names:
        return names[call.name]
    return call.get("dtype")
