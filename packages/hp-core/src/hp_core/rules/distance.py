"""Norms and distances: sums (or extrema) of powers, so a dim that is cut is not gathered.

Only spectral and nuclear norms need whole matrices, and pairwise distances whole vectors.
"""

from __future__ import annotations

from functools import partial
from math import inf
from typing import Any

from hp_core.errors import ShardingRuleError
from hp_core.rules.pieces import is_cut
from hp_core.rules.reduce import (
    dims_of,
    extremum_of_cut,
    is_narrow,
    reduced_together,
    root,
    whole_reduction,
    widened,
)
from hp_core.rules.registry import rule
from hp_core.rules.rule import PLAIN, Composite, OpCall, Operand, Output, Strategy, solve

__all__: list[str] = []


@rule("vector_norm", "input ord dim keepdim dtype", sees_floats=True, flat="reduces")
def _vector_norm(call: OpCall) -> Strategy | Composite:
    return Composite(_vector_norm_of_cut) if is_cut(call.specs[0], call.dims()) else whole_reduction(call)


@rule("norm", "input p dim keepdim dtype", sees_floats=True, flat="reduces")
def _norm(call: OpCall) -> Strategy | Composite:
    """The p-norm over all elements or along dims; "fro" is the 2-norm, "nuc" a norm of matrices."""
    if call.get("p") == "nuc":
        return whole_reduction(call, dims=_matrix_dims(call))
    return Composite(_norm_of_cut) if is_cut(call.specs[0], call.dims()) else whole_reduction(call)


@rule("linalg_norm", "input ord dim keepdim dtype", sees_floats=True, flat="as is")
def _linalg_norm(call: OpCall) -> Strategy | Composite:
    """Of vectors; or of matrices, if `ord` is given and there are two dims."""
    spec, ord = call.specs[0], call.get("ord")
    dims = call.dims()
    if ord is not None and (len(dims) == 2 if call.get("dim") is not None else spec.ndim == 2):
        return _of_matrices(call, dims)
    is_shared = spec.layout.flat is not None or is_cut(spec, dims)
    return Composite(_linalg_norm_of_cut) if is_shared else whole_reduction(call)


@rule("matrix_norm", "input ord dim keepdim dtype", sees_floats=True)
def _matrix_norm(call: OpCall) -> Strategy | Composite:
    return _of_matrices(call, _matrix_dims(call))


def _of_matrices(call: OpCall, dims: tuple[int, ...]) -> Strategy | Composite:
    spectral = call.get("ord", "fro") in ("nuc", 2, -2)
    if spectral or not is_cut(call.specs[0], dims):
        return whole_reduction(call, dims=dims)
    return Composite(_matrix_norm_of_cut)


def _matrix_dims(call: OpCall) -> tuple[int, ...]:
    return call.dims() if call.get("dim") is not None else (call.specs[0].ndim - 2, call.specs[0].ndim - 1)


def _vector_norm_of_cut(x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """The p-norm as pending sum (or max) of |x|^p. Half precision is summed in float32."""
    x = (x if dtype is None else x.to(dtype)).reduce_partial()
    magnitude = widened(x).abs()
    dims = dims_of(x, dim)
    if ord in (inf, -inf):
        result = extremum_of_cut(magnitude, dims, keepdim, largest=ord > 0, nan_ties=True)
    elif ord == 0:
        # ones and zeros that keep their place in the graph, as in the dense op, with a gradient of 0
        zero = magnitude == 0
        result = magnitude.masked_fill(~zero, 1).masked_fill(zero, 0).sum(dims, keepdim)
    elif ord == 1:
        result = magnitude.sum(dims, keepdim)
    elif ord == 2:
        result = root((magnitude * magnitude).sum(dims, keepdim), 2)
    else:
        result = root(magnitude.pow(ord).sum(dims, keepdim), ord)
    return result.to(x.dtype) if is_narrow(x) else result


def _norm_of_cut(x: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    return _vector_norm_of_cut(x, 2 if p in ("fro", None) else p, dim, keepdim, dtype)


def _linalg_norm_of_cut(x: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    return _vector_norm_of_cut(x, 2 if ord is None else ord, dim, keepdim, dtype)


def _matrix_norm_of_cut(x: Any, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, dtype: Any = None) -> Any:
    """Frobenius, or the largest (smallest) sum of a column (1, -1) or of a row (inf, -inf)."""
    rows, columns = dims_of(x, (-2, -1) if dim is None else dim)
    if ord == "fro":
        return _vector_norm_of_cut(x, 2, (rows, columns), keepdim, dtype)
    if ord not in (1, -1, inf, -inf):
        raise ShardingRuleError(f"matrix_norm: order {ord!r} is not one of 'fro', 'nuc', 1, -1, 2, -2, inf, -inf.")
    summed, compared = (rows, columns) if ord in (1, -1) else (columns, rows)
    sums = _vector_norm_of_cut(x, 1, summed, True, dtype)
    result = sums.amax(compared, True) if ord > 0 else sums.amin(compared, True)
    return result if keepdim else result.squeeze((rows, columns))


@rule("dist", "input other p", decomposed=True, flat="as is")
def _dist(x: Any, other: Any, p: float = 2.0) -> Any:
    return _norm_of_difference(x - other, p, None, False)


@rule("pairwise_distance", "x1 x2 p eps keepdim", decomposed=True)
def _pairwise_distance(x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Any:
    return _norm_of_difference(x1 - x2 + eps, p, -1, keepdim)


def _norm_of_difference(difference: Any, p: float, dim: int | None, keepdim: bool) -> Any:
    return difference.norm(p, dim, keepdim) if dim is not None else difference.norm(p)


@rule("normalize", "input p dim eps", sees_floats=True)
def _normalize(call: OpCall) -> Strategy | Composite:
    spec = call.specs[0]
    dims = call.dims() if call.get("dim") is not None else (call.dim(default=1),)
    if is_cut(spec, dims):
        return Composite(_normalize_of_cut)
    labels = tuple(None if d in dims else d for d in range(spec.ndim))
    return solve([Operand(spec, labels, PLAIN)], [Output(labels)])


def _normalize_of_cut(x: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12) -> Any:
    x = x.reduce_partial()
    return x / _vector_norm_of_cut(x, p, dim, True).clamp_min(eps)


@rule("renorm", "input p dim maxnorm")
def _renorm(call: OpCall) -> Composite:
    """Each slice along a dim scaled down to a norm of at most `maxnorm`."""
    return Composite(partial(_scaled_slices, inplace=call.inplace))


def _scaled_slices(x: Any, p: float, dim: int, maxnorm: float, *, inplace: bool) -> Any:
    if inplace:  # the backward needs the values from before
        x = x.clone()
    x = x.reduce_partial()
    others = tuple(d for d in range(x.ndim) if d != dim % x.ndim)
    norms = widened(x).norm(p, others, True)
    return x * (maxnorm / (norms + 1e-7)).masked_fill(norms <= maxnorm, 1.0).to(x.dtype)


@rule("cosine_similarity", "x1 x2 dim eps", sees_floats=True)
def _cosine_similarity(call: OpCall) -> Strategy | Composite:
    from hp_core.rules.elementwise import broadcast_labels

    labels, result, shape = broadcast_labels(call.specs)
    dim = call.dim(default=1, ndim=len(shape))
    cut = any(is_cut(spec, (dim - len(shape) + spec.ndim,)) for spec in call.specs if dim >= len(shape) - spec.ndim)
    if cut:
        return Composite(_cosine_similarity_of_cut)
    operands = [
        Operand(spec, tuple(None if label == dim else label for label in own), PLAIN)
        for spec, own in zip(call.specs, labels, strict=True)
    ]
    kept = tuple(d for d in result if d != dim)
    return solve(operands, [Output(kept, tuple(shape[d] for d in kept))])


def _cosine_similarity_of_cut(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """Dot product and both sums of squares in one message."""
    first, second = (widened(x).reduce_partial() for x in (x1, x2))
    ndim = max(first.ndim, second.ndim)
    products = first * second
    dim = dim % ndim
    shape = tuple(products.shape)
    first, second = first.expand(shape), second.expand(shape)
    dot, *squares = reduced_together(products.sum(dim), (first * first).sum(dim), (second * second).sum(dim))
    lengths = [root(total, 2).clamp_min(eps) for total in squares]
    result = dot / (lengths[0] * lengths[1])
    return result.to(x1.dtype) if is_narrow(x1) else result


@rule("cdist", "x1 x2 p compute_mode", sees_floats=True)
def _cdist(call: OpCall) -> Strategy:
    """All pairs of rows of two (batches of) matrices: the rows may be cut, their elements not."""
    from hp_core.rules.elementwise import broadcast_labels
    from hp_core.rules.spec import spec_of

    batches = [spec_of(spec.layout.replicated, tuple(spec.shape)[:-2], spec.dtype) for spec in call.specs]
    labels, result, shape = broadcast_labels(batches)
    rows = ("rows of x1", "rows of x2")
    operands = [
        Operand(spec, (*own, row, None), PLAIN) for spec, own, row in zip(call.specs, labels, rows, strict=True)
    ]
    sizes = tuple(spec.shape[-2] for spec in call.specs)
    return solve(operands, [Output((*result, *rows), (*shape, *sizes))])


@rule("pdist", "input p", sees_floats=True)
def _pdist(call: OpCall) -> Strategy:
    """Distances of all pairs of rows of one matrix, which must be whole."""
    return solve([Operand(call.specs[0], (None, None), PLAIN)], [Output((None,))])
