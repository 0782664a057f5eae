"""Order statistics: along a dim that is cut the top k are those of the ranks' own top k; all else needs the dim whole.

A median, a quantile or a sort depends on the rank of every element among all others: what it would save to find them
without a gather (several rounds of counting) is less than it costs at the sizes that occur.
"""

from __future__ import annotations

from hp_core.rules.pieces import has_empty_piece, is_cut, ordered_pieces, over_ranks
from hp_core.rules.reduce import reduced_labels, whole_reduction
from hp_core.rules.registry import rule
from hp_core.rules.rule import PLAIN, OpCall, Operand, Output, Strategy, solve
from hp_core.rules.spec import TensorSpec

__all__: list[str] = []


@rule("sort", "input dim descending stable")
def _sort(call: OpCall) -> Strategy:
    return _along_whole_dim(call, call.dim(default=-1), 2)


@rule("msort", "input")
def _msort(call: OpCall) -> Strategy:
    return _along_whole_dim(call, 0, 1)


@rule("argsort", "input dim descending stable")
def _argsort(call: OpCall) -> Strategy:
    return _along_whole_dim(call, call.dim(default=-1), 1)


@rule("topk", "input k dim largest sorted")
def _topk(call: OpCall) -> Strategy:
    """Equal elements may come from other places than in the dense op; the indices point at the values."""
    spec, dim, k = call.spec("input"), call.dim(default=-1), call.get("k")
    if not is_cut(spec, (dim,)):
        return _along_whole_dim(call, dim, 2)
    labels = tuple(None if d == dim else d for d in range(spec.ndim))
    strategy, group = over_ranks(
        call,
        (dim,),
        labels,
        "topk_over_ranks",
        outputs=2,
        k=k,
        dim=dim,
        largest=bool(call.get("largest", True)),
        sorted=bool(call.get("sorted", True)),
    )
    if group is not None:
        shape = tuple(spec.shape)
        strategy.bound["start"] = strategy.layouts[0].bounds(shape)[dim][0]
        pieces = ordered_pieces(strategy.layouts[0], shape, dim, group)
        strategy.bound["candidates"] = tuple((piece.place, min(k, piece.length)) for piece in pieces)
    return strategy


@rule("median nanmedian", "input dim keepdim")
def _median(call: OpCall) -> Strategy:
    return whole_reduction(call, outputs=1 if call.get("dim") is None else 2)


@rule("mode", "input dim keepdim")
@rule("kthvalue", "input k dim keepdim")
def _along_last_dim(call: OpCall) -> Strategy:
    return whole_reduction(call, dims=(call.dim(default=-1),), outputs=2)


@rule("quantile nanquantile", "input q dim keepdim interpolation")
def _quantile(call: OpCall) -> Strategy:
    """One result for a number; for a vector of them, results along a new first dim. The op refuses empty pieces."""
    spec, dims, q = call.spec("input"), call.dims(), call.get("q")
    labels = tuple(None if d in dims or has_empty_piece(spec, d) else d for d in range(spec.ndim))
    operands, result = [Operand(spec, labels, PLAIN)], reduced_labels(call, dims)
    if isinstance(q, TensorSpec):
        operands.append(Operand(q, (None,) * q.ndim, PLAIN))
        result = (*(None,) * q.ndim, *result)
    return solve(operands, [Output(result)])


def _along_whole_dim(call: OpCall, dim: int, outputs: int) -> Strategy:
    spec = call.spec("input")
    labels = tuple(None if d == dim else d for d in range(spec.ndim))
    return solve([Operand(spec, labels, PLAIN)], [Output(labels)] * outputs)
