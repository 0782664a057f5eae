"""Plans from a layout on one mesh to a layout on another: other ranks, fewer, more, or the same in another arrangement.

Such a plan has three parts: pending reductions are done on the source's mesh (and may leave the result cut finer), one
`Transfer` goes point to point, and on the target's mesh what came in cuts is gathered or made pending. Which cuts are
worth it is found by trying them. Meshes that are views of one refined mesh may also use ordinary collectives there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from hp_core.errors import RedistributeError
from hp_core.layout import Layout, intern
from hp_core.redistribute.refinement import common_refinement, on_refinement
from hp_core.redistribute.routes import fan_in, traffic
from hp_core.redistribute.steps import Plan, Step, Transfer, mesh_text

if TYPE_CHECKING:
    from hp_core.redistribute.planner import CostModel

__all__ = ["coincide", "plan_across"]

PlanWithin = Callable[[Layout, Layout, "tuple[int, ...]", int, "CostModel", "int | None"], Plan]

_MANY_PAIRS = 1 << 12
"""Above so many pairs of ranks, only cuts of the longest dim are tried."""

_Label = tuple[int, int, int]  # attoseconds, steps, peak bytes: compared in this order


def plan_across(
    src: Layout,
    dst: Layout,
    shape: tuple[int, ...],
    itemsize: int,
    cost_model: CostModel,
    memory_limit: int | None,
    plan_within: PlanWithin,
) -> Plan:
    """The cheapest plan found from `src` to `dst`, which lie on different meshes.

    Args:
        src: layout the tensor has.
        dst: layout it shall have.
        shape: shape of the global tensor.
        itemsize: bytes per element.
        cost_model: what communication costs; between meshes its `bandwidth` counts.
        memory_limit: cap, in bytes, on every local tensor that a step gives; None for no cap.
        plan_within: plans between layouts on one mesh.

    Raises:
        RedistributeError: no plan stays under the memory limit.
    """
    ends = [_bytes(layout, shape, itemsize) for layout in (src, dst)]
    if coincide(src, dst, shape):
        return Plan(src, dst, shape, itemsize, (), 0, 0, max(ends))
    best: tuple[_Label, tuple[Step, ...]] | None = None
    for way in _ways(src, dst, shape, cost_model):
        if best is not None and way.least >= best[0][0]:
            continue
        label_and_steps = _follow(way, shape, itemsize, memory_limit, plan_within, None if best is None else best[0][0])
        if label_and_steps is not None and (best is None or label_and_steps[0] < best[0]):
            best = label_and_steps
    if best is None:
        raise RedistributeError(
            f"no plan from {src.compact_str} on {mesh_text(src.mesh)} to {dst.compact_str} on {mesh_text(dst.mesh)} for shape "
            f"{shape} ({itemsize} B per element) keeps every local tensor within memory_limit={memory_limit} B: the source "
            f"takes {ends[0]} B, the target {ends[1]} B. Raise the limit, or redistribute in parts."
        )
    (_, _, peak), steps = best
    messages, nbytes = sum(step.messages for step in steps), sum(step.nbytes for step in steps)
    return Plan(src, dst, shape, itemsize, steps, messages, nbytes, max(peak, *ends))


def coincide(src: Layout, dst: Layout, shape: tuple[int, ...]) -> bool:
    """Whether both layouts mean the same: the same ranks hold the same parts, pending over the same groups of ranks."""
    if set(src.mesh.rank_list) != set(dst.mesh.rank_list):
        return False
    pending = [
        (tuple(axis for axis, _ in layout.partials if layout.mesh.shape[axis] > 1), dict(layout.partials))
        for layout in (src, dst)
    ]
    kinds = [{ops[axis] for axis in axes} for axes, ops in pending]
    return kinds[0] == kinds[1] and all(
        src.bounds(shape, rank) == dst.bounds(shape, rank)
        and set(src.mesh.members(pending[0][0], rank)) == set(dst.mesh.members(pending[1][0], rank))
        for rank in src.mesh.rank_list
    )


class _Way(NamedTuple):
    """A way to try: plans on one mesh, and between the first and the second a transfer, if there are two.

    Attributes:
        within: source, target and cost model of each plan.
        least: attoseconds that it takes at least.
    """

    within: tuple[tuple[Layout, Layout, CostModel], ...]
    least: int


def _ways(src: Layout, dst: Layout, shape: tuple[int, ...], cost_model: CostModel) -> list[_Way]:
    """The ways to try, the shortest as far as can be told first."""
    ways = []
    refinement = common_refinement(src.mesh, dst.mesh)
    if refinement is not None:
        refined_src = on_refinement(src, refinement.mesh, refinement.first, shape)
        refined_dst = on_refinement(dst, refinement.mesh, refinement.second, shape)
        if refined_src is not None and refined_dst is not None:
            model = _refined_model(cost_model, refinement.mesh.mesh_dim_names)
            ways.append(_Way(((refined_src, refined_dst, model),), 0))
    dims = list(range(len(shape)))
    if dims and src.mesh.size() * dst.mesh.size() > _MANY_PAIRS:
        dims = [shape.index(max(shape))]
    latency = cost_model.latency_attoseconds()
    for leaving, arriving in product(_settled(src, dims), _spread(dst, dims)):
        within = ((src, leaving, cost_model), (arriving, dst, cost_model))
        ways.append(_Way(within, latency * fan_in(leaving, arriving, shape)))
    return sorted(ways, key=lambda way: way.least)


def _follow(
    way: _Way,
    shape: tuple[int, ...],
    itemsize: int,
    memory_limit: int | None,
    plan_within: PlanWithin,
    better_than: int | None,
) -> tuple[_Label, tuple[Step, ...]] | None:
    """The steps of a way and what it costs; None if it is over the limit, or takes as long as what is known."""
    cost = 0
    peak = 0
    transfer: list[Step] = []
    if len(way.within) == 2:
        leaving, arriving, model = way.within[0][1], way.within[1][0], way.within[0][2]
        sent, received, messages = traffic(leaving, arriving, shape)
        cost = messages * model.latency_attoseconds() + max(sent, received) * itemsize * model.byte_attoseconds("")
        peak = _bytes(arriving, shape, itemsize)
        if (memory_limit is not None and peak > memory_limit) or (better_than is not None and cost >= better_than):
            return None
        transfer = [Transfer((), leaving, arriving, sent * itemsize)]
    try:
        plans = [plan_within(old, new, shape, itemsize, model, memory_limit) for old, new, model in way.within]
    except RedistributeError:  # over the limit
        return None
    cost += sum(_cost(plan, model) for plan, (_, _, model) in zip(plans, way.within, strict=True))
    steps = (*plans[0].steps, *transfer, *(step for plan in plans[1:] for step in plan.steps))
    return (cost, len(steps), max(peak, *(plan.peak_bytes for plan in plans))), steps


def _bytes(layout: Layout, shape: tuple[int, ...], itemsize: int) -> int:
    return prod(layout.largest_local_shape(shape)) * itemsize


def _settled(src: Layout, dims: list[int]) -> Iterator[Layout]:
    """Where to leave from: pending reductions are done, everywhere or (reduce-scatter) each rank its part."""
    yield src.gradient
    pending = tuple(axis for axis, _ in src.partials if src.mesh.shape[axis] > 1)
    yield from _cut_further(src.gradient, pending, dims)


def _spread(dst: Layout, dims: list[int]) -> Iterator[Layout]:
    """Where to arrive: as in `dst`, or cut also over axes along which it replicates or is pending.

    What replicates is gathered later, so that it crosses between the meshes once; a pending sum is padded.
    """
    yield dst.gradient
    pending = tuple(axis for axis, _ in dst.partials if dst.mesh.shape[axis] > 1)
    still = tuple(
        axis
        for axis in range(dst.mesh.ndim)
        if dst.mesh.shape[axis] > 1 and axis not in dst.sharded_axes and axis not in pending
    )
    for axes in dict.fromkeys((still, pending, tuple(sorted(still + pending)))):
        yield from _cut_further(dst.gradient, axes, dims)


def _cut_further(layout: Layout, axes: tuple[int, ...], dims: list[int]) -> Iterator[Layout]:
    """The layout with these axes as innermost cuts, all of one dim."""
    if not axes:
        return
    for dim in dims:
        if dim == 0 and layout.ragged is not None:
            continue
        cuts = [layout.axes_of(d) for d in range(max(dim + 1, len(layout.dim_axes)))]
        cuts[dim] += axes
        yield intern(layout.mesh, tuple(cuts), (), layout.ragged)


def _refined_model(cost_model: CostModel, names: tuple[str, ...]) -> CostModel:
    """The cost model in the refined mesh' names; a part of an axis is as fast as the slower of what it is a part of."""
    known = dict(cost_model.axis_bandwidth)
    pairs = tuple((name, [known[part] for part in name.split("/") if part in known]) for name in names)
    bandwidths = tuple((name, min(speeds)) for name, speeds in pairs if speeds)
    return type(cost_model)(cost_model.latency, cost_model.bandwidth, bandwidths)


def _cost(plan: Plan, cost_model: CostModel) -> int:
    """Attoseconds that a plan on one mesh takes."""
    return sum(
        cost_model.latency_attoseconds() * step.messages
        + step.nbytes * max(cost_model.byte_attoseconds(name) for name in step.axis_names)
        for step in plan.steps
        if not step.local
    )
