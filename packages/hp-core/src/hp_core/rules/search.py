"""Finding and counting: nonzero, unique, bincount, histc, searchsorted, masked_select.

Results whose size depends on values are replicated. Counts of a cut tensor are counted by each rank, in a pending sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_core.platform import get_platform
from hp_core.rules.registry import rule
from hp_core.rules.rule import PLAIN, OpCall, Operand, Output, Strategy, solve
from hp_core.rules.spec import TensorSpec

__all__ = ["positions_of"]


@rule("nonzero", "input as_tuple", decomposed=True)
def _nonzero(input: Any, as_tuple: bool = False) -> Any:
    return positions_of(input) if as_tuple else _on_whole("nonzero", input)


@rule("argwhere", "input", decomposed=True)
def _argwhere(input: Any) -> Any:
    return _on_whole("nonzero", input)


def positions_of(input: Any) -> Any:
    """The indices of all nonzero elements, one replicated DTensor for each dim."""
    return _on_whole("nonzero", input, as_tuple=True)


@rule("unique", "input sorted return_inverse return_counts dim", decomposed=True)
def _unique(input: Any, **options: Any) -> Any:
    return _on_whole("unique", input, **options)


@rule("unique_consecutive", "input return_inverse return_counts dim", decomposed=True)
def _unique_consecutive(input: Any, **options: Any) -> Any:
    return _on_whole("unique_consecutive", input, **options)


@rule("masked_select", "input mask", decomposed=True)
def _masked_select(input: Any, mask: Any) -> Any:
    ndim = max(input.ndim, mask.ndim)
    sizes = [(1,) * (ndim - one.ndim) + tuple(one.shape) for one in (input, mask)]
    shape = [a if b == 1 else b for a, b in zip(*sizes, strict=True)]
    return input.expand(shape)[mask.expand(shape)]


@rule("bincount", "input weights minlength", decomposed=True)
def _bincount(input: Any, weights: Any = None, minlength: int = 0) -> Any:
    """The number of bins must be known first, which waits for the largest value."""
    input = input.reduce_partial()
    bins = max(int(input.max()) + 1 if input.numel() else 0, minlength)
    operands = [input] if weights is None else [input, weights.redistribute(input.layout)]
    return _counted("bincount", operands, minlength=bins)


@rule("histc", "input bins min max", decomposed=True)
def _histc(input: Any, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    """Without a range, from the smallest to the largest value, which waits for them."""
    input = input.detach().reduce_partial()
    if min == max and input.numel():
        min, max = input.min().item(), input.max().item()
        if min == max:
            min, max = min - 1, max + 1
    return _counted("histc", [input], bins=bins, min=min, max=max)


@rule("searchsorted", "sorted_sequence input out_int32 right side sorter")
def _searchsorted(call: OpCall) -> Strategy:
    """A sequence may be cut: how many of it are smaller is the sum over its pieces."""
    sequence, values, sorter = call.spec("sorted_sequence"), call.get("input"), call.get("sorter")
    rows = tuple(range(sequence.ndim - 1))
    last = None if isinstance(sorter, TensorSpec) else "piece"
    operands = [Operand(sequence, (*rows, last), PLAIN)]
    result: tuple[Any, ...] = ()
    if isinstance(values, TensorSpec):
        result = (*rows, "value") if rows else tuple(("value", d) for d in range(values.ndim))
        operands.append(Operand(values, result, PLAIN))
    if isinstance(sorter, TensorSpec):
        operands.append(Operand(sorter, (*rows, None), PLAIN))
    return solve(operands, [Output(result)], reduced={"piece": "sum"})


@rule("bucketize", "input boundaries out_int32 right")
def _bucketize(call: OpCall) -> Strategy:
    values, boundaries = call.get("input"), call.spec("boundaries")
    operands = []
    result: tuple[Any, ...] = ()
    if isinstance(values, TensorSpec):
        result = tuple(("value", d) for d in range(values.ndim))
        operands.append(Operand(values, result, PLAIN))
    operands.append(Operand(boundaries, ("piece",), PLAIN))
    return solve(operands, [Output(result)], reduced={"piece": "sum"})


def _on_whole(op: str, input: Any, **options: Any) -> Any:
    """An op whose result's size depends on values, run by every rank on the whole tensor; its results are replicated."""
    replicated = input.layout.replicated
    result = get_platform().ops.local(op)(input.full_tensor(), **options)
    if not isinstance(result, tuple):
        return type(input).from_local(result, replicated)
    return tuple(type(input).from_local(one, replicated) for one in result)


def _counted(op: str, operands: list[Any], **options: Any) -> Any:
    """Counts of this rank's own elements, the addends of a pending sum."""
    layout = operands[0].layout
    local: Callable[..., Any] = get_platform().ops.local(op)
    counts = local(*[operand.detach().to_local() for operand in operands], **options)
    pending = layout.replicated.with_partials(tuple((axis, "sum") for axis in sorted(layout.sharded_axes)))
    return type(operands[0]).from_local(counts, pending)
