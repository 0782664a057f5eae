"""Rows in another order, or several times: flip, roll, repeat and their kin. A cut dim stays cut; rows change hands.

The diagonal family is here too: triangles of cut matrices are local, with the diagonal counted from the rank's corner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hp_core.errors import ShardingRuleError
from hp_core.platform import get_platform
from hp_core.platform.protocol import Run
from hp_core.rules.exchange import Source, Target, recut_for
from hp_core.rules.registry import rule
from hp_core.rules.rule import FACTOR, Composite, OpCall, Operand, Output, Strategy, solve
from hp_core.rules.view import ANY_PENDING

__all__: list[str] = []


@rule("flip", "input *dims")
def _flip(call: OpCall) -> Strategy:
    spec = call.specs[0]
    given = call.get("dims", ())
    given = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    dims = {dim % max(spec.ndim, 1) for dim in given}
    return _reordered(call, {dim: ((spec.shape[dim] - 1, -1, spec.shape[dim]),) for dim in dims if spec.ndim})


@rule("fliplr", "input", decomposed=True)
def _fliplr(input: Any) -> Any:
    return input.flip(1)


@rule("flipud", "input", decomposed=True)
def _flipud(input: Any) -> Any:
    return input.flip(0)


@rule("roll", "input shifts dims")
def _roll(call: OpCall) -> Strategy | Composite:
    spec, shifts, dims = call.specs[0], call.get("shifts"), call.get("dims")
    if dims is None or dims == ():
        return Composite(lambda input, shifts, dims=None: input.flatten().roll(shifts, 0).view(input.shape))
    shifts = (shifts,) if isinstance(shifts, int) else tuple(shifts)
    places = call.dims("dims")
    if len(shifts) != len(places):
        raise ShardingRuleError(f"roll: {len(shifts)} shifts for {len(places)} dims; give one for each.")
    total: dict[int, int] = {}
    for shift, dim in zip(shifts, places, strict=True):
        total[dim] = total.get(dim, 0) + shift
    runs: dict[int, tuple[Run, ...]] = {}
    for dim, shift in total.items():
        size = spec.shape[dim]
        first = shift % size if size else 0
        runs[dim] = ((size - first, 1, first), (0, 1, size - first))
    return _reordered(call, runs)


@rule("rot90", "input k dims", decomposed=True)
def _rot90(input: Any, k: int = 1, dims: Sequence[int] = (0, 1)) -> Any:
    first, second = dims
    turned = input
    if k % 4 in (1, 2):
        turned = turned.flip(second)
    if k % 4 in (2, 3):
        turned = turned.flip(first)
    return turned.transpose(first, second) if k % 2 else turned if k % 4 else input.clone()


@rule("repeat", "input *repeats")
@rule("tile", "input *dims")
def _repeat(call: OpCall) -> Strategy:
    """Each dim so many times; more repeats than dims make new ones in front."""
    spec = call.specs[0]
    repeats = call.get("repeats", call.get("dims", ()))
    repeats = tuple(repeats[0] if len(repeats) == 1 and isinstance(repeats[0], (tuple, list)) else repeats)
    if call.name == "tile":
        repeats = (1,) * (spec.ndim - len(repeats)) + repeats
    offset = len(repeats) - spec.ndim
    if offset < 0:
        raise ShardingRuleError(f"repeat: {repeats} is shorter than the shape {tuple(spec.shape)}.")
    labels = tuple(range(spec.ndim))
    shape = (*repeats[:offset], *[size * repeats[offset + dim] for dim, size in enumerate(spec.shape)])
    again = {dim for dim in labels if repeats[offset + dim] != 1}
    strategy = solve(
        [Operand(spec, labels, FACTOR)],
        [Output((*[None] * offset, *labels), shape)],
        keeps=ANY_PENDING,
        aligned=lambda label, _: label not in again or label != 0 or spec.layout.ragged is None,
    )
    layout, (out_layout, _) = strategy.layouts[0], strategy.outputs[0]
    cut = sorted(dim for dim in again if layout.axes_of(dim))
    strategy.local = "repeat_recut"
    strategy.bound = {
        "steps": tuple(
            (
                dim,
                recut_for(
                    [Source(layout, tuple(spec.shape), dim)],
                    [Target(out_layout, shape, offset + dim, ((0, 1, spec.shape[dim]),) * repeats[offset + dim])],
                ),
            )
            for dim in cut
        ),
        "repeats": tuple(1 if at - offset in cut else count for at, count in enumerate(repeats)),
    }
    return strategy


@rule("repeat_interleave", "input repeats dim output_size", decomposed=True)
def _repeat_interleave(input: Any, repeats: Any = None, dim: int | None = None, output_size: int | None = None) -> Any:
    """Each row so many times, one after the other; a tensor of repeats gives each row its own number."""
    if repeats is None:
        raise ShardingRuleError(
            "repeat_interleave(repeats) of counts alone has no rule; pass the tensor to repeat, too."
        )
    if dim is None:
        input, dim = input.flatten(), 0
    dim = dim % input.ndim
    if isinstance(repeats, int):
        sizes = [*input.shape[: dim + 1], repeats, *input.shape[dim + 1 :]]
        return input.unsqueeze(dim + 1).expand(sizes).flatten(dim, dim + 1)
    tensors = get_platform().tensors
    counts = repeats.full_tensor()
    rows = tensors.arange(0, input.shape[dim], counts)
    index = get_platform().ops.local("repeat_interleave")(rows, counts.expand(rows.shape))
    return input.index_select(dim, type(input).from_local(index, input.layout.replicated))


@rule("tril triu", "input diagonal")
def _triangle(call: OpCall) -> Strategy:
    """Element (i, j) stays if j - i is on the right side of the diagonal: the rank's first row and column shift that."""
    spec, diagonal = call.specs[0], call.get("diagonal", 0)
    labels = tuple(range(spec.ndim))
    strategy = solve([Operand(spec, labels, FACTOR)], [Output(labels)], pinned=0 if call.inplace else None)
    layout = strategy.layouts[0]
    if spec.ndim >= 2 and (layout.axes_of(spec.ndim - 2) or layout.axes_of(spec.ndim - 1)):
        (row, _), (column, _) = layout.bounds(tuple(spec.shape))[-2:]
        strategy.local = f"{call.name}_" if call.inplace else call.name
        strategy.bound = {"diagonal": diagonal + row - column}
    return strategy


@rule("diagonal", "input offset dim1 dim2")
def _diagonal(call: OpCall) -> Strategy:
    """Along one cut dim each rank has its own stretch of the diagonal, in a pending sum."""
    spec, offset = call.specs[0], call.get("offset", 0)
    first, second = call.dim("dim1", 0), call.dim("dim2", 1)
    length = max(0, min(spec.shape[first] + min(offset, 0), spec.shape[second] - max(offset, 0)))
    rest = tuple(dim for dim in range(spec.ndim) if dim not in (first, second))
    labels: list[Any] = list(range(spec.ndim))
    labels[first], labels[second] = "row", "column"
    strategy = solve(
        [Operand(spec, tuple(labels), FACTOR)],
        [Output((*rest, None), (*[spec.shape[dim] for dim in rest], length))],
        reduced={"row": "sum", "column": "sum"},
        keeps=ANY_PENDING,
    )
    layout = strategy.layouts[0]
    if layout.axes_of(first) or layout.axes_of(second):
        bounds = layout.bounds(tuple(spec.shape))
        strategy.local = "diagonal_own"
        strategy.bound = {
            "dims": (first, second),
            "offset": offset,
            "corner": (bounds[first][0], bounds[second][0]),
            "length": length,
        }
        strategy.detached = True
    return strategy


@rule("diag_embed", "input offset dim1 dim2")
def _diag_embed(call: OpCall) -> Strategy:
    """[..., n] -> matrices [..., n, n]; a cut of the n elements cuts the rows."""
    spec, offset = call.specs[0], call.get("offset", 0)
    first, second = call.dim("dim1", -2, spec.ndim + 1), call.dim("dim2", -1, spec.ndim + 1)
    size = spec.shape[-1] + abs(offset)
    labels: list[Any] = [*range(spec.ndim - 1), None if offset else "row"]
    result: list[Any] = list(range(spec.ndim - 1))
    shape = list(spec.shape[:-1])
    for place in sorted((first, second)):
        result.insert(place, "row" if place == first else None)
        shape.insert(place, size)
    strategy = solve([Operand(spec, tuple(labels), FACTOR)], [Output(tuple(result), tuple(shape))])
    layout = strategy.layouts[0]
    if layout.axes_of(spec.ndim - 1):
        start, _ = layout.bounds(tuple(spec.shape))[-1]
        strategy.local = "diag_embed_own"
        strategy.bound = {"start": start, "size": size, "dims": (first, second)}
    return strategy


@rule("diag", "input diagonal", decomposed=True)
def _diag(input: Any, diagonal: int = 0) -> Any:
    """A vector as a matrix, or a matrix' diagonal as a vector (a copy)."""
    return input.diag_embed(diagonal) if input.ndim == 1 else input.diagonal(diagonal).clone()


@rule("diagflat", "input offset", decomposed=True)
def _diagflat(input: Any, offset: int = 0) -> Any:
    return input.flatten().diag_embed(offset)


def _reordered(call: OpCall, runs: Mapping[int, tuple[Run, ...]]) -> Strategy:
    """The strategy of an op that takes the rows of some dims in another order; shape and cuts stay."""
    spec = call.specs[0]
    labels = tuple(range(spec.ndim))
    shape = tuple(spec.shape)
    strategy = solve([Operand(spec, labels, FACTOR)], [Output(labels)], keeps=ANY_PENDING)
    layout = strategy.layouts[0]
    cut = sorted(dim for dim in runs if layout.axes_of(dim))
    if cut:
        steps = [(dim, recut_for([Source(layout, shape, dim)], [Target(layout, shape, dim, runs[dim])])) for dim in cut]
        strategy.local = "reorder"
        strategy.bound = {"steps": tuple(steps), "runs": tuple((d, runs[d]) for d in sorted(runs) if d not in cut)}
    return strategy
