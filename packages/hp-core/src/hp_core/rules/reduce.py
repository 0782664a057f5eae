"""Reductions: a reduced dim that is cut leaves a pending reduction instead of communicating at once."""

from __future__ import annotations

from math import prod
from typing import Any

from hp_core.platform import get_platform
from hp_core.rules.registry import rule
from hp_core.rules.rule import FACTOR, PLAIN, OpCall, Operand, Output, Strategy, solve
from hp_core.rules.spec import TensorSpec

__all__ = ["root", "sum_of_squares"]


@rule("sum nansum", "input dim keepdim dtype")
def _sum(call: OpCall) -> Strategy:
    return _reduction(call, "sum", FACTOR if call.name == "sum" else PLAIN)


@rule("count_nonzero", "input dim")
def _count(call: OpCall) -> Strategy:
    return _reduction(call, "sum", PLAIN)


@rule("mean", "input dim keepdim dtype")
def _mean(call: OpCall) -> Strategy:
    """Each rank divides its own sum by the global count, so uneven pieces weigh right."""
    strategy = _reduction(call, "sum", FACTOR)
    spec, dims = call.specs[0], call.dims()
    if _cut(strategy, dims):
        strategy.local = "mean_share"
        strategy.bound = {
            "dim": dims,
            "keepdim": bool(call.get("keepdim", False)),
            "dtype": call.get("dtype"),
            "count": prod(spec.shape[d] for d in dims),
        }
    return strategy


@rule("amax amin", "input dim keepdim")
def _extremum(call: OpCall) -> Strategy:
    return _reduction(call, call.name[1:], PLAIN)


@rule("max min", "input dim keepdim")
def _max(call: OpCall) -> Strategy:
    """Of all elements; along a dim with indices, which needs it whole; or elementwise of two tensors."""
    from hp_core.rules.elementwise import elementwise

    second = call.get("dim")
    if isinstance(second, TensorSpec):
        return elementwise(call, [PLAIN, PLAIN])
    if second is None:
        return _reduction(call, call.name, PLAIN)
    strategy = _whole_reduction(call)
    return Strategy(strategy.layouts, strategy.outputs * 2)


@rule("prod all any argmax argmin logsumexp median", "input dim keepdim")
def _whole_dims(call: OpCall) -> Strategy:
    strategy = _whole_reduction(call)
    if call.name == "median" and call.get("dim") is not None:
        return Strategy(strategy.layouts, strategy.outputs * 2)
    return strategy


@rule("std var", "input dim unbiased keepdim correction")
def _deviation(call: OpCall) -> Strategy:
    """The second positional argument is `dim`, or `unbiased` if it is a bool."""
    if isinstance(call.get("dim"), bool):
        call = OpCall(call.name, {**call.arguments, "dim": None}, call.specs)
    return _whole_reduction(call)


@rule("allclose", "input other rtol atol equal_nan", sees_floats=True, decomposed=True)
def _allclose(x, other, rtol=1e-05, atol=1e-08, equal_nan=False):  # type: ignore[no-untyped-def]
    """Whether all elements are close: a Python bool, equal on all ranks."""
    return bool(x.isclose(other, rtol, atol, equal_nan).all())


@rule("vector_norm", "input ord dim keepdim dtype", sees_floats=True, decomposed=True)
def _vector_norm(x, ord=2, dim=None, keepdim=False, dtype=None):  # type: ignore[no-untyped-def]
    """The p-norm as pending sum (or max) of |x|^p, so that nothing is gathered. Half precision is summed in float32."""
    x = x if dtype is None else x.to(dtype)
    narrow = _is_narrow(x)
    magnitude = (x.float() if narrow else x).abs()
    dims = tuple(range(x.ndim)) if dim is None or dim == () else dim
    if ord == float("inf"):
        result = magnitude.amax(dims, keepdim)
    elif ord == float("-inf"):
        result = magnitude.amin(dims, keepdim)
    elif ord == 0:
        result = (magnitude != 0).sum(dims, keepdim).to(magnitude.dtype)
    elif ord == 1:
        result = magnitude.sum(dims, keepdim)
    elif ord == 2:
        result = root((magnitude * magnitude).sum(dims, keepdim), 2)
    else:
        result = root(magnitude.pow(ord).sum(dims, keepdim), ord)
    return result.to(x.dtype) if narrow else result


def sum_of_squares(x: Any) -> Any:
    """Over all elements; of a tensor that is cut, a sum that stays pending. Half precision is summed in float32."""
    wide = x.float() if _is_narrow(x) else x
    magnitude = wide.abs()
    return (magnitude * magnitude).sum()


def root(total: Any, degree: float) -> Any:
    """The root of a sum of powers; its gradient at 0 is 0, as that of the dense norm."""
    total = total.reduce_partial()
    zero = total == 0 if total.requires_grad else None
    if zero is not None:
        total = total.masked_fill(zero, 1)
    result = total.sqrt() if degree == 2 else total.pow(1.0 / degree)
    return result if zero is None else result.masked_fill(zero, 0)


def _is_narrow(x: Any) -> bool:
    tensors = get_platform().tensors
    return tensors.is_floating(x.dtype) and tensors.itemsize(x.dtype) < 4


@rule("norm", "input p dim keepdim dtype", sees_floats=True, decomposed=True)
def _norm(x, p=2, dim=None, keepdim=False, dtype=None):  # type: ignore[no-untyped-def]
    """The p-norm over all elements or along dims; "fro" is the 2-norm."""
    return _vector_norm(x, 2 if p in ("fro", None) else p, dim, keepdim, dtype)


@rule("normalize", "input p dim eps", sees_floats=True, decomposed=True)
def _normalize(x, p=2.0, dim=1, eps=1e-12):  # type: ignore[no-untyped-def]
    """Divided by the p-norm along a dim, which need not be whole."""
    return x / _vector_norm(x, p, dim, True).clamp_min(eps)


def _reduction(call: OpCall, reduce_op: str, role: str) -> Strategy:
    spec, dims = call.specs[0], call.dims()
    labels = tuple(None if d in dims and reduce_op != "sum" and _some_empty(spec, d) else d for d in range(spec.ndim))
    return solve(
        [Operand(spec, labels, role)], [Output(_result(call, spec, dims))], reduced=dict.fromkeys(dims, reduce_op)
    )


def _whole_reduction(call: OpCall) -> Strategy:
    spec, dims = call.specs[0], call.dims()
    labels = tuple(None if d in dims else d for d in range(spec.ndim))
    return solve([Operand(spec, labels, PLAIN)], [Output(_result(call, spec, dims))])


def _result(call: OpCall, spec: TensorSpec, dims: tuple[int, ...]) -> tuple[int | None, ...]:
    if call.get("keepdim"):
        return tuple(None if d in dims else d for d in range(spec.ndim))
    return tuple(d for d in range(spec.ndim) if d not in dims)


def _cut(strategy: Strategy, dims: tuple[int, ...]) -> bool:
    return any(strategy.layouts[0].axes_of(d) for d in dims)


def _some_empty(spec: TensorSpec, dim: int) -> bool:
    """Whether some rank holds nothing along `dim`; an extremum of nothing doesn't exist."""
    mesh = spec.layout.mesh
    boxes = (spec.layout.bounds_at(tuple(spec.shape), mesh.require_coordinate(rank)) for rank in mesh.rank_list)
    return bool(spec.layout.axes_of(dim)) and any(box[dim][0] == box[dim][1] for box in boxes)
