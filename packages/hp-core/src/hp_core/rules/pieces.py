"""Ops over a dim that is cut, without gathering it: who holds which piece, and ops whose local form exchanges little.

The local form gets the group of ranks that hold the pieces and finishes alike on all of them, so the output is replicated
over them (or, for a scan, cut as the input) and every gradient follows the law.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hp_core.layout import Layout
from hp_core.platform.protocol import Group
from hp_core.process_group import get_rank
from hp_core.rules.rule import PLAIN, OpCall, Operand, Output, Strategy, solve
from hp_core.rules.spec import TensorSpec

__all__ = ["Piece", "cut_axes", "has_empty_piece", "is_cut", "ordered_pieces", "over_ranks"]


class Piece(NamedTuple):
    """What one rank holds of a dim.

    Attributes:
        place: the rank's place in the group.
        start: first index.
        length: number of indices, at least 1.
    """

    place: int
    start: int
    length: int


def cut_axes(layout: Layout, dims: Sequence[int]) -> tuple[int, ...]:
    """Mesh axes of more than one rank that cut any of these dims, ascending."""
    return tuple(sorted(axis for dim in dims for axis in layout.axes_of(dim) if layout.mesh.shape[axis] > 1))


def is_cut(spec: TensorSpec, dims: Sequence[int]) -> bool:
    """Whether several ranks hold pieces of these dims."""
    return bool(cut_axes(spec.layout, dims))


def has_empty_piece(spec: TensorSpec, dim: int) -> bool:
    """Whether some rank holds nothing along a dim."""
    layout, shape, mesh = spec.layout, tuple(spec.shape), spec.layout.mesh
    boxes = (layout.bounds(shape, rank) for rank in mesh.rank_list)
    return bool(layout.axes_of(dim)) and any(box[dim][0] == box[dim][1] for box in boxes)


def ordered_pieces(layout: Layout, shape: Sequence[int], dim: int, group: Group) -> list[Piece]:
    """The pieces of a dim that aren't empty, in order."""
    pieces = []
    for place, rank in enumerate(group.ranks):
        start, stop = layout.bounds(tuple(shape), rank)[dim]
        if stop > start:
            pieces.append(Piece(place, start, stop - start))
    return sorted(pieces, key=lambda piece: piece.start)


def over_ranks(
    call: OpCall,
    dims: Sequence[int],
    result: Sequence[Any],
    local: str,
    *,
    outputs: int = 1,
    role: str = PLAIN,
    **bound: Any,
) -> tuple[Strategy, Group | None]:
    """The strategy of an op over `dims` whose local form takes the group of ranks that hold the pieces.

    Args:
        call: the call; its first operand is the only one.
        dims: dims that the op works along.
        result: labels of each output, where dim d of the operand has label d.
        local: name of the local form.
        outputs: number of outputs.
        role: how the op depends on the operand.
        **bound: keyword arguments of the local form, besides `group` and `position`.

    Returns:
        The strategy, and the group; None if the dims end up whole, so that the op itself runs.
    """
    spec = call.specs[0]
    labels = tuple(range(spec.ndim))
    strategy = solve([Operand(spec, labels, role)], [Output(tuple(result))] * outputs)
    axes = cut_axes(strategy.layouts[0], dims)
    if not axes:
        return strategy, None
    group = spec.layout.mesh.get_group(axes)
    strategy.local = local
    strategy.bound = {**bound, "group": group, "position": group.ranks.index(get_rank())}
    return strategy, group
