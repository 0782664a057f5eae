"""Picking by position: `x[...]`, select, narrow, index_select, gather and their kin.

A dim that is indexed need not be whole. A slice of a cut dim stays cut: only the rows that change hands move. Integers and
index tensors at a cut dim give a pending sum, in which each rank has what it holds and zeros for the rest.
"""

from __future__ import annotations

from typing import Any

from hp_core.errors import ShardingRuleError
from hp_core.layout import intern
from hp_core.platform import get_platform
from hp_core.platform.protocol import Run
from hp_core.rules.exchange import Source, Target, recut_for
from hp_core.rules.registry import rule
from hp_core.rules.rule import FACTOR, PLAIN, Composite, OpCall, Operand, Output, OutsideRule, Strategy, solve
from hp_core.rules.spec import TensorSpec
from hp_core.rules.subscript import Subscript, needs_spelling, read_subscript, settled, spelt
from hp_core.rules.view import ANY_PENDING

__all__ = ["as_slice", "picked_dims"]


@rule("getitem", "input index")
def _getitem(call: OpCall) -> Strategy | Composite:
    index = call.get("index")
    if needs_spelling(index):
        return Composite(_spelt_read)
    subscript = read_subscript("getitem", index, call.specs[0].shape)
    if subscript.has_loose_scalar:
        return Composite(lambda input, index: input[settled(index)])
    if subscript.has_mask:
        return Composite(_masked_read)
    return _read(call, subscript)


@rule("select", "input dim index")
def _select(call: OpCall) -> Strategy:
    index = call.get("index")
    if not isinstance(index, int):
        raise OutsideRule(f"select: index must be an integer, got {index!r}; use index_select.")
    return _read(call, _along(call, call.dim(), index))


@rule("narrow", "input dim start length")
def _narrow(call: OpCall) -> Strategy:
    dim, start, length = call.dim(), call.get("start"), call.get("length")
    if not isinstance(start, int):
        raise ShardingRuleError("narrow: start must be an integer; write int(start).")
    size = call.specs[0].shape[dim]
    start = start + size if start < 0 else start
    if not 0 <= start <= size - length:
        raise ShardingRuleError(
            f"narrow: start {call.get('start')} and length {length} exceed dim {dim} of shape {tuple(call.specs[0].shape)}."
        )
    return _read(call, _along(call, dim, slice(start, start + length)))


@rule("index_select", "input dim index")
def _index_select(call: OpCall) -> Strategy | Composite:
    spec, index, dim = call.spec("input"), call.spec("index"), call.dim()
    if not spec.ndim:
        raise OutsideRule("index_select of a 0-d DTensor has no rule; use x.expand(n).")
    if not index.ndim:
        return Composite(lambda input, dim, index: input.index_select(dim, index.reshape(1)))
    strategy = _read(call, _along(call, dim, index))
    if not strategy.layouts[0].axes_of(dim):
        strategy.local, strategy.bound = None, {}
    return strategy


@rule("gather", "input dim index")
def _gather(call: OpCall) -> Strategy | Composite:
    """Other dims may be cut where input and index are equally long."""
    spec, index, dim = call.spec("input"), call.spec("index"), call.dim()
    if index.ndim != spec.ndim:
        raise ShardingRuleError(
            f"gather: index of shape {tuple(index.shape)} and input of shape {tuple(spec.shape)} must have equally many dims."
        )
    alike = [d != dim and spec.shape[d] == index.shape[d] for d in range(spec.ndim)]
    if any(
        spec.layout.axes_of(d) and not alike[d] and index.shape[d] < spec.shape[d] for d in range(spec.ndim) if d != dim
    ):
        return Composite(_gather_of_part)
    source = tuple("own" if d == dim else d if alike[d] else None for d in range(spec.ndim))
    result = tuple("at" if d == dim else d if alike[d] else None for d in range(spec.ndim))
    strategy = solve(
        [Operand(spec, source, FACTOR), Operand(index, result, PLAIN)],
        [Output(result, tuple(index.shape))],
        reduced={"own": "sum"},
    )
    layout = strategy.layouts[0]
    if layout.axes_of(dim):
        strategy.local = "gather_own"
        interval = layout.bounds(tuple(spec.shape))[dim]
        strategy.bound = {"dim": dim, "interval": interval, "size": spec.shape[dim]}
    return strategy


def _gather_of_part(input: Any, dim: int, index: Any) -> Any:
    """An index that is shorter than the input in other dims only sees the front of it."""
    for d, size in enumerate(index.shape):
        if d != dim % input.ndim and size < input.shape[d]:
            input = input.narrow(d, 0, size)
    return input.gather(dim, index)


@rule("take_along_dim", "input indices dim", decomposed=True)
def _take_along_dim(input: Any, indices: Any, dim: int | None = None) -> Any:
    """A gather in which the other dims broadcast."""
    if dim is None:
        return input.flatten().gather(0, indices.flatten())
    ndim = input.ndim
    if indices.ndim != ndim:
        raise ShardingRuleError(
            f"take_along_dim: indices of shape {tuple(indices.shape)} and input of shape {tuple(input.shape)} must have equally "
            f"many dims."
        )
    dim = dim % ndim
    sizes = [max(a, b) if a and b else 0 for a, b in zip(input.shape, indices.shape, strict=True)]
    wide = [input.shape[d] if d == dim else size for d, size in enumerate(sizes)]
    picked = [indices.shape[d] if d == dim else size for d, size in enumerate(sizes)]
    return input.expand(wide).gather(dim, indices.expand(picked))


@rule("take", "input index", decomposed=True)
def _take(input: Any, index: Any) -> Any:
    """Positions in the flattened tensor."""
    return input.flatten()[index]


def _along(call: OpCall, dim: int, entry: Any) -> Subscript:
    """The index expression with one entry, at `dim`."""
    return read_subscript(call.name, (*[slice(None)] * dim, entry), call.specs[0].shape)


def _read(call: OpCall, subscript: Subscript) -> Strategy:
    spec, picks = call.specs[0], subscript.picks
    picked = subscript.pick_shape
    labels: list[Any] = [None] * spec.ndim
    result: list[tuple[Any, int]] = []
    for entry in subscript.entries:
        if entry.kind == "new":
            result.append((None, 1))
        elif entry.kind == "slice":
            labels[entry.dim] = entry.dim
            result.append((entry.dim, entry.run[2]))
        else:
            labels[entry.dim] = ("own", entry.dim)
    place = subscript.pick_position if picks else len(result)
    result[place:place] = [(("at", dim), size) for dim, size in enumerate(picked)]
    sliced = {entry.dim for entry in subscript.entries if entry.kind == "slice" and not subscript.is_whole(entry)}

    strategy = solve(
        [Operand(spec, tuple(labels), FACTOR)]
        + [Operand(pick, picked_dims(pick, picked), PLAIN) for pick in call.specs[1:]],
        [Output(tuple(label for label, _ in result), tuple(size for _, size in result))],
        reduced={label: "sum" for label in labels if isinstance(label, tuple)},
        keeps=ANY_PENDING,
        # unequal shares of a dim are not those of a slice of it
        aligned=lambda label, _: label not in sliced or label != 0 or spec.layout.ragged is None,
    )
    layout = strategy.layouts[0]
    cut = {dim for dim in range(spec.ndim) if layout.axes_of(dim)}
    changed = cut & (sliced | {entry.dim for entry in subscript.entries if entry.kind == "int"})
    if not picks and not changed:
        return strategy  # the op itself, a view

    bounds = layout.bounds(subscript.shape)
    positions: list[tuple[int, int | None]] = []
    basic: list[Any] = []
    steps = []
    where = []
    view_dim = 0  # in what the basic entries leave
    for entry in subscript.entries:
        dim = entry.dim
        if entry.kind == "int" and dim in cut:
            start, stop = bounds[dim]
            positions.insert(0, (dim, entry.position - start if start <= entry.position < stop else None))
            continue
        if entry.kind == "new":
            basic.append(None)
        elif entry.kind == "int":
            basic.append(entry.position)
            continue
        elif entry.kind == "slice":
            basic.append(slice(None) if dim in cut else as_slice(entry.run))
            if dim in changed:
                steps.append((view_dim, dim, entry.run))
        else:
            basic.append(slice(None))
            where.append((view_dim, ((*bounds[dim], spec.shape[dim]),)))
        view_dim += 1
    out_layout, _ = strategy.outputs[0]
    shape = tuple(size for _, size in result)
    at = {label: dim for dim, (label, _) in enumerate(result)}
    strategy.local = "read_index"
    strategy.bound = {
        "positions": tuple(positions),
        "basic": tuple(basic),
        "steps": tuple(
            (
                dim,
                recut_for([Source(layout, subscript.shape, source)], [Target(out_layout, shape, at[source], (run,))]),
            )
            for dim, source, run in steps
        ),
        "picks": tuple(where),
        "place": place,
    }
    strategy.detached = not picks
    return strategy


def picked_dims(pick: TensorSpec, picked: tuple[int, ...]) -> tuple[Any, ...]:
    """Labels of an index tensor among others that broadcast to the shape `picked`."""
    offset = len(picked) - pick.ndim
    return tuple(("at", offset + dim) if size == picked[offset + dim] else None for dim, size in enumerate(pick.shape))


def as_slice(run: Run) -> slice:
    """The slice that takes these rows (its step is positive)."""
    start, step, count = run
    return slice(start, start + step * (count - 1) + 1, step) if count else slice(0, 0)


def _spelt_read(input: Any, index: Any) -> Any:
    clear, nothing = spelt(input, index)
    if any(isinstance(entry, bool) for entry in (index if isinstance(index, tuple) else (index,))):
        result = input[clear].clone()  # a bool is a mask, and what a mask picks is a copy
        return result.narrow(clear.index(None) if nothing else 0, 0, 0).clone() if nothing else result
    return input[clear]


def _masked_read(input: Any, index: Any) -> Any:
    """Masks: how much they pick depends on values, so each rank needs the dims that they are about, and the masks, whole."""
    subscript = read_subscript("getitem", _as_specs(index), input.shape)
    given = tuple(index) if isinstance(index, tuple) else (index,)
    masks = [entry for entry in given if hasattr(entry, "_spec")]
    rest = input[
        tuple(
            slice(None) if e.spec is not None else _again(e) for e in subscript.entries for _ in range(max(e.span, 1))
        )
    ]
    basic = subscript.basic
    place = subscript.pick_position
    layout = rest.layout
    shares = layout.ragged if place else None  # unequal shares are only told of a first dim
    given_up = {
        dim for dim, entry in enumerate(basic) if entry.spec is not None or (dim == 0 and shares is not layout.ragged)
    }
    axes = [() if dim in given_up else layout.axes_of(dim) for dim in range(len(basic))]
    whole = intern(layout.mesh, tuple(axes), layout.partials, shares)
    entries: list[Any] = []
    for entry in subscript.entries:
        if entry.spec is not None:
            entries.append(masks[entry.tensor].full_tensor())
        elif entry.kind != "int":
            entries.append(slice(None))
    local = rest.redistribute(whole).to_local()[tuple(entries)]
    kept = [dim for dim, entry in enumerate(basic) if entry.spec is None]
    axes = [axes[dim] for dim in kept]
    sizes = [rest.shape[dim] for dim in kept]
    count = local.ndim - len(kept)
    axes[place:place] = [()] * count
    sizes[place:place] = get_platform().tensors.shape(local)[place : place + count]
    return type(input).from_local(local, intern(whole.mesh, tuple(axes), whole.partials, shares), shape=tuple(sizes))


def _again(entry: Any) -> Any:
    """An entry that is no tensor, as it is written."""
    return None if entry.kind == "new" else entry.position if entry.kind == "int" else as_slice(entry.run)


def _as_specs(index: Any) -> Any:
    """An index expression with specs in place of tensors."""
    if isinstance(index, tuple):
        return tuple(_as_specs(entry) for entry in index)
    return getattr(index, "_spec", index)
