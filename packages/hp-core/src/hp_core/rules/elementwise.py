"""Elementwise ops with broadcasting: tables of names; what differs is only in which operands an op is linear.

In-place variants have the same rules, with the written operand pinned to its layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hp_core.errors import ShardingRuleError
from hp_core.platform import get_platform
from hp_core.rules.registry import rule
from hp_core.rules.rule import ADDEND, FACTOR, PLAIN, Composite, OpCall, Operand, Output, Strategy, solve
from hp_core.rules.spec import TensorSpec

__all__ = ["broadcast_labels", "elementwise"]

NONLINEAR_UNARY = """
    relu relu6 gelu silu mish sigmoid logsigmoid hardsigmoid hardswish hardtanh tanh tanhshrink softplus softsign elu selu
    celu leaky_relu hardshrink softshrink threshold exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square abs reciprocal
    sin cos tan asin acos atan sinh cosh asinh acosh atanh erf erfc erfinv lgamma digamma sign sgn floor ceil round trunc
    frac isnan isinf isfinite isneginf isposinf signbit logical_not bitwise_not clamp clamp_min clamp_max nan_to_num
    deg2rad rad2deg sinc logit angle isreal polygamma mvlgamma i0 i0e i1 i1e entr erfcx ndtr ndtri log_ndtr airy_ai
    bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1
    scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0
"""
NONLINEAR_BINARY = """
    rdiv pow remainder fmod floor_divide maximum minimum fmax fmin atan2 hypot copysign xlogy logaddexp logaddexp2
    eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor
    bitwise_left_shift bitwise_right_shift isclose nextafter heaviside ldexp float_power gcd lcm igamma igammac xlog1py
    zeta polar chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w
    shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
    shifted_chebyshev_polynomial_w hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p
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
    "polygamma": "n input",
    "mvlgamma": "input p",
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
    if roles.count(ADDEND) > 1:
        _refuse_mixed(call, roles)
    labels, result, shape = broadcast_labels(call.specs)
    operands = [Operand(spec, own, role) for spec, own, role in zip(call.specs, labels, roles, strict=True)]
    keeps = frozenset({"sum", "avg"}) if keeps is None else keeps
    return solve(operands, [Output(result, shape)], keeps=keeps, pinned=0 if call.inplace else None)


def _refuse_mixed(call: OpCall, roles: Sequence[str]) -> None:
    """Addends that wait for different reductions have no pending result; which to finish first is for the user to say."""
    addends = [spec for spec, role in zip(call.specs, roles, strict=True) if role == ADDEND]
    if len({reduce_op for spec in addends for _, reduce_op in spec.layout.partials}) > 1:
        layouts = " and ".join(str(spec.layout) for spec in addends)
        raise ShardingRuleError(
            f"{call.name}: the operands wait for different reductions ({layouts}); call .reduce_partial() on one of them first."
        )


def _nonlinear(call: OpCall) -> Strategy:
    return elementwise(call, [PLAIN] * len(call.specs))


for _name in NONLINEAR_UNARY.split():
    rule(_name, UNARY_PARAMETERS.get(_name, "input"), flat="elementwise")(_nonlinear)
for _name in NONLINEAR_BINARY.split():
    rule(_name, UNARY_PARAMETERS.get(_name, "input other"), flat="elementwise")(_nonlinear)


@rule("neg positive", "input", flat="elementwise")
@rule("clone contiguous", "input memory_format", flat="elementwise")
@rule("conj resolve_conj resolve_neg real imag", "input", flat="elementwise")
def _linear_unary(call: OpCall) -> Strategy:
    moving = frozenset({"sum", "avg", "max", "min"}) if call.name in ("clone", "contiguous", "positive") else None
    return elementwise(call, [FACTOR], keeps=moving)


@rule("add sub", "input other alpha", flat="elementwise")
def _additive(call: OpCall) -> Strategy | Composite:
    if isinstance(call.get("alpha"), TensorSpec):
        return Composite(_scaled_sum if call.name == "add" else _scaled_difference)
    # adding a number to a pending sum would add it once per rank
    roles = [ADDEND, ADDEND] if len(call.specs) == 2 else [PLAIN]
    return elementwise(call, roles)


@rule("rsub", "input other alpha", flat="elementwise")
def _reversed_difference(call: OpCall) -> Strategy:
    return elementwise(call, [ADDEND, ADDEND] if len(call.specs) == 2 else [PLAIN])


def _scaled_sum(x: Any, other: Any, alpha: Any) -> Any:
    """With a factor that is a tensor, which counts as a number: it has no gradient."""
    return x + other * alpha.detach()


def _scaled_difference(x: Any, other: Any, alpha: Any) -> Any:
    return x - other * alpha.detach()


@rule("mul", "input other", flat="elementwise")
def _multiplicative(call: OpCall) -> Strategy:
    return elementwise(call, [FACTOR] * len(call.specs))


@rule("div", "input other rounding_mode", flat="elementwise")
def _division(call: OpCall) -> Strategy:
    rounded = call.get("rounding_mode") is not None
    numerator = FACTOR if isinstance(call.get("input"), TensorSpec) and not rounded else PLAIN
    return elementwise(
        call, [numerator, PLAIN][: len(call.specs)] if numerator == FACTOR else [PLAIN] * len(call.specs)
    )


@rule("addcmul addcdiv", "input tensor1 tensor2 value", flat="elementwise")
def _add_product(call: OpCall) -> Strategy:
    return elementwise(call, [ADDEND, FACTOR, FACTOR if call.name == "addcmul" else PLAIN])


@rule("lerp", "input end weight", flat="elementwise")
def _lerp(call: OpCall) -> Strategy:
    return elementwise(call, [ADDEND, ADDEND] if len(call.specs) == 2 else [PLAIN] * len(call.specs))


@rule("complex", "real imag", flat="elementwise")
def _complex(call: OpCall) -> Strategy:
    return elementwise(call, [ADDEND, ADDEND])


@rule("view_as_real view_as_complex", "input")
def _complex_view(call: OpCall) -> Strategy:
    """[...] complex <-> [..., 2] real."""
    spec = call.specs[0]
    if call.name == "view_as_real":
        labels: tuple[int | None, ...] = tuple(range(spec.ndim))
        return solve([Operand(spec, labels, FACTOR)], [Output((*labels, None))])
    labels = (*range(spec.ndim - 1), None)
    return solve([Operand(spec, labels, FACTOR)], [Output(labels[:-1])])


@rule("frexp", "input", flat="elementwise")
def _frexp(call: OpCall) -> Strategy:
    labels = tuple(range(call.specs[0].ndim))
    return solve([Operand(call.specs[0], labels, PLAIN)], [Output(labels), Output(labels)])


@rule("prelu", "input weight")
def _prelu(call: OpCall) -> Strategy:
    """[batch, channels, ...] with a slope for each channel, or one for all."""
    spec, weight = call.spec("input"), call.spec("weight")
    labels = tuple(range(spec.ndim))
    slope: tuple[int | None, ...] = (None,) * weight.ndim
    if math.prod(weight.shape) != 1:
        slope = (min(1, spec.ndim - 1),)
    return solve([Operand(spec, labels, PLAIN), Operand(weight, slope, PLAIN)], [Output(labels)])


@rule("isin", "elements test_elements assume_unique invert")
def _isin(call: OpCall) -> Strategy:
    """The set that is asked must be whole."""
    elements, asked = call.get("elements"), call.get("test_elements")
    operands = []
    if isinstance(elements, TensorSpec):
        operands.append(Operand(elements, tuple(range(elements.ndim)), PLAIN))
    if isinstance(asked, TensorSpec):
        operands.append(Operand(asked, (None,) * asked.ndim, PLAIN))
    return solve(operands, [Output(operands[0].labels if isinstance(elements, TensorSpec) else ())])


@rule("equal", "input other", decomposed=True, flat="as is")
def _equal(x: Any, other: Any) -> bool:
    """Whether shapes and all elements are the same: a Python bool, equal on all ranks."""
    return tuple(x.shape) == tuple(other.shape) and bool((x == other).all())


@rule("where", "condition input other", flat="elementwise")
def _where(call: OpCall) -> Strategy | Composite:
    if len(call.arguments) == 1:
        return Composite(lambda condition: condition.nonzero(as_tuple=True))
    # the condition is known by its type: it comes first in where(condition, x, y), second in x.where(condition, y)
    flag = get_platform().ops.named_dtypes["bool"]
    roles = [PLAIN if spec.dtype is flag else ADDEND for spec in call.specs]
    return elementwise(call, roles if roles.count(ADDEND) == 2 else [PLAIN] * len(call.specs))


@rule("masked_fill", "input mask value", flat="elementwise")
def _masked_fill(call: OpCall) -> Strategy:
    return elementwise(call, [PLAIN] * len(call.specs))


@rule("cpu", "input", flat="elementwise")
@rule(
    "to float double half bfloat16 int long bool short byte char chalf cfloat cdouble type_as",
    "input dtype",
    flat="elementwise",
)
def _cast(call: OpCall) -> Strategy:
    """A cast to a wider floating type is linear and keeps a pending sum; one that rounds or truncates must not come first."""
    tensors = get_platform().tensors
    source = call.specs[0].dtype
    target = _target_dtype(call)
    if len(call.specs) == 2:  # to(other), type_as(other): only the other's element type matters
        alone = _cast(OpCall(call.name, {"input": call.specs[0], "dtype": call.specs[1].dtype}, call.specs[:1]))
        return Strategy((*alone.layouts, call.specs[1].layout), alone.outputs, complete=frozenset({0}))
    # float16 and bfloat16 are equally long, and neither holds the other's values
    widening = tensors.is_floating(target) and (
        not tensors.is_floating(source) or tensors.itemsize(target) > tensors.itemsize(source)
    )
    if target is source or widening:
        # complex numbers have no order: a pending extremum must be settled before
        keeps = {"sum", "avg"} if "complex" in tensors.dtype_name(target) else {"sum", "avg", "max", "min"}
        return elementwise(call, [FACTOR], keeps=frozenset(keeps))
    return elementwise(call, [PLAIN])


@rule("copy", "input src non_blocking", flat="elementwise")
def _copy(call: OpCall) -> Strategy:
    return elementwise(call, [ADDEND] * len(call.specs), keeps=frozenset({"sum", "avg", "max", "min"}))


@rule("zero", "input", flat="elementwise")
def _zero(call: OpCall) -> Strategy:
    return elementwise(call, [FACTOR])


@rule("fill", "input value", flat="elementwise")
def _fill(call: OpCall) -> Strategy:
    return elementwise(call, [PLAIN] * len(call.specs))


@rule("zeros_like ones_like empty_like", "input dtype", flat="elementwise")
@rule("full_like", "input fill_value dtype", flat="elementwise")
def _like(call: OpCall) -> Strategy:
    """A new tensor of the operand's shape and cuts; nothing is read, so nothing is reduced."""
    spec = call.specs[0]
    return Strategy((spec.layout,), ((spec.layout.gradient, tuple(spec.shape)),))


def _target_dtype(call: OpCall) -> Any:
    names = get_platform().ops.named_dtypes
    if call.name in names:
        return names[call.name]
    target = call.get("dtype")
    return call.specs[0].dtype if target is None else target
