"""What this rank runs for a plan: one closure per step, compiled once from bounds, and the cache of such programs.

A closure takes a local tensor and gives a local tensor that shares no storage with it. Where the gathered or scattered
dim is the outermost in memory the collective reads and writes the tensors themselves; elsewhere one permuting copy is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hp_core.geometry import Box, box_numel, box_shape, clipped, intersect, origin_box, relative_to
from hp_core.layout import Layout
from hp_core.platform import Group, get_platform
from hp_core.platform.protocol import Tensor
from hp_core.process_group import on_destroy
from hp_core.redistribute.planner import plan_redistribute
from hp_core.redistribute.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Pad,
    Permute,
    Plan,
    ReduceScatter,
    Scale,
    Slice,
    Step,
)

__all__ = ["CacheInfo", "Program", "program_for", "redistribute_cache_clear", "redistribute_cache_info"]

Run = Callable[[Tensor], Tensor]


class CacheInfo(NamedTuple):
    """Counters of the cache of programs."""

    hits: int
    misses: int
    size: int


class Program:
    """A plan made ready for this rank: call it with a local tensor.

    Attributes:
        plan: what it does.
        is_identity: whether it does nothing.
        keeps: of a program that only makes a replicated value pending, whether this rank keeps it (else it holds zeros).
    """

    __slots__ = ("_runs", "is_identity", "keeps", "plan")

    def __init__(self, plan: Plan, runs: tuple[Run, ...], keeps: bool | None) -> None:
        self.plan = plan
        self._runs = runs
        self.is_identity = not runs
        self.keeps = keeps

    def __call__(self, local: Tensor) -> Tensor:
        """The local tensor after all steps; `local` itself if there are none."""
        for run in self._runs:
            local = run(local)
        return local


_programs: dict[tuple[Layout, Layout, tuple[int, ...], int], Program] = {}
_hits = 0


def program_for(src: Layout, dst: Layout, global_shape: tuple[int, ...], itemsize: int) -> Program:
    """This rank's program from one layout to another; planned and compiled on the first call, then found in the cache.

    Raises:
        RedistributeError, LayoutError: see `plan_redistribute`. Nothing has been communicated then.
    """
    global _hits
    key = (src, dst, global_shape, itemsize)
    program = _programs.get(key)
    if program is not None:
        _hits += 1
        return program
    plan = plan_redistribute(src, dst, tuple(global_shape), itemsize)
    keeps = None
    if len(plan.steps) == 1 and isinstance(plan.steps[0], Scale):
        keeps = _keeps(plan.steps[0])
    program = Program(plan, tuple(_compile(step, plan.global_shape) for step in plan.steps), keeps)
    _programs[key] = program
    return program


def redistribute_cache_info() -> CacheInfo:
    """Hits, misses and size of the cache of redistribution programs."""
    return CacheInfo(_hits, len(_programs), len(_programs))


def redistribute_cache_clear() -> None:
    """Forget all programs (they hold process groups) and reset the counters."""
    global _hits
    _programs.clear()
    _hits = 0


def _compile(step: Step, shape: tuple[int, ...]) -> Run:
    mesh = step.before.mesh
    if isinstance(step, Slice):
        return _slice(step, shape)
    if isinstance(step, Pad):
        return _pad(step, shape)
    if isinstance(step, Scale):
        return _scale(_keeps(step))
    if not _moves_anything(step, shape):
        tensors, result_shape = get_platform().tensors, step.after.local_shape(shape)
        return lambda local: tensors.zeros(result_shape, local)
    group = mesh.get_group(step.axes)
    if isinstance(step, AllReduce):
        return _all_reduce(str(step.reduce_op), group)
    if isinstance(step, AllGather):
        return _all_gather(step, shape, group)
    if isinstance(step, ReduceScatter):
        return _reduce_scatter(step, shape, group)
    if isinstance(step, Permute):
        return _permute(step, shape, group)
    assert isinstance(step, AllToAll)
    return _all_to_all(step, shape, group)


def _moves_anything(step: Step, shape: tuple[int, ...]) -> bool:
    """Whether any member of this rank's group holds an element; equal on all members."""
    members = step.before.mesh.members(step.axes)
    return any(box_numel(layout.bounds(shape, rank)) for rank in members for layout in (step.before, step.after))


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


def _keeps(step: Step) -> bool:
    """Whether this rank keeps a value that becomes pending: a sum counts it once, other reductions don't mind."""
    coordinate = step.before.mesh.require_coordinate()
    return step.reduce_op != "sum" or all(coordinate[axis] == 0 for axis in step.axes)


def _scale(keeps: bool) -> Run:
    tensors = get_platform().tensors
    if keeps:
        return tensors.clone
    return lambda local: tensors.zeros(tensors.shape(local), local)


# -- collectives ----------------------------------------------------------------------------------------------------


def _all_reduce(reduce_op: str, group: Group) -> Run:
    tensors, all_reduce = get_platform().tensors, get_platform().collectives.all_reduce

    def run(local: Tensor) -> Tensor:
        result = tensors.clone(local)
        all_reduce(result, reduce_op, group)
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
        cut = origin_box(result_shape)

        def run_in_place(local: Tensor) -> Tensor:
            result = tensors.empty(gathered_shape, local)
            all_gather(result, _padded(local, own, largest), group)
            return result if gathered_shape == result_shape else tensors.crop(result, cut)

        return run_in_place

    if dim is not None and all(box_shape(piece) == largest for piece in pieces):

        def run_permuting(local: Tensor) -> Tensor:
            gathered = tensors.empty(stacked, local)
            all_gather(gathered, tensors.contiguous(local), group)
            return tensors.contiguous(tensors.reshape(tensors.movedim(gathered, 0, dim), result_shape))

        return run_permuting

    targets = [(i, relative_to(piece, whole), box_shape(piece)) for i, piece in enumerate(pieces) if box_numel(piece)]

    def run(local: Tensor) -> Tensor:
        gathered = tensors.empty(stacked, local)
        all_gather(gathered, _padded(local, own, largest), group)
        result = tensors.empty(result_shape, local)
        for i, target, size in targets:
            tensors.paste(result, target, tensors.crop(gathered[i], origin_box(size)))
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

        def run_even(local: Tensor) -> Tensor:
            if not outermost:
                local = tensors.movedim(tensors.reshape(local, split), dim, 0)
            result = tensors.empty(own, local)
            reduce_scatter(result, tensors.contiguous(local), reduce_op, group)
            return result

        return run_even

    targets = [
        (i, relative_to(piece, whole), origin_box(box_shape(piece)))
        for i, piece in enumerate(pieces)
        if box_numel(piece)
    ]
    cut = origin_box(own)

    def run(local: Tensor) -> Tensor:
        source = tensors.zeros(stacked, local)
        for i, origin, target in targets:
            tensors.paste(source[i], target, tensors.crop(local, origin))
        result = tensors.empty(largest, local)
        reduce_scatter(result, source, reduce_op, group)
        return result if own == largest else tensors.clone(tensors.crop(result, cut))

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

    def run(local: Tensor) -> Tensor:
        source = tensors.empty((sum(send_splits),), local)
        for start, stop, box in packing:
            section = tensors.reshape(source[start:stop], box_shape(box))
            tensors.paste(section, origin_box(box_shape(box)), tensors.crop(local, box))
        received = tensors.empty((sum(receive_splits),), local)
        all_to_all(received, source, *splits, group)
        result = tensors.empty(result_shape, local)
        for start, stop, box in unpacking:
            tensors.paste(result, box, tensors.reshape(received[start:stop], box_shape(box)))
        return result

    return run


def _permute(step: Step, shape: tuple[int, ...], group: Group) -> Run:
    tensors, exchange = get_platform().tensors, get_platform().collectives.exchange
    own_rank = get_platform().processes.rank()
    own_before, own_after = step.before.bounds(shape), step.after.bounds(shape)
    sends = {rank: _shared(own_before, step.after.bounds(shape, rank)) for rank in group.ranks}
    receives = {rank: _shared(own_after, step.before.bounds(shape, rank)) for rank in group.ranks}
    kept_from, kept_to = sends.pop(own_rank), receives.pop(own_rank)
    outgoing = [(box, rank) for rank, box in sends.items() if box is not None]
    incoming = [(box, rank) for rank, box in receives.items() if box is not None]
    result_shape = box_shape(own_after)

    def run(local: Tensor) -> Tensor:
        result = tensors.empty(result_shape, local)
        arriving = [(tensors.empty(box_shape(box), local), rank) for box, rank in incoming]
        exchange([(tensors.contiguous(tensors.crop(local, box)), rank) for box, rank in outgoing], arriving, group)
        for (buffer, _), (box, _) in zip(arriving, incoming, strict=True):
            tensors.paste(result, box, buffer)
        if kept_from is not None and kept_to is not None:
            tensors.paste(result, kept_to, tensors.crop(local, kept_from))
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


def _padded(local: Tensor, own: tuple[int, ...], largest: tuple[int, ...]) -> Tensor:
    tensors = get_platform().tensors
    if own == largest:
        return tensors.contiguous(local)
    padded = tensors.zeros(largest, local)
    tensors.paste(padded, origin_box(own), local)
    return padded


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


on_destroy(redistribute_cache_clear)
