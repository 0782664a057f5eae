"""Taking parts of a tensor by position: indexing with integers and slices, select, narrow, and ops along a whole dim."""

from __future__ import annotations

from typing import Any

from hp_core.errors import ShardingRuleError
from hp_core.rules.registry import rule
from hp_core.rules.rule import FACTOR, PLAIN, OpCall, Operand, Output, OutsideRule, Strategy, solve
from hp_core.rules.spec import TensorSpec
from hp_core.rules.view import ANY_PENDING

__all__: list[str] = []


@rule("getitem", "input index")
def _getitem(call: OpCall) -> Strategy:
    """Basic indexing: an indexed dim must be whole; `:` keeps its cut."""
    spec = call.specs[0]
    index = call.get("index")
    entries: list[Any] = list(index) if isinstance(index, tuple) else [index]
    for entry in entries:
        if not (entry is None or entry is Ellipsis or isinstance(entry, (slice, int))) or isinstance(entry, bool):
            raise OutsideRule(
                f"indexing a DTensor with {type(entry).__name__} has no rule; use index_select, gather or where, or index "
                f".full_tensor()."
            )
    used = sum(entry is not None and entry is not Ellipsis for entry in entries)
    if used > spec.ndim:
        raise ShardingRuleError(f"too many indices {index!r} for shape {tuple(spec.shape)}.")
    fill = [slice(None)] * (spec.ndim - used)
    at = next((i for i, entry in enumerate(entries) if entry is Ellipsis), None)
    entries = entries + fill if at is None else entries[:at] + fill + entries[at + 1 :]

    labels: list[int | None] = []
    result: list[int | None] = []
    for entry in entries:
        if entry is None:
            result.append(None)
            continue
        dim = len(labels)
        size = spec.shape[dim]
        if isinstance(entry, slice):
            whole = entry.indices(size) == (0, size, 1)
            labels.append(dim if whole else None)
            result.append(dim if whole else None)
        else:
            if not -size <= entry < size:
                raise IndexError(f"index {entry} is out of bounds for dim {dim} of size {size}.")
            labels.append(None)
    return solve([Operand(spec, tuple(labels), FACTOR)], [Output(tuple(result))], keeps=ANY_PENDING)


@rule("select", "input dim index")
def _select(call: OpCall) -> Strategy:
    spec, dim = call.specs[0], call.dim()
    labels = tuple(None if d == dim else d for d in range(spec.ndim))
    return solve([Operand(spec, labels, FACTOR)], [Output(labels[:dim] + labels[dim + 1 :])], keeps=ANY_PENDING)


@rule("narrow", "input dim start length")
def _narrow(call: OpCall) -> Strategy:
    return _whole(call, (call.dim(),), ANY_PENDING)


@rule("flip", "input *dims")
def _flip(call: OpCall) -> Strategy:
    given = call.get("dims", ())
    given = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    return _whole(call, tuple(dim % call.specs[0].ndim for dim in given), ANY_PENDING)


@rule("roll", "input shifts dims")
def _roll(call: OpCall) -> Strategy:
    return _whole(call, call.dims("dims"), ANY_PENDING)


@rule("tril triu", "input diagonal")
def _triangle(call: OpCall) -> Strategy:
    ndim = call.specs[0].ndim
    return _whole(call, (ndim - 2, ndim - 1), frozenset({"sum", "avg"}))


@rule("cumsum", "input dim dtype")
def _cumsum(call: OpCall) -> Strategy:
    return _whole(call, (call.dim(),), frozenset({"sum", "avg"}))


@rule("cumprod logcumsumexp", "input dim dtype")
def _cumprod(call: OpCall) -> Strategy:
    return _whole(call, (call.dim(),), frozenset())


@rule("index_select", "input dim index")
def _index_select(call: OpCall) -> Strategy:
    spec, dim = call.spec("input"), call.dim()
    labels = tuple(None if d == dim else d for d in range(spec.ndim))
    result = tuple("i" if d == dim else d for d in range(spec.ndim))
    return solve([Operand(spec, labels, FACTOR), Operand(call.spec("index"), ("i",), PLAIN)], [Output(result)])


@rule("gather", "input dim index")
def _gather(call: OpCall) -> Strategy:
    """Other dims may be cut where input and index are equally long."""
    spec, index, dim = call.spec("input"), call.spec("index"), call.dim()
    alike = [d != dim and spec.shape[d] == index.shape[d] for d in range(spec.ndim)]
    source = tuple(d if alike[d] else None for d in range(spec.ndim))
    result = tuple(d if alike[d] else "i" if d == dim else None for d in range(spec.ndim))
    return solve([Operand(spec, source, FACTOR), Operand(index, result, PLAIN)], [Output(result)])


@rule("sort", "input dim descending stable")
@rule("topk", "input k dim largest sorted")
@rule("cummax cummin", "input dim")
def _sorted(call: OpCall) -> Strategy:
    spec, dim = call.spec("input"), call.dim(default=-1)
    labels = tuple(None if d == dim else d for d in range(spec.ndim))
    return solve([Operand(spec, labels, PLAIN)], [Output(labels), Output(labels)])


@rule("argsort", "input dim descending")
def _argsort(call: OpCall) -> Strategy:
    return _whole(call, (call.dim(default=-1),), frozenset())


def _whole(call: OpCall, dims: tuple[int, ...], keeps: frozenset[str]) -> Strategy:
    spec: TensorSpec = call.specs[0]
    labels = tuple(None if d in dims else d for d in range(spec.ndim))
    return solve([Operand(spec, labels, FACTOR if keeps else PLAIN)], [Output(labels)], keeps=keeps)
