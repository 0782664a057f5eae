"""Which rows go where when the result of an op is cut along a dim that the op cuts, joins, reverses or repeats.

Rows of the operands are numbered through; every row of a result comes from one of them, in runs of constant step. From
the bounds of all members follows what each sends to each, and one all-to-all moves just that. Pure integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hp_core.geometry import Interval
from hp_core.layout import Layout
from hp_core.platform import Group
from hp_core.platform.protocol import Recut, Run

__all__ = ["Source", "Target", "recut_for", "shared_rows", "sliced"]


@dataclass(frozen=True)
class Source:
    """An operand whose rows are taken.

    Attributes:
        layout: how it lies.
        shape: its global shape.
        dim: the dim along which rows are counted.
    """

    layout: Layout
    shape: tuple[int, ...]
    dim: int


@dataclass(frozen=True)
class Target:
    """A result that is put together from rows.

    Attributes:
        layout: how it lies.
        shape: its global shape.
        dim: the dim along which rows are counted.
        runs: where its rows come from, in order, as positions in all operands one after the other.
    """

    layout: Layout
    shape: tuple[int, ...]
    dim: int
    runs: tuple[Run, ...]


def recut_for(sources: Sequence[Source], targets: Sequence[Target]) -> Recut:
    """What this rank sends, receives and keeps. Its parts of the sources, and of the targets, are taken as joined."""
    first = sources[0]
    group = first.layout.mesh.get_group(first.layout.axes_of(first.dim))
    return recut_of_members(group, first.layout.mesh._own_rank(), sources, targets)


def recut_of_members(group: Group, own_rank: int, sources: Sequence[Source], targets: Sequence[Target]) -> Recut:
    """The same for any member of a group; nothing here asks who this process is."""
    held = [_held(sources, rank) for rank in group.ranks]
    wanted = [_wanted(targets, rank) for rank in group.ranks]
    own = group.ranks.index(own_rank)
    # all members must agree on whether there is anything to exchange, so it is told from all of their rows
    moves = any(
        sum(count for _, _, count in wanted[member])
        != sum(count for _, _, count, _ in shared_rows(held[member], wanted[member]))
        for member in range(group.size)
    )
    sends, receives = [], []
    for member in range(group.size):
        sends.append(tuple((start, step, count) for start, step, count, _ in shared_rows(held[own], wanted[member])))
        receives.append(tuple((at, count) for _, _, count, at in shared_rows(held[member], wanted[own])))
    length = sum(count for _, _, count in wanted[own])
    return Recut(group, own, tuple(sends), tuple(receives), length, moves)


def sliced(runs: Sequence[Run], interval: Interval) -> tuple[Run, ...]:
    """The runs of an interval of the rows that `runs` stand for."""
    low, high = interval
    found = []
    for start, step, count in runs:
        first, last = max(low, 0), min(high, count)
        if first < last:
            found.append((start + step * first, step, last - first))
        low, high = low - count, high - count
    return tuple(found)


def _held(sources: Sequence[Source], rank: int) -> list[Interval]:
    """The rows that a rank holds, in the order in which it holds them."""
    found = []
    offset = 0
    for source in sources:
        start, stop = source.layout.bounds(source.shape, rank)[source.dim]
        found.append((offset + start, offset + stop))
        offset += source.shape[source.dim]
    return found


def _wanted(targets: Sequence[Target], rank: int) -> list[Run]:
    """The rows that a rank's parts of the results are made of, in order."""
    return [
        run for target in targets for run in sliced(target.runs, target.layout.bounds(target.shape, rank)[target.dim])
    ]


def shared_rows(held: Sequence[Interval], wanted: Sequence[Run]) -> list[tuple[int, int, int, int]]:
    """What of the wanted rows is held: (place among the held, step, count, place among the wanted), by the latter."""
    found = []
    at = 0
    for start, step, count in wanted:
        place = 0
        for low, high in held:
            if step > 0:
                first, last = -((start - low) // step), -((start - high) // step)
            else:
                first, last = (start - high) // -step + 1, (start - low) // -step + 1
            first, last = max(first, 0), min(last, count)
            if first < last and low < high:
                found.append((place + start + step * first - low, step, last - first, at + first))
            place += high - low
        at += count
    return found
