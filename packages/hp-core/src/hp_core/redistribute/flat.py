"""Plans from and to flat layouts: all ways lead over the layout in which the piece is whole on the axis that shares it.

Between such layouts the planner searches as ever. What is pending on other axes is finished on the flat pieces, which are
smaller, and what is pending on the sharing axis itself is finished by a reduce-scatter into them.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING

from hp_core.errors import RedistributeError
from hp_core.layout import Layout, intern
from hp_core.redistribute.steps import AllGather, AllReduce, Pad, Plan, ReduceScatter, Scale, Slice, Step

if TYPE_CHECKING:
    from hp_core.redistribute.planner import CostModel

__all__ = ["plan_flat"]

PlanWithin = Callable[[Layout, Layout, "tuple[int, ...]", int, "CostModel", "int | None"], Plan]


def plan_flat(
    src: Layout,
    dst: Layout,
    shape: tuple[int, ...],
    itemsize: int,
    cost_model: CostModel,
    memory_limit: int | None,
    plan_within: PlanWithin,
) -> Plan:
    """The plan from `src` to `dst`, one of which (or both) is flat; they may lie on different meshes.

    Args:
        src: layout the tensor has.
        dst: layout it shall have.
        shape: shape of the global tensor.
        itemsize: bytes per element.
        cost_model: what communication costs, for the parts that are searched.
        memory_limit: cap, in bytes, on every local tensor that a step gives; None for no cap.
        plan_within: plans between any layouts.

    Raises:
        RedistributeError: the plan isn't under the memory limit.
    """

    def search(old: Layout, new: Layout) -> tuple[Step, ...]:
        return plan_within(old, new, shape, itemsize, cost_model, memory_limit).steps

    if src.mesh is not dst.mesh:
        steps = [*search(src, src.unflat), *search(src.unflat, dst.unflat), *search(dst.unflat, dst)]
    else:
        steps = _Way(shape, itemsize, search).steps(_without_single_axes(src), _without_single_axes(dst))
    ends, peaks = (
        [prod(layout.largest_local_shape(shape)) * itemsize for layout in layouts]
        for layouts in ((src, dst), tuple(step.after for step in steps))
    )
    if memory_limit is not None and max(peaks, default=0) > memory_limit:
        raise RedistributeError(
            f"the plan from {src.compact_str} to {dst.compact_str} for shape {shape} ({itemsize} B per element) makes a local "
            f"tensor of {max(peaks)} B, more than memory_limit={memory_limit} B: shares are gathered before they are cut anew. "
            f"Raise the limit, or redistribute in parts."
        )
    messages, nbytes = sum(step.messages for step in steps), sum(step.nbytes for step in steps)
    return Plan(src, dst, shape, itemsize, tuple(steps), messages, nbytes, max(*ends, *peaks))


class _Way:
    """The steps between layouts on one mesh, written without axes of one rank (but for the one that shares).

    Args:
        shape: shape of the global tensor.
        itemsize: bytes per element.
        search: from two layouts that aren't flat to the steps between them.
    """

    def __init__(
        self, shape: tuple[int, ...], itemsize: int, search: Callable[[Layout, Layout], tuple[Step, ...]]
    ) -> None:
        self.shape, self.itemsize, self.search = shape, itemsize, search

    def steps(self, src: Layout, dst: Layout) -> list[Step]:
        """All steps from `src` to `dst`."""
        if src.flat is None and dst.flat is None:
            return list(self.search(src, dst))
        if src.flat is None:
            return self._to_flat(src, dst)
        if self._shares_alike(src, dst):
            return self._pending(src, dst)
        return self._from_flat(src, dst)

    def _from_flat(self, src: Layout, dst: Layout) -> list[Step]:
        """Finish what the target doesn't keep pending, nor cuts; gather, or pad to a sum if the target wants one."""
        assert src.flat is not None
        axis = src.flat[0]
        settled = src.with_partials(
            tuple(pair for pair in src.partials if pair in dst.partials or pair[0] in dst.sharded_axes)
        )
        steps = self._pending(src, settled)
        summed = (*settled.partials, (axis, "sum"))
        kind: type[Step] = AllGather
        whole = settled.unflat
        if (axis, "sum") in dst.partials and {reduce_op for _, reduce_op in summed} == {"sum"}:
            kind, whole = Pad, whole.with_partials(summed)
        return [*steps, self._step(kind, axis, settled, whole), *self.steps(whole, dst)]

    def _to_flat(self, src: Layout, dst: Layout) -> list[Step]:
        """Cut as the target is with the piece whole, leaving pending what may stay so; share; finish on the shares."""
        assert dst.flat is not None
        axis, mesh = dst.flat[0], dst.mesh
        cut = {one for axes in dst.dim_axes for one in axes}
        carried = tuple(pair for pair in src.partials if pair[0] not in cut)
        whole = intern(mesh, dst.dim_axes, carried, dst.ragged)
        rest = tuple(pair for pair in carried if pair[0] != axis)
        shared = intern(mesh, dst.dim_axes, rest, dst.ragged, dst.flat)
        kind = Slice if rest == carried else ReduceScatter
        return [*self.search(src, whole), self._step(kind, axis, whole, shared), *self._pending(shared, dst)]

    def _pending(self, src: Layout, dst: Layout) -> list[Step]:
        """From `src` to what `dst` has pending, where both hold the same."""
        finished = tuple(axis for axis, reduce_op in src.partials if (axis, reduce_op) not in dst.partials)
        added = tuple(axis for axis, reduce_op in dst.partials if (axis, reduce_op) not in src.partials)
        kept = src.with_partials(tuple(pair for pair in src.partials if pair in dst.partials))
        steps: list[Step] = []
        if finished:
            group = prod(src.mesh.shape[axis] for axis in finished)
            nbytes = -(-2 * (group - 1) * self._largest(src) * self.itemsize // group)
            steps.append(AllReduce(finished, src, kept, nbytes))
        if added:
            steps.append(Scale(added, kept, kept.with_partials(dst.partials)))
        return steps

    def _step(self, kind: type[Step], axis: int, before: Layout, after: Layout) -> Step:
        """A step between shares and the whole piece; the shares travel padded to the largest."""
        share = before if before.flat is not None else after
        sent = 0 if kind.local else (share.mesh.shape[axis] - 1) * self._largest(share) * self.itemsize
        return kind((axis,), before, after, sent)

    def _shares_alike(self, src: Layout, dst: Layout) -> bool:
        """Whether every rank holds the same under both, whatever is pending."""
        if src.flat is None or dst.flat is None or (src.dim_axes, src.ragged) != (dst.dim_axes, dst.ragged):
            return False
        if src.flat[0] != dst.flat[0] and {src.mesh.shape[flat[0]] for flat in (src.flat, dst.flat)} != {1}:
            return False
        return src.flat == dst.flat or all(
            src.flat_interval(self.shape, rank) == dst.flat_interval(self.shape, rank) for rank in src.mesh.rank_list
        )

    def _largest(self, layout: Layout) -> int:
        return prod(layout.largest_local_shape(self.shape))


def _without_single_axes(layout: Layout) -> Layout:
    """The same without axes of one rank, but for the one that shares: its local tensor has another shape."""
    sizes = layout.mesh.shape
    dims = tuple(tuple(axis for axis in axes if sizes[axis] > 1) for axes in layout.dim_axes)
    partials = tuple(pair for pair in layout.partials if sizes[pair[0]] > 1)
    return intern(layout.mesh, dims, partials, layout.ragged if dims and dims[0] else None, layout.flat)
