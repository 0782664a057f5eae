"""What this rank runs for a step: one closure, compiled once from bounds.

A closure takes a local tensor and gives a local tensor that shares no storage with it. Where the gathered or scattered
dim is the outermost in memory the collective reads and writes the tensors themselves; elsewhere one permuting copy is
made. Given a list of arrivals, a closure that communicates returns at once and leaves there what is still to be done.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from hp_core.geometry import Box, box_numel, box_shape, clipped, intersect, origin_box, relative_to
from hp_core.platform import Group, get_platform
from hp_core.platform.protocol import Tensor
from hp_core.process_group import group_of_ranks
from hp_core.redistribute.flat_execution import compile_flat
from hp_core.redistribute.routes import route
from hp_core.redistribute.runs import Arrivals, Run, conclude, padded
from hp_core.redistribute.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Pad,
    Permute,
    ReduceScatter,
    Scale,
    Slice,
    Step,
    Transfer,
)

__all__ = ["ABSENT_SHAPE", "Arrivals", "Run", "compile_step", "is_member", "keeps_value"]

ABSENT_SHAPE = (0,)
"""Shape of the local tensor of a rank outside of the mesh."""


def compile_step(step: Step, shape: tuple[int, ...]) -> tuple[Run, bool] | None:
    """This rank's part in a step, and whether it communicates; None if it has none, being outside of the meshes."""
    if isinstance(step, Transfer):
        return _transfer(step, shape) if is_member(step.before) or is_member(step.after) else None
    if not is_member(step.before):
        return None
    if step.before.flat != step.after.flat:
        return compile_flat(step, shape)
    if isinstance(step, Slice):
        return _slice(step, shape), False
    if isinstance(step, Pad):
        return _pad(step, shape), False
    if isinstance(step, Scale):
        return _scale(keeps_value(step)), False
    if not _moves_anything(step, shape):
        tensors, result_shape = get_platform().tensors, step.after.local_shape(shape)
        return (lambda local: tensors.zeros(result_shape, local)), False
    group = step.before.mesh.get_group(step.axes)
    if isinstance(step, AllReduce):
        return _all_reduce(str(step.reduce_op), group), True
    if isinstance(step, AllGather):
        return _all_gather(step, shape, group), True
    if isinstance(step, ReduceScatter):
        return _reduce_scatter(step, shape, group), True
    if isinstance(step, Permute):
        return _permute(step, shape, group), True
    assert isinstance(step, AllToAll)
    return _all_to_all(step, shape, group), True


def is_member(layout: Any) -> bool:
    """Whether this rank is part of the layout's mesh."""
    return layout.mesh.get_coordinate() is not None


def keeps_value(step: Step) -> bool:
    """Whether this rank keeps a value that becomes pending: a sum counts it once, other reductions don't mind."""
    coordinate = step.before.mesh.require_coordinate()
    return step.reduce_op != "sum" or all(coordinate[axis] == 0 for axis in step.axes)


def _moves_anything(step: Step, shape: tuple[int, ...]) -> bool:
    """Whether any member of this rank's group holds an element; equal on all members."""
    members = step.before.mesh.members(step.axes)
    return any(prod(layout.local_shape(shape, rank)) for rank in members for layout in (step.before, step.after))


# -- local steps ----------------------------------------------------------------------------------------------------


def _slice(step: Step, shape: tuple[int, ...]) -> Run:
    tensors = get_platform().tensors
    piece = relative_to(step.after.bounds(shape), step.before.bounds(shape)) if shape else ()
    whole = step.before.local_shape(shape)
    cuts = [
        (dim, start, stop - start) for dim, (start, stop) in enumerate(clipped(piece)) if stop - start != whole[dim]
    ]

    def run(local: Tensor) -> Tensor:
        for dim, start, length in cuts:
            local = tensors.narrow(local, dim, start, length)
        return tensors.clone(local)

    return run


def _pad(step: Step, shape: tuple[int, ...]) -> Run:
    tensors = get_platform().tensors
    whole = step.after.bounds(shape)
    piece = step.before.bounds(shape)

    def run(local: Tensor) -> Tensor:
        result = tensors.zeros(box_shape(whole), local)
        if box_numel(piece):
            tensors.paste(result, relative_to(piece, whole), local)
        return result

    return run


def _scale(keeps: bool) -> Run:
    tensors = get_platform().tensors
    if keeps:
        return tensors.clone
    return lambda local: tensors.zeros(tensors.shape(local), local)


# -- collectives ----------------------------------------------------------------------------------------------------


def _all_reduce(reduce_op: str, group: Group) -> Run:
    tensors, all_reduce = get_platform().tensors, get_platform().collectives.all_reduce

    def run(local: Tensor, arrivals: Arrivals | None = None) -> Tensor:
        result = tensors.clone(local)
        if arrivals is None:
            all_reduce(result, reduce_op, group)
        else:
            conclude(all_reduce(result, reduce_op, group, True), None, arrivals)
        return result

    return run


def _all_gather(step: Step, shape: tuple[int, ...], group: Group) -> Run:
    tensors, all_gather = get_platform().tensors, get_platform().collectives.all_gather
    whole = step.after.bounds(shape)
    pieces = [step.before.bounds(shape, rank) for rank in group.ranks]
    own = box_shape(step.before.bounds(shape))
    result_shape = box_shape(whole)
    largest = tuple(map(max, zip(*map(box_shape, pieces), strict=True)))
    stacked = (group.size, *largest)
    dim = _stacking_dim(pieces, whole, largest)

    if dim is not None and box_numel(whole[:dim]) == 1:
        # the pieces lie one behind the other in memory: gather into place, and cut off what the last ones padded
        gathered_shape = (*largest[:dim], group.size * largest[dim], *largest[dim + 1 :])

        def run_in_place(local: Tensor, arrivals: Arrivals | None = None) -> Tensor:
            result = tensors.empty(gathered_shape, local)
            source = padded(local, own, largest)
            if arrivals is None:
                all_gather(result, source, group)
            else:
                conclude(all_gather(result, source, group, True), None, arrivals, source)
            return result if gathered_shape == result_shape else tensors.beginning(result, result_shape)

        return run_in_place

    if dim is not None and all(box_shape(piece) == largest for piece in pieces):
        split = (*largest[:dim], group.size, *largest[dim:])
        everything = origin_box(split)

        def run_permuting(local: Tensor, arrivals: Arrivals | None = None) -> Tensor:
            source = tensors.contiguous(local)
            gathered = tensors.empty(stacked, local)
            result = tensors.empty(result_shape, local)

            def unpack() -> None:
                tensors.paste(tensors.reshape(result, split), everything, tensors.movedim(gathered, 0, dim))

            conclude(all_gather(gathered, source, group, arrivals is not None), unpack, arrivals, source)
            return result

        return run_permuting

    targets = [(i, relative_to(piece, whole), box_shape(piece)) for i, piece in enumerate(pieces) if box_numel(piece)]

    def run(local: Tensor, arrivals: Arrivals | None = None) -> Tensor:
        source = padded(local, own, largest)
        gathered = tensors.empty(stacked, local)
        result = tensors.empty(result_shape, local)

        def unpack() -> None:
            for i, target, size in targets:
                tensors.paste(result, target, tensors.crop(gathered[i], origin_box(size)))

        conclude(all_gather(gathered, source, group, arrivals is not None), unpack, arrivals, source)
        return result

    return run


def _reduce_scatter(step: Step, shape: tuple[int, ...], group: Group) -> Run:
    tensors, reduce_scatter = get_platform().tensors, get_platform().collectives.reduce_scatter
    whole = step.before.bounds(shape)
    pieces = [step.after.bounds(shape, rank) for rank in group.ranks]
    own = box_shape(step.after.bounds(shape))
    reduce_op = str(step.reduce_op)
    largest = tuple(map(max, zip(*map(box_shape, pieces), strict=True)))
    stacked = (group.size, *largest)
    dim = _stacking_dim(pieces, whole, largest)

    if dim is not None and all(box_shape(piece) == largest for piece in pieces):
        outermost = box_numel(whole[:dim]) == 1
        split = (*largest[:dim], group.size, *largest[dim:])

        def run_even(local: Tensor, arrivals: Arrivals | None = None) -> Tensor:
            if not outermost:
                local = tensors.movedim(tensors.reshape(local, split), dim, 0)
            source = tensors.contiguous(local)
            result = tensors.empty(own, local)
            if arrivals is None:
                reduce_scatter(result, source, reduce_op, group)
            else:
                conclude(reduce_scatter(result, source, reduce_op, group, True), None, arrivals, source)
            return result

        return run_even

    targets = [
        (i, relative_to(piece, whole), origin_box(box_shape(piece)))
        for i, piece in enumerate(pieces)
        if box_numel(piece)
    ]
    cut = origin_box(own)

    def run(local: Tensor, arrivals: Arrivals | None = None) -> Tensor:
        source = tensors.zeros(stacked, local)
        for i, origin, target in targets:
            tensors.paste(source[i], target, tensors.crop(local, origin))
        received = tensors.empty(largest, local)
        result = received if own == largest else tensors.empty(own, local)

        def unpack() -> None:
            if result is not received:
                tensors.paste(result, cut, tensors.crop(received, cut))

        conclude(reduce_scatter(received, source, reduce_op, group, arrivals is not None), unpack, arrivals, source)
        return result

    return run


def _all_to_all(step: Step, shape: tuple[int, ...], group: Group) -> Run:
    tensors, all_to_all = get_platform().tensors, get_platform().collectives.all_to_all
    own_before, own_after = step.before.bounds(shape), step.after.bounds(shape)
    sends = [_shared(own_before, step.after.bounds(shape, rank)) for rank in group.ranks]
    receives = [_shared(own_after, step.before.bounds(shape, rank)) for rank in group.ranks]
    send_splits = [0 if box is None else box_numel(box) for box in sends]
    receive_splits = [0 if box is None else box_numel(box) for box in receives]
    # all members must agree on this, so it is told from all of their boxes
    boxes = [(step.before.bounds(shape, rank), step.after.bounds(shape, rank)) for rank in group.ranks]
    shared = {
        box_numel(box) if box else 0 for before, _ in boxes for _, after in boxes for box in [intersect(before, after)]
    }
    packing = _sections(sends, send_splits)
    unpacking = _sections(receives, receive_splits)
    splits: tuple[list[int], list[int]] = ([], []) if len(shared) == 1 else (receive_splits, send_splits)
    result_shape = box_shape(own_after)

    def run(local: Tensor, arrivals: Arrivals | None = None) -> Tensor:
        source = tensors.empty((sum(send_splits),), local)
        for start, stop, box in packing:
            section = tensors.reshape(source[start:stop], box_shape(box))
            tensors.paste(section, origin_box(box_shape(box)), tensors.crop(local, box))
        received = tensors.empty((sum(receive_splits),), local)
        result = tensors.empty(result_shape, local)

        def unpack() -> None:
            for start, stop, box in unpacking:
                tensors.paste(result, box, tensors.reshape(received[start:stop], box_shape(box)))

        conclude(all_to_all(received, source, *splits, group, arrivals is not None), unpack, arrivals, source)
        return result

    return run


# -- point to point -------------------------------------------------------------------------------------------------


def _permute(step: Step, shape: tuple[int, ...], group: Group) -> Run:
    own_rank = get_platform().processes.rank()
    own_before, own_after = step.before.bounds(shape), step.after.bounds(shape)
    sends = {rank: _shared(own_before, step.after.bounds(shape, rank)) for rank in group.ranks}
    receives = {rank: _shared(own_after, step.before.bounds(shape, rank)) for rank in group.ranks}
    kept_from, kept_to = sends.pop(own_rank), receives.pop(own_rank)
    return _point_to_point(
        [(box, rank) for rank, box in sends.items() if box is not None],
        [(box, rank) for rank, box in receives.items() if box is not None],
        None if kept_from is None or kept_to is None else (kept_from, kept_to),
        box_shape(own_after),
        group,
    )


def _transfer(step: Step, shape: tuple[int, ...]) -> tuple[Run, bool]:
    own_rank = get_platform().processes.rank()
    own_before = step.before.bounds(shape) if is_member(step.before) else ()
    own_after = step.after.bounds(shape) if is_member(step.after) else None
    pieces = route(step.before, step.after, shape)
    outgoing, incoming, kept = [], [], None
    for source, target, box in pieces:
        if source == target == own_rank and own_after is not None:
            kept = (relative_to(box, own_before), relative_to(box, own_after))
        elif source == own_rank:
            outgoing.append((relative_to(box, own_before), target))
        elif target == own_rank and own_after is not None:
            incoming.append((relative_to(box, own_after), source))
    group = None
    if any(source != target for source, target, _ in pieces):
        # all ranks of both meshes, so that all redistributions between the two share one group
        group = group_of_ranks(tuple(sorted({*step.before.mesh.rank_list, *step.after.mesh.rank_list})))
    result_shape = ABSENT_SHAPE if own_after is None else box_shape(own_after)
    return _point_to_point(outgoing, incoming, kept, result_shape, group), bool(outgoing or incoming)


def _point_to_point(
    outgoing: Sequence[tuple[Box, int]],
    incoming: Sequence[tuple[Box, int]],
    kept: tuple[Box, Box] | None,
    result_shape: tuple[int, ...],
    group: Group | None,
) -> Run:
    """Send boxes of the local tensor, put boxes that arrive into the result, copy what stays.

    Args:
        outgoing: boxes of the local tensor, each with the global rank to send it to.
        incoming: boxes of the result, each with the global rank that it comes from.
        kept: a box of the local tensor that stays, and where it goes in the result.
        result_shape: shape of the result.
        group: the group; None if nothing is sent by anyone.
    """
    tensors, exchange = get_platform().tensors, get_platform().collectives.exchange
    # a box that fills the result is received in place
    in_place = len(incoming) == 1 and kept is None and box_shape(incoming[0][0]) == tuple(result_shape)

    def run(local: Tensor, arrivals: Arrivals | None = None) -> Tensor:
        result = tensors.empty(result_shape, local)
        arriving = [(result if in_place else tensors.empty(box_shape(box), local), rank) for box, rank in incoming]
        sent = [(tensors.contiguous(tensors.crop(local, box)), rank) for box, rank in outgoing]
        if kept is not None:
            tensors.paste(result, kept[1], tensors.crop(local, kept[0]))

        def unpack() -> None:
            if not in_place:
                for (buffer, _), (box, _) in zip(arriving, incoming, strict=True):
                    tensors.paste(result, box, buffer)

        work = None
        if group is not None and (sent or arriving):
            work = exchange(sent, arriving, group, arrivals is not None)
        conclude(work, unpack, arrivals, *(tensor for tensor, _ in sent))
        return result

    return run


# -- boxes ----------------------------------------------------------------------------------------------------------


def _stacking_dim(pieces: Sequence[Box], whole: Box, largest: tuple[int, ...]) -> int | None:
    """The dim along which the pieces, in this order and padded to `largest`, follow each other; None if there is none."""
    cut = [dim for dim, size in enumerate(largest) if size != whole[dim][1] - whole[dim][0]]
    if len(cut) != 1:
        return None
    dim = cut[0]
    start = whole[dim][0]
    for index, piece in enumerate(pieces):
        if box_numel(piece) and piece[dim][0] != start + index * largest[dim]:
            return None
        if any(box_numel(piece) and piece[d] != whole[d] for d in range(len(whole)) if d != dim):
            return None
    return dim


def _shared(own: Box, other: Box) -> Box | None:
    """What two boxes share, in coordinates of `own`; the whole (scalar) if they have no dims."""
    shared = intersect(own, other)
    return None if shared is None else relative_to(shared, own)


def _sections(boxes: Sequence[Box | None], splits: Sequence[int]) -> list[tuple[int, int, Box]]:
    """Where each box' elements stand in a flat buffer of all of them."""
    sections = []
    start = 0
    for box, count in zip(boxes, splits, strict=True):
        if box is not None:
            sections.append((start, start + count, box))
        start += count
    return sections
