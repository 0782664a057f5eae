"""Writing by position: `x[...] = v`, index_put, scatter, index_add and their kin.

What is written to keeps its cuts. Each rank takes from the indices what falls into its own part; nothing of `x` moves.
Where values are added, cut indices stay cut too, and the result is a pending sum.
"""

from __future__ import annotations

from typing import Any

from hp_core.errors import ShardingRuleError
from hp_core.layout import Layout
from hp_core.platform import get_platform
from hp_core.rules.exchange import shared_rows
from hp_core.rules.index import as_slice
from hp_core.rules.registry import rule
from hp_core.rules.rule import ADDEND, PLAIN, Composite, OpCall, Operand, Output, Strategy, solve
from hp_core.rules.spec import TensorSpec
from hp_core.rules.subscript import Subscript, needs_spelling, read_subscript, settled, spelt

__all__: list[str] = []


@rule("setitem", "input index value")
def _setitem(call: OpCall) -> Strategy | Composite:
    """In place; the value is a number or a DTensor in any layout."""
    index, value = call.get("index"), call.get("value")
    if isinstance(value, (list, tuple)):
        raise ShardingRuleError(f"setitem: the value {value!r} must be a number or a DTensor.")
    if not isinstance(value, TensorSpec) or needs_spelling(index):
        return Composite(_spelt_write)
    subscript = read_subscript("setitem", index, call.specs[0].shape)
    if subscript.has_loose_scalar:
        return Composite(_settled_write)
    only = subscript.entries[0] if subscript.entries else None
    rest = subscript.entries[1:]
    if only is not None and only.kind == "mask" and value.ndim <= len(rest) and all(map(subscript.is_whole, rest)):
        return Composite(_write_where)  # the value doesn't depend on how many are True
    return _write(call, subscript, value, False)


@rule("index_put", "input indices values accumulate")
def _index_put(call: OpCall) -> Strategy | Composite:
    if not call.inplace:
        return Composite(_index_put_copy)
    index = tuple(slice(None) if entry is None else entry for entry in call.get("indices"))
    subscript = read_subscript("index_put", index, call.specs[0].shape)
    return _write(call, subscript, call.spec("values"), bool(call.get("accumulate", False)))


@rule("scatter scatter_add scatter_reduce", "input dim index src reduce include_self value")
def _scatter(call: OpCall) -> Strategy | Composite:
    """Index and source may be smaller than the input, or the source larger than the index, in any dim."""
    spec, index, dim = call.spec("input"), call.spec("index"), call.dim()
    source, reduce = call.get("src", call.get("value")), call.get("reduce")
    if not isinstance(source, TensorSpec):
        return Composite(_scatter_number)
    if call.name == "scatter" and reduce is not None:
        return Composite(_scatter_reduced)
    if not index.ndim == spec.ndim == source.ndim:
        raise ShardingRuleError(
            f"{call.name}: input, index and source must have equally many dims, got shapes {tuple(spec.shape)}, "
            f"{tuple(index.shape)} and {tuple(source.shape)}."
        )
    adds = call.name == "scatter_add" or (reduce == "sum" and call.get("include_self", True))
    labels = tuple(range(spec.ndim))
    where: list[Any] = []
    what: list[Any] = []
    for d in labels:
        if d == dim:
            same = adds and index.shape[d] == source.shape[d]
            where.append("at" if same else None)
            what.append("at" if same else None)
        else:
            where.append(d if index.shape[d] == spec.shape[d] else None)
            what.append(d if source.shape[d] == spec.shape[d] == index.shape[d] else None)
    options = {name: call.arguments[name] for name in ("reduce", "include_self") if name in call.arguments}
    return _along(call, dim, labels, (index, tuple(where)), (source, tuple(what)), adds, options)


@rule("index_add", "input dim index source alpha")
@rule("index_copy", "input dim index source")
@rule("index_reduce", "input dim index source reduce include_self")
def _index_write(call: OpCall) -> Strategy | Composite:
    """Rows of the source go to the rows of the input that the index names."""
    spec, index, source, dim = call.spec("input"), call.spec("index"), call.spec("source"), call.dim()
    if call.get("alpha", 1) != 1:
        return Composite(lambda input, dim, index, source, alpha: input.index_add(dim, index, source * alpha))
    adds = call.name == "index_add"
    labels = tuple(range(spec.ndim))
    at = "at" if adds and index.ndim else None
    what = (
        tuple(at if d == dim else d for d in range(source.ndim)) if source.ndim == spec.ndim else (None,) * source.ndim
    )
    options = {name: call.arguments[name] for name in ("reduce", "include_self") if name in call.arguments}
    return _along(call, dim, labels, (index, (at,) * index.ndim), (source, what), adds, options)


@rule("index_fill", "input dim index value")
def _index_fill(call: OpCall) -> Composite:
    def fill(input: Any, dim: int, index: Any, value: Any) -> Any:
        rows = index.reshape(-1)
        shape = [rows.shape[0] if d == dim % max(input.ndim, 1) else size for d, size in enumerate(input.shape)]
        return input.index_copy(dim, rows, _as_dtensor(input, value).to(input.dtype).expand(shape))

    return Composite(fill)


@rule("masked_scatter", "input mask source")
def _masked_scatter(call: OpCall) -> Strategy:
    """The n-th True of the mask takes the n-th element of the source, so both must be whole; the input needn't be."""
    spec = call.spec("input")
    labels = tuple(range(spec.ndim))
    others = [Operand(other, (None,) * other.ndim, PLAIN) for other in call.specs[1:]]
    strategy = solve(
        [Operand(spec, labels, PLAIN), *others],
        [Output(labels, tuple(spec.shape))],
        pinned=0 if call.inplace else None,
    )
    if strategy.layouts[0].sharded_axes:
        strategy.local = "masked_scatter_own"
        strategy.bound = {
            "shape": tuple(spec.shape),
            "box": strategy.layouts[0].bounds(tuple(spec.shape)),
            "inplace": call.inplace,
        }
    return strategy


@rule("select_scatter", "input src dim index", decomposed=True)
def _select_scatter(input: Any, src: Any, dim: int, index: int) -> Any:
    return _with_part(input, dim, index, src)


@rule("slice_scatter", "input src dim start end step", decomposed=True)
def _slice_scatter(
    input: Any, src: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    return _with_part(input, dim, slice(start, end, step), src)


def _with_part(input: Any, dim: int, entry: Any, value: Any) -> Any:
    """A copy in which what the entry picks along `dim` is replaced."""
    copy = input.reduce_partial().clone()
    index = (*[slice(None)] * (dim % input.ndim), entry)
    copy[index] = value
    return copy


def _along(
    call: OpCall,
    dim: int,
    labels: tuple[Any, ...],
    index: tuple[TensorSpec, tuple[Any, ...]],
    source: tuple[TensorSpec, tuple[Any, ...]],
    adds: bool,
    options: dict[str, Any],
) -> Strategy:
    """The strategy of an op that writes along one dim of the input, which keeps its cuts.

    Args:
        call: the call.
        dim: the dim along which the index counts.
        labels: of the input.
        index: the index and its labels.
        source: what is written, and its labels.
        adds: whether the op adds, so that it is linear in input and source, and cut indices leave a pending sum.
        options: further arguments of the op.
    """
    spec = call.spec("input")
    role = ADDEND if adds else PLAIN
    strategy = solve(
        [Operand(spec, labels, role), Operand(*index, PLAIN), Operand(*source, role)],
        [Output(labels, tuple(spec.shape))],
        reduced={"at": "sum"},
        pinned=0 if call.inplace else None,
    )
    layout = strategy.layouts[0]
    crops, source_crops = (_crops(spec, dim, layout, *operand) for operand in (index, source))
    if layout.axes_of(dim) or crops or source_crops:
        strategy.local = "scatter_own"
        strategy.bound = {
            "op": call.name,
            "inplace": call.inplace,
            "dim": dim,
            "interval": layout.bounds(tuple(spec.shape))[dim],
            "size": spec.shape[dim],
            "crops": crops,
            "source_crops": source_crops,
            "options": options,
        }
    return strategy


def _crops(
    spec: TensorSpec, dim: int, layout: Layout, operand: TensorSpec, labels: tuple[Any, ...]
) -> tuple[tuple[int, int, int], ...]:
    """What of a whole operand falls into this rank's part of the input: (dim, first, number) for each other cut dim."""
    found = []
    if operand.ndim == spec.ndim:
        for d, (start, stop) in enumerate(layout.bounds(tuple(spec.shape))):
            if d != dim and labels[d] is None and layout.axes_of(d):
                first, last = min(start, operand.shape[d]), min(stop, operand.shape[d])
                found.append((d, first, last - first))
    return tuple(found)


def _write(call: OpCall, subscript: Subscript, value: TensorSpec, accumulate: bool) -> Strategy:
    spec, picks = call.specs[0], subscript.picks
    if call.specs != (spec, *[entry.spec for entry in picks], value):
        raise ShardingRuleError(f"{call.name}: pass the operands by position.")
    labels = tuple(range(spec.ndim))
    result: list[Any] = []  # for each dim of what is written: the dim of x that it is a whole of, or None
    sizes: list[int] = []
    for entry in subscript.basic:
        if entry.spec is None:
            whole = subscript.is_whole(entry)
            result.append(entry.dim if whole else None)
            sizes.append(1 if entry.kind == "new" else entry.run[2])
    place = subscript.pick_position if picks else len(result)
    picked = max((1 if entry.kind == "mask" else entry.spec.ndim for entry in picks if entry.spec), default=0)
    aligned = [*zip(result, sizes, strict=True)]
    aligned[place:place] = [(None, 0)] * picked
    offset = len(aligned) - value.ndim
    value_labels = tuple(
        aligned[offset + d][0] if offset + d >= 0 and aligned[offset + d][1] == size else None
        for d, size in enumerate(value.shape)
    )
    strategy = solve(
        [
            Operand(spec, labels, PLAIN),
            *[Operand(pick, (None,) * pick.ndim, PLAIN) for pick in call.specs[1:-1]],
            Operand(value, value_labels, PLAIN),
        ],
        [Output(labels, subscript.shape)],
        pinned=0,
    )
    bounds = strategy.layouts[0].bounds(subscript.shape)

    basic: list[Any] = []
    is_here = True
    parts = []
    where = []
    view_dim = at = 0  # in what the basic entries leave; among those that are no tensors
    for entry in subscript.entries:
        start, stop = bounds[entry.dim] if entry.dim < spec.ndim else (0, 0)
        at_value = at if at < place else at + picked
        if entry.kind == "int":
            if not start <= entry.position < stop:
                is_here = False
                break
            basic.append(entry.position - start)
            continue
        if entry.spec is not None:
            span = range(entry.dim, entry.dim + entry.span)
            basic += [slice(None)] * entry.span
            where.append((view_dim, tuple((*bounds[d], spec.shape[d]) for d in span)))
            view_dim += entry.span
            continue
        if entry.kind == "new":
            basic.append(None)
        elif subscript.is_whole(entry):
            basic.append(slice(None))
            sizes[at] = stop - start
        else:
            own = shared_rows([(start, stop)], [entry.run])
            first, step, count, offset = own[0] if own else (0, 1, 0, 0)
            basic.append(as_slice((first, step, count)))
            parts.append((at_value, offset, count))
        view_dim += 1
        at += 1
    if not is_here:  # the indices are still checked, so that all ranks raise alike
        where = [(0, tuple((0, 0, spec.shape[e.dim + i]) for i in range(e.span))) for e in picks]
    strategy.local = "write_index"
    strategy.bound = {
        "basic": tuple(basic) if is_here else None,
        "shape": tuple(sizes),
        "parts": tuple(parts),
        "picks": tuple(where),
        "place": place,
        "accumulate": accumulate,
    }
    return strategy


def _spelt_write(input: Any, index: Any, value: Any) -> Any:
    clear, nothing = spelt(input, index)
    if not nothing:
        input[clear] = _as_dtensor(input, value)
    return input


def _settled_write(input: Any, index: Any, value: Any) -> Any:
    input[settled(index)] = value
    return input


def _write_where(input: Any, index: Any, value: Any) -> Any:
    mask = index[0] if isinstance(index, tuple) else index
    mask = mask.reshape((*mask.shape, *[1] * (input.ndim - mask.ndim)))
    return input.masked_fill_(mask, value) if not value.ndim else input.copy_(value.where(mask, input))


def _index_put_copy(input: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    copy = input.reduce_partial().clone()
    copy.index_put_(indices, values, accumulate)
    return copy


def _scatter_number(
    input: Any, dim: int, index: Any, src: Any = None, value: Any = None, reduce: str | None = None
) -> Any:
    source = _as_dtensor(input, value if src is None else src).to(input.dtype).expand(index.shape)
    return input.scatter(dim, index, source) if reduce is None else _scatter_reduced(input, dim, index, source, reduce)


def _scatter_reduced(input: Any, dim: int, index: Any, src: Any, reduce: str) -> Any:
    known = {"add": "sum", "multiply": "prod"}
    if reduce not in known:
        raise ShardingRuleError(f"scatter: reduce={reduce!r} is unknown; use 'add' or 'multiply', or scatter_reduce.")
    return input.scatter_reduce(dim, index, src, known[reduce])


def _as_dtensor(input: Any, value: Any) -> Any:
    """A number, or a 0-d tensor that stands for one, as a DTensor beside `input`."""
    tensors = get_platform().tensors
    if hasattr(value, "_spec"):
        return value
    if not tensors.is_tensor(value):
        value = tensors.full((), value, input.dtype, tensors.device_type_of(input._local))
    return type(input).from_local(value, input.layout.replicated)
