"""Reductions: a reduced dim that is cut leaves a pending reduction, or is reduced by messages of the reduced shape.

Nothing here gathers a cut dim. Where one op can't say it, it is computed from others (a `Composite`).
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

from hp_core.platform import get_platform
from hp_core.rules.pieces import is_cut, over_ranks
from hp_core.rules.registry import rule
from hp_core.rules.rule import FACTOR, PLAIN, Composite, OpCall, Operand, Output, Strategy, solve
from hp_core.rules.spec import TensorSpec

__all__ = [
    "central_moments",
    "dims_of",
    "extremum_of_cut",
    "is_narrow",
    "reduced_labels",
    "reduced_together",
    "root",
    "sum_of_squares",
    "whole_reduction",
    "widened",
]


@rule("sum nansum", "input dim keepdim dtype", flat="reduces")
def _sum(call: OpCall) -> Strategy:
    return _reduction(call, "sum", FACTOR if call.name == "sum" else PLAIN)


@rule("count_nonzero", "input dim", flat="reduces")
def _count(call: OpCall) -> Strategy:
    return _reduction(call, "sum", PLAIN)


@rule("mean", "input dim keepdim dtype", flat="reduces")
def _mean(call: OpCall) -> Strategy:
    """Each rank divides its own sum by the global count, so uneven pieces weigh right."""
    strategy = _reduction(call, "sum", FACTOR)
    spec, dims = call.specs[0], call.dims()
    if any(strategy.layouts[0].axes_of(d) for d in dims):
        strategy.local = "mean_share"
        strategy.bound = {
            "dim": dims,
            "keepdim": bool(call.get("keepdim", False)),
            "dtype": call.get("dtype"),
            "count": prod(spec.shape[d] for d in dims),
        }
    return strategy


@rule("nanmean", "input dim keepdim dtype", flat="reduces")
def _nanmean(call: OpCall) -> Strategy | Composite:
    return Composite(_nanmean_of_cut) if is_cut(call.specs[0], call.dims()) else whole_reduction(call)


def _nanmean_of_cut(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    x, dims = x.reduce_partial(), dims_of(x, dim)
    return x.nansum(dims, keepdim, dtype=dtype) / (~x.isnan()).sum(dims, keepdim)


@rule("all any", "input dim keepdim", flat="reduces")
def _logical(call: OpCall) -> Strategy:
    """Of an empty piece they are what changes nothing."""
    return _reduction(call, "min" if call.name == "all" else "max", PLAIN)


@rule("allclose", "input other rtol atol equal_nan", sees_floats=True, decomposed=True, flat="as is")
def _allclose(x, other, rtol=1e-05, atol=1e-08, equal_nan=False):  # type: ignore[no-untyped-def]
    """Whether all elements are close: a Python bool, equal on all ranks."""
    return bool(x.isclose(other, rtol, atol, equal_nan).all())


# -- extrema --------------------------------------------------------------------------------------------------------


@rule("amax amin", "input dim keepdim", flat="reduces")
def _extremum(call: OpCall) -> Strategy | Composite:
    if not is_cut(call.specs[0], call.dims()):
        return whole_reduction(call)
    return Composite(partial(extremum_of_cut, largest=call.name == "amax", nan_ties=False))


@rule("max min", "input dim keepdim", flat="reduces")
def _max(call: OpCall) -> Strategy | Composite:
    """Of all elements; along a dim with indices; or elementwise of two tensors."""
    from hp_core.rules.elementwise import elementwise

    second = call.get("dim")
    if isinstance(second, TensorSpec):
        return elementwise(call, [PLAIN, PLAIN])
    if second is None:
        if not is_cut(call.specs[0], call.dims()):
            return whole_reduction(call)
        return Composite(partial(extremum_of_cut, largest=call.name == "max", nan_ties=True))
    dim = call.dim()
    if not is_cut(call.specs[0], (dim,)):
        return whole_reduction(call, outputs=2)
    strategy, group = over_ranks(
        call,
        (dim,),
        reduced_labels(call, (dim,)),
        "selection_over_ranks",
        outputs=2,
        dim=dim,
        keepdim=bool(call.get("keepdim", False)),
        largest=call.name == "max",
    )
    if group is not None:
        strategy.bound["start"] = strategy.layouts[0].bounds(tuple(call.specs[0].shape))[dim][0]
    return strategy


def extremum_of_cut(x: Any, dim: Any = None, keepdim: bool = False, *, largest: bool, nan_ties: bool) -> Any:
    """Pending where no gradient is asked for; with one, settled, since each rank must know of the ties of all others."""
    platform = get_platform()
    dims = dims_of(x, dim)
    if platform.autograd.needs_gradient(x):
        return platform.ops.local("extremum_over_ranks")(x, dims, keepdim, largest, nan_ties)
    return platform.ops.local("extremum_share")(x, dims, keepdim, largest)


@rule("extremum_share", "input dim keepdim largest", flat="reduces")
def _extremum_share(call: OpCall) -> Strategy:
    """The platform's extremum that is pending over the ranks of the pieces."""
    largest = bool(call.get("largest"))
    strategy = _reduction(call, "max" if largest else "min", PLAIN)
    strategy.local = call.name
    strategy.bound = {"dim": call.dims(), "keepdim": bool(call.get("keepdim")), "largest": largest}
    return strategy


@rule("extremum_over_ranks", "input dim keepdim largest nan_ties", flat="reduces")
def _extremum_over_ranks(call: OpCall) -> Strategy:
    """The platform's extremum that is equal on all ranks, with the gradient of ties as in the dense op."""
    dims = call.dims()
    arguments: dict[str, Any] = {name: bool(call.get(name)) for name in ("keepdim", "largest", "nan_ties")}
    strategy, _ = over_ranks(call, dims, reduced_labels(call, dims), call.name, dim=dims, **arguments)
    strategy.bound.pop("position", None)
    return strategy


@rule("aminmax", "input dim keepdim", flat="reduces")
def _aminmax(call: OpCall) -> Strategy:
    dims = call.dims()
    if not is_cut(call.specs[0], dims):
        return whole_reduction(call, outputs=2)
    keepdim = bool(call.get("keepdim", False))
    strategy, _ = over_ranks(
        call, dims, reduced_labels(call, dims), "aminmax_over_ranks", outputs=2, dim=dims, keepdim=keepdim
    )
    strategy.bound.pop("position", None)
    return strategy


@rule("argmax argmin", "input dim keepdim")
def _argument(call: OpCall) -> Strategy:
    dims, dim = call.dims(), call.get("dim")
    if not is_cut(call.specs[0], dims):
        return whole_reduction(call)
    strategy, group = over_ranks(
        call,
        dims,
        reduced_labels(call, dims),
        "argument_over_ranks",
        dim=None if dim is None else dims[0],
        keepdim=bool(call.get("keepdim", False)),
        largest=call.name == "argmax",
    )
    if group is not None:
        shape = tuple(call.specs[0].shape)
        strategy.bound |= {
            "starts": tuple(start for start, _ in strategy.layouts[0].bounds(shape)),
            "shape": shape,
        }
    return strategy


# -- products, deviations, logarithms of sums -------------------------------------------------------------------------


@rule("prod", "input dim keepdim dtype", flat="reduces")
def _prod(call: OpCall) -> Strategy:
    dims = call.dims()
    if not is_cut(call.specs[0], dims):
        return whole_reduction(call)
    strategy, _ = over_ranks(
        call,
        dims,
        reduced_labels(call, dims),
        "product_over_ranks",
        dim=None if call.get("dim") is None else dims[0],
        keepdim=bool(call.get("keepdim", False)),
        dtype=call.get("dtype"),
    )
    return strategy


@rule("std var std_mean var_mean", "input dim unbiased keepdim correction")
def _deviation(call: OpCall) -> Strategy | Composite:
    """The second positional argument is `dim`, or `unbiased` if it is a bool."""
    name = call.name
    if isinstance(call.get("dim"), bool):
        call = OpCall(name, {**call.arguments, "dim": None}, call.specs)
    spec = call.specs[0]
    is_complex = get_platform().tensors.dtype_name(spec.dtype).startswith("complex")
    if is_complex or not is_cut(spec, call.dims()):
        return whole_reduction(call, outputs=2 if name.endswith("_mean") else 1)
    return Composite(partial(_deviation_of_cut, name=name))


def _deviation_of_cut(
    x: Any, dim: Any = None, unbiased: bool | None = None, keepdim: bool = False, correction: Any = None, *, name: str
) -> Any:
    """The mean first, then squared deviations from it, so that a large offset costs no digits."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if correction is None:
        correction = 0 if unbiased is False else 1
    dims = dims_of(x, dim)
    mean, squares, count = central_moments(x, dims, keepdim)
    result = squares / max(count - correction, 0)
    if name.startswith("std"):
        result = root(result, 2)
    result = result.to(x.dtype)
    return (result, mean.to(x.dtype).reshape(result.shape)) if name.endswith("_mean") else result


@rule("logsumexp", "input dim keepdim")
def _logsumexp(call: OpCall) -> Strategy | Composite:
    return Composite(_logsumexp_of_cut) if is_cut(call.specs[0], call.dims()) else whole_reduction(call)


def _logsumexp_of_cut(x: Any, dim: Any, keepdim: bool = False) -> Any:
    """log(sum(exp(x - m))) + m, where a maximum that isn't finite is not subtracted."""
    dims = dims_of(x, dim)
    wide = widened(x).reduce_partial()
    if not get_platform().tensors.is_floating(wide.dtype):
        wide = wide.float()
    largest = wide.detach().amax(dims, True).reduce_partial()
    largest = largest.masked_fill(largest.isinf(), 0)
    total = (wide - largest).exp().sum(dims, keepdim).log() + largest.reshape(
        tuple(1 if d in dims else n for d, n in enumerate(x.shape) if keepdim or d not in dims)
    )
    return total.to(x.dtype) if is_narrow(x) else total


def central_moments(x: Any, dims: tuple[int, ...], keepdim: bool) -> tuple[Any, Any, int]:
    """Mean over dims (kept, with size 1), sum of squared deviations from it, and the number of elements of each.

    The mean that is subtracted is rounded; what that adds to the squares is taken off again, so that float32 data far from
    zero lose nothing. Half precision is widened.
    """
    wide = widened(x).reduce_partial()
    count = prod(wide.shape[d] for d in dims)
    mean = wide.mean(dims, True).reduce_partial()
    deviation = wide - mean.detach()
    squares, rest = reduced_together((deviation * deviation).sum(dims, keepdim), deviation.sum(dims, keepdim))
    return mean, squares - rest * rest / max(count, 1), count


def reduced_together(*tensors: Any) -> Any:
    """Tensors of one shape with their pending sums done, in one message for all."""
    return get_platform().ops.local("stack")(list(tensors), 0).reduce_partial().unbind(0)


def sum_of_squares(x: Any) -> Any:
    """Over all elements; of a tensor that is cut, a sum that stays pending. Half precision is summed in float32."""
    magnitude = widened(x).abs()
    return (magnitude * magnitude).sum()


def root(total: Any, degree: float) -> Any:
    """The root of a sum of powers; its gradient at 0 is 0, as that of the dense norm."""
    total = total.reduce_partial()
    zero = total == 0 if total.requires_grad else None
    if zero is not None:
        total = total.masked_fill(zero, 1)
    result = total.sqrt() if degree == 2 else total.pow(1.0 / degree)
    return result if zero is None else result.masked_fill(zero, 0)


def is_narrow(x: Any) -> bool:
    """Whether it is of a floating type of less than four bytes, in which sums lose too much."""
    tensors = get_platform().tensors
    return tensors.is_floating(x.dtype) and tensors.itemsize(x.dtype) < 4


def widened(x: Any) -> Any:
    """As float32, if it is narrower."""
    return x.float() if is_narrow(x) else x


def dims_of(x: Any, dim: Any) -> tuple[int, ...]:
    """One dim, several, or all (None, or none given), counted from the front."""
    if dim is None or dim == ():
        return tuple(range(x.ndim))
    return tuple(one % max(x.ndim, 1) for one in ((dim,) if isinstance(dim, int) else dim))


# -- shared by rules --------------------------------------------------------------------------------------------------


def whole_reduction(call: OpCall, *, dims: tuple[int, ...] | None = None, outputs: int = 1) -> Strategy:
    """The op itself, with the reduced dims whole."""
    spec, dims = call.specs[0], call.dims() if dims is None else dims
    labels = tuple(None if d in dims else d for d in range(spec.ndim))
    return solve([Operand(spec, labels, PLAIN)], [Output(reduced_labels(call, dims))] * outputs)


def reduced_labels(call: OpCall, dims: tuple[int, ...]) -> tuple[int | None, ...]:
    """Labels of the result of a reduction over `dims`, where dim d of the operand has label d."""
    ndim = call.specs[0].ndim
    if call.get("keepdim"):
        return tuple(None if d in dims else d for d in range(ndim))
    return tuple(d for d in range(ndim) if d not in dims)


def _reduction(call: OpCall, reduce_op: str, role: str) -> Strategy:
    spec, dims = call.specs[0], call.dims()
    return solve(
        [Operand(spec, tuple(range(spec.ndim)), role)],
        [Output(reduced_labels(call, dims))],
        reduced=dict.fromkeys(dims, reduce_op),
    )
