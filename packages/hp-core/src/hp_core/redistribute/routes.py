"""Who sends what to whom between two layouts on any two meshes: from the intersections of their bounds, in integers.

Ranks that hold the same are replicas; of these the one that sends least so far is picked, and what a rank holds itself
it keeps. Everything follows from facts that are equal on all ranks, so all ranks draw the same map.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from functools import lru_cache
from itertools import product
from math import prod
from operator import itemgetter
from typing import NamedTuple

from hp_core.geometry import Box, Interval, box_numel, intersect
from hp_core.layout import Layout

__all__ = ["Piece", "Traffic", "fan_in", "route", "traffic"]


class Piece(NamedTuple):
    """A box, in global coordinates, that goes from one global rank to another (or stays, if they are the same)."""

    source: int
    target: int
    box: Box


class Traffic(NamedTuple):
    """What a route puts on the wire.

    Attributes:
        sent: elements that the busiest sender sends.
        received: elements that the busiest receiver receives.
        messages: messages of the rank with the most, on its busier side.
    """

    sent: int
    received: int
    messages: int


@lru_cache(maxsize=1 << 10)
def route(before: Layout, after: Layout, shape: tuple[int, ...]) -> tuple[Piece, ...]:
    """All pieces that ranks need to go from `before` to `after`, by source and target; at most one per pair of ranks.

    Args:
        before: where the elements are; nothing is pending.
        after: where they shall be; nothing is pending. It may lie on another mesh.
        shape: shape of the global tensor.
    """
    replicas: dict[Box, list[int]] = {}
    for rank in before.mesh.rank_list:
        box = before.bounds(shape, rank)
        if box_numel(box):
            replicas.setdefault(box, []).append(rank)
    # every axis cuts one dim, so the boxes are all combinations of intervals, one per dim
    cuts = [sorted({box[dim] for box in replicas}) for dim in range(len(shape))]
    pieces: list[Piece] = []
    wanted: list[tuple[int, int, Box, list[int]]] = []
    for target in after.mesh.rank_list:
        own = after.bounds(shape, target)
        if not box_numel(own):
            continue
        for box in product(*(_overlapping(cut, interval) for cut, interval in zip(cuts, own, strict=True))):
            holders, shared = replicas[box], intersect(box, own)
            if target in holders:
                pieces.append(Piece(target, target, shared or ()))
            else:
                wanted.append((box_numel(shared or ()), target, shared or (), holders))
    load: Counter[int] = Counter()
    wanted.sort(key=lambda want: -want[0])  # the large ones first, so that the small ones even out
    for numel, target, box, holders in wanted:
        source = min(holders, key=lambda rank: load[rank])
        load[source] += numel
        pieces.append(Piece(source, target, box))
    return tuple(sorted(pieces))


def _overlapping(cut: list[Interval], own: Interval) -> list[Interval]:
    """The intervals, of those in ascending order that don't overlap each other, which overlap one's own."""
    start, stop = own
    first = bisect_right(cut, start, key=itemgetter(1))
    return cut[first : bisect_left(cut, stop, key=itemgetter(0))]


@lru_cache(maxsize=1 << 14)
def traffic(before: Layout, after: Layout, shape: tuple[int, ...]) -> Traffic:
    """What the route from `before` to `after` puts on the wire."""
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    outgoing: Counter[int] = Counter()
    incoming: Counter[int] = Counter()
    for source, target, box in route(before, after, shape):
        if source != target:
            sent[source] += box_numel(box)
            received[target] += box_numel(box)
            outgoing[source] += 1
            incoming[target] += 1
    messages = max(*outgoing.values(), *incoming.values(), 0, 0)
    return Traffic(max(sent.values(), default=0), max(received.values(), default=0), messages)


def fan_in(before: Layout, after: Layout, shape: tuple[int, ...]) -> int:
    """The number of messages that the first rank of `after` gets: a quick lower bound of `Traffic.messages`."""
    target = after.mesh.rank_list[0]
    own = after.bounds(shape, target)
    if not box_numel(own):
        return 0
    boxes = {box for rank in before.mesh.rank_list for box in [before.bounds(shape, rank)] if box_numel(box)}
    cuts = [sorted({box[dim] for box in boxes}) for dim in range(len(shape))]
    pieces = prod(len(_overlapping(cut, interval)) for cut, interval in zip(cuts, own, strict=True))
    is_source = target in before.mesh.rank_list and intersect(before.bounds(shape, target), own) is not None
    return pieces - 1 if is_source else pieces
