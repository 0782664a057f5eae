"""What this rank runs for a step between flat shares and the whole piece: intervals of it, flattened, and one collective.

Shares travel padded to the largest of the group. Where they follow each other at equal distances, the piece is gathered
into place; elsewhere each is copied to its place.
"""

from __future__ import annotations

from math import prod

from hp_core.geometry import origin_box
from hp_core.layout import Layout
from hp_core.platform import Group, get_platform
from hp_core.platform.protocol import Tensor
from hp_core.redistribute.runs import Arrivals, Run, conclude, padded
from hp_core.redistribute.steps import AllGather, Pad, ReduceScatter, Slice, Step

__all__ = ["compile_flat"]


def compile_flat(step: Step, shape: tuple[int, ...]) -> tuple[Run, bool]:
    """This rank's part in a step of which one side is flat, and whether it communicates."""
    share = step.before if step.before.flat is not None else step.after
    whole = step.after if share is step.before else step.before
    piece = whole.local_shape(shape)
    if isinstance(step, Slice):
        return _slice(share.flat_interval(shape), piece), False
    if isinstance(step, Pad):
        return _pad(share.flat_interval(shape), piece), False
    if step.group_size == 1 or not prod(piece):  # equal on all ranks of the group
        return _copy(step.after.local_shape(shape)), False
    group = share.mesh.get_group(step.axes)
    if isinstance(step, AllGather):
        return _all_gather(_Shares(share, shape, group), piece, group), True
    assert isinstance(step, ReduceScatter)
    return _reduce_scatter(_Shares(share, shape, group), piece, str(step.reduce_op), group), True


class _Shares:
    """The shares of a group's ranks.

    Attributes:
        filled: place in the group, first and last element of each share that has some.
        own: number of elements of this rank's.
        largest: number of elements of the largest.
        consecutive: whether each starts at its place times the largest, so that padded they stand as in the piece.
    """

    def __init__(self, layout: Layout, shape: tuple[int, ...], group: Group) -> None:
        intervals = [layout.flat_interval(shape, rank) for rank in group.ranks]
        self.filled = [(place, start, stop) for place, (start, stop) in enumerate(intervals) if stop > start]
        self.own = prod(layout.local_shape(shape))
        self.largest = max(stop - start for _, start, stop in self.filled)
        self.consecutive = all(start == place * self.largest for place, start, _ in self.filled)


def _slice(interval: tuple[int, int], piece: tuple[int, ...]) -> Run:
    tensors, flat = get_platform().tensors, (prod(piece),)
    start, stop = interval

    def run(local: Tensor) -> Tensor:
        return tensors.clone(tensors.narrow(tensors.reshape(local, flat), 0, start, stop - start))

    return run


def _pad(interval: tuple[int, int], piece: tuple[int, ...]) -> Run:
    tensors, flat = get_platform().tensors, (prod(piece),)

    def run(local: Tensor) -> Tensor:
        result = tensors.zeros(piece, local)
        tensors.paste(tensors.reshape(result, flat), (interval,), local)
        return result

    return run


def _copy(shape: tuple[int, ...]) -> Run:
    """The same elements in another shape; a view of a copy could not be written to later, in a graph."""
    tensors, flat = get_platform().tensors, (prod(shape),)

    def run(local: Tensor) -> Tensor:
        result = tensors.empty(shape, local)
        tensors.paste(tensors.reshape(result, flat), origin_box(flat), tensors.reshape(local, flat))
        return result

    return run


def _all_gather(shares: _Shares, piece: tuple[int, ...], group: Group) -> Run:
    tensors, all_gather = get_platform().tensors, get_platform().collectives.all_gather
    numel, own, largest = prod(piece), (shares.own,), (shares.largest,)

    if shares.consecutive:
        in_one = numel == group.size * shares.largest

        def run_in_place(local: Tensor, arrivals: Arrivals | None = None) -> Tensor:
            source = padded(local, own, largest)
            gathered = tensors.empty(piece if in_one else (group.size * shares.largest,), local)
            conclude(all_gather(gathered, source, group, arrivals is not None), None, arrivals, source)
            return gathered if in_one else tensors.beginning(gathered, piece)

        return run_in_place

    def run(local: Tensor, arrivals: Arrivals | None = None) -> Tensor:
        source = padded(local, own, largest)
        gathered = tensors.empty((group.size, shares.largest), local)
        result = tensors.empty(piece, local)

        def unpack() -> None:
            flat = tensors.reshape(result, (numel,))
            for place, start, stop in shares.filled:
                tensors.paste(flat, ((start, stop),), tensors.narrow(gathered[place], 0, 0, stop - start))

        conclude(all_gather(gathered, source, group, arrivals is not None), unpack, arrivals, source)
        return result

    return run


def _reduce_scatter(shares: _Shares, piece: tuple[int, ...], reduce_op: str, group: Group) -> Run:
    tensors, reduce_scatter = get_platform().tensors, get_platform().collectives.reduce_scatter
    numel, own, largest = prod(piece), (shares.own,), (shares.largest,)
    in_one = shares.consecutive and numel == group.size * shares.largest

    def run(local: Tensor, arrivals: Arrivals | None = None) -> Tensor:
        flat = tensors.reshape(local, (numel,))
        if in_one:
            source = tensors.contiguous(flat)
        else:
            source = tensors.zeros((group.size, shares.largest), local)
            for place, start, stop in shares.filled:
                tensors.paste(source[place], ((0, stop - start),), tensors.narrow(flat, 0, start, stop - start))
        received = tensors.empty(largest, local)
        result = received if own == largest else tensors.empty(own, local)

        def unpack() -> None:
            if result is not received:
                tensors.paste(result, ((0, shares.own),), tensors.narrow(received, 0, 0, shares.own))

        conclude(reduce_scatter(received, source, reduce_op, group, arrivals is not None), unpack, arrivals, source)
        return result

    return run
