"""A simulator of redistribution steps on arrays, for a whole mesh at once.

It knows layouts as the words say (dims, ordered axes, pending ops) and cuts index lists itself, so that it shares no
arithmetic with the code under test. Every step checks what it may use: only data of its own group, of the right places.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from hp_core.layout import Layout
from hp_core.mesh import DeviceMesh
from hp_core.redistribute.routes import route
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
    Transfer,
)

Array = npt.NDArray[np.float64]
Coordinate = tuple[int, ...]
Locals = dict[Coordinate, Array]
Indices = list[list[int]]

REDUCE: dict[str, Any] = {
    "sum": lambda parts: np.sum(parts, axis=0),
    "avg": lambda parts: np.mean(parts, axis=0),
    "max": lambda parts: np.max(parts, axis=0),
    "min": lambda parts: np.min(parts, axis=0),
}


def coordinates(sizes: tuple[int, ...]) -> list[Coordinate]:
    """All coordinates of a mesh."""
    return list(product(*(range(size) for size in sizes)))


@lru_cache(maxsize=1 << 14)
def held(layout: Layout, shape: tuple[int, ...], at: Coordinate) -> Indices:
    """Per tensor dim, the global indices that the rank at a coordinate holds."""
    result = []
    for dim, size in enumerate(shape):
        mine = list(range(size))
        for axis in layout.dim_axes[dim] if dim < len(layout.dim_axes) else ():
            parts = layout.mesh.shape[axis]
            if dim == 0 and layout.ragged is not None:
                ends = [sum(layout.ragged[:i]) * (size // sum(layout.ragged)) for i in range(parts + 1)]
                mine = mine[ends[at[axis]] : ends[at[axis] + 1]]
            else:
                step = -(-len(mine) // parts)
                mine = mine[at[axis] * step : (at[axis] + 1) * step]
        result.append(mine)
    return result


def shared(left: Indices, right: Indices) -> Indices:
    """Per tensor dim, the indices in both."""
    return [[i for i in one if i in other] for one, other in zip(left, right, strict=True)]


def contributions(layout: Layout, full: Array, seed: int) -> Locals:
    """Local tensors of a tensor whose value is `full`: pending contributions differ by rank and reduce to it."""
    rng = np.random.default_rng(seed)
    axes = [axis for axis, _ in layout.partials]
    places = coordinates(tuple(layout.mesh.shape[axis] for axis in axes))
    parts = dict.fromkeys(places, full)
    if axes:
        op = layout.partials[0][1]
        noise = {place: rng.integers(1, 50, full.shape).astype(float) for place in places}
        if op in ("sum", "avg"):
            goal = full if op == "sum" else full * len(places)
            parts = {place: noise[place] for place in places[1:]}
            parts[places[0]] = goal - sum(parts.values(), np.zeros_like(full))
        else:
            best = rng.integers(0, len(places), full.shape)
            sign = -1 if op == "max" else 1
            parts = {
                place: np.where(best == number, full, full + sign * noise[place]) for number, place in enumerate(places)
            }
    return {
        at: parts[tuple(at[axis] for axis in axes)][np.ix_(*held(layout, full.shape, at))]
        for at in coordinates(layout.mesh.shape)
    }


def value_of(layout: Layout, parts: Locals, shape: tuple[int, ...]) -> Array:
    """The global tensor; fails unless every rank holds exactly its box and replicas agree."""
    axes = [axis for axis, _ in layout.partials]
    full = np.full(shape, np.nan)
    for at, local in parts.items():
        index = held(layout, shape, at)
        assert local.shape == tuple(map(len, index)), f"rank at {at} holds {local.shape}, not its box"
        peers = [
            tuple(dict(zip(axes, place, strict=True)).get(axis, i) for axis, i in enumerate(at))
            for place in coordinates(tuple(layout.mesh.shape[axis] for axis in axes))
        ]
        value = REDUCE[layout.partials[0][1]]([parts[peer] for peer in peers]) if axes else local
        known = full[np.ix_(*index)]
        assert (np.isnan(known) | (known == value)).all(), f"rank at {at} disagrees with its replicas"
        full[np.ix_(*index)] = value
    return full


def run_plan(plan: Plan, parts: Locals) -> Locals:
    """Execute all steps of a plan, checking that they join up and that its numbers are what is really moved."""
    current = plan.src
    messages = nbytes = 0
    peak = max(local.size for local in parts.values())
    for step in plan.steps:
        parts = joined(current, step.before, parts, plan.global_shape)
        if isinstance(step, Transfer):
            parts, sent = run_transfer(step, parts, plan.global_shape)
        else:
            parts, sent = run_step(step, parts, plan.global_shape)
        assert sent * plan.itemsize == step.nbytes or isinstance(step, AllReduce)
        if isinstance(step, AllReduce):
            assert step.nbytes == -(-sent * plan.itemsize // step.group_size)
        current = step.after
        messages += isinstance(step, AllGather | AllReduce | ReduceScatter | AllToAll | Permute)
        messages += isinstance(step, Transfer) and sent > 0
        nbytes += step.nbytes
        peak = max(peak, *(local.size for local in parts.values()))
    parts = joined(current, plan.dst, parts, plan.global_shape)
    peak = max(peak, *(local.size for local in parts.values()))
    assert (plan.messages, plan.nbytes, plan.peak_bytes) == (messages, nbytes, peak * plan.itemsize)
    return parts


def joined(left: Layout, right: Layout, parts: Locals, shape: tuple[int, ...]) -> Locals:
    """The local tensors of `left` as those of `right`, which must mean the same; by the coordinates of the mesh of `right`."""
    if left.mesh is right.mesh:
        assert same_but_for_size_one(left, right), f"a step ends at {left}, the next one starts at {right}"
        return parts
    assert sorted(left.mesh.rank_list) == sorted(right.mesh.rank_list)
    for rank in left.mesh.rank_list:
        means = [
            (held(layout, shape, at_of(layout.mesh, rank)), pending_with(layout, rank)) for layout in (left, right)
        ]
        assert means[0] == means[1], f"{left} and {right} differ on rank {rank}: {means}"
    by_rank = {rank: parts[at_of(left.mesh, rank)] for rank in left.mesh.rank_list}
    return {at_of(right.mesh, rank): by_rank[rank] for rank in right.mesh.rank_list}


def at_of(mesh: DeviceMesh, rank: int) -> Coordinate:
    """Where a rank stands in a mesh."""
    return coordinates(mesh.shape)[mesh.rank_list.index(rank)]


def pending_with(layout: Layout, rank: int) -> object:
    """With which ranks a rank's contribution is to be reduced, and by which op."""
    mesh, at = layout.mesh, at_of(layout.mesh, rank)
    axes = [axis for axis, _ in layout.partials if mesh.shape[axis] > 1]
    peers = {
        mesh.rank_list[number]
        for number, place in enumerate(coordinates(mesh.shape))
        if all(place[axis] == at[axis] for axis in range(mesh.ndim) if axis not in axes)
    }
    return peers, {op for axis, op in layout.partials if axis in axes}


def run_transfer(step: Transfer, parts: Locals, shape: tuple[int, ...]) -> tuple[Locals, int]:
    """Execute a transfer to another mesh: every element that a rank shall hold comes exactly once, from where it is.

    Returns:
        The local tensors by the coordinates of the other mesh, and the elements that the busiest rank sends.
    """
    assert not step.before.partials
    assert not step.after.partials
    assert step.axes == ()
    old, new = step.before.mesh, step.after.mesh
    result = {at: np.full(tuple(map(len, held(step.after, shape, at))), np.nan) for at in coordinates(new.shape)}
    pieces = route(step.before, step.after, shape)
    assert len({piece[:2] for piece in pieces}) == len(pieces)
    sent = dict.fromkeys(old.rank_list, 0)
    for source, target, box in pieces:
        indices = [list(range(*interval)) for interval in box]
        at = at_of(new, target)
        own = held(step.after, shape, at)
        value = take(parts[at_of(old, source)], held(step.before, shape, at_of(old, source)), indices)
        assert np.isnan(take(result[at], own, indices)).all(), f"rank {target} gets elements twice"
        put(result[at], own, indices, value)
        sent[source] += value.size if source != target else 0
        if source != target and target in old.rank_list:
            mine = held(step.before, shape, at_of(old, target))
            assert not prod(map(len, shared(mine, indices))), f"rank {target} is sent what it holds"
    assert not any(np.isnan(local).any() for local in result.values()), "a rank doesn't get all that it shall hold"
    return result, max(sent.values())


def same_but_for_size_one(left: Layout, right: Layout) -> bool:
    """Whether two layouts differ at most in axes of one rank."""

    def reduced(layout: Layout) -> object:
        sizes = layout.mesh.shape
        dims = [tuple(axis for axis in axes if sizes[axis] > 1) for axes in layout.dim_axes]
        while dims and not dims[-1]:
            dims.pop()
        ragged = layout.ragged if dims and len(layout.ragged or ()) > 1 else None
        return dims, [pair for pair in layout.partials if sizes[pair[0]] > 1], ragged

    return left.mesh is right.mesh and reduced(left) == reduced(right)


def run_step(step: Step, parts: Locals, shape: tuple[int, ...]) -> tuple[Locals, int]:
    """Execute one step on all ranks.

    Returns:
        The new local tensors, and the elements that the busiest rank sends (for an all-reduce times the group size).
    """
    assert all(step.before.mesh.shape[axis] > 1 for axis in step.axes)
    assert list(step.axes) == sorted(step.axes)
    before = {at: held(step.before, shape, at) for at in parts}
    after = {at: held(step.after, shape, at) for at in parts}
    result: Locals = {}
    sent = 0
    for at, local in parts.items():
        group = [
            tuple(dict(zip(step.axes, place, strict=True)).get(axis, i) for axis, i in enumerate(at))
            for place in coordinates(tuple(step.before.mesh.shape[axis] for axis in step.axes))
        ]
        wanted = tuple(map(len, after[at]))
        if isinstance(step, AllGather | AllToAll | Permute):
            result[at] = np.full(wanted, np.nan)
            receives = 0
            for peer in group:
                common = shared(after[at], before[peer])
                if prod(map(len, common)):
                    receives += peer != at
                    put(result[at], after[at], common, take(parts[peer], before[peer], common))
            assert not np.isnan(result[at]).any(), f"{step}: the group doesn't hold all that {at} wants"
            if isinstance(step, AllGather):
                sent = max(sent, (len(group) - 1) * local.size)
            else:
                sizes = [prod(map(len, shared(before[at], after[peer]))) for peer in group if peer != at]
                sent = max(sent, sum(sizes))
                if isinstance(step, Permute):
                    assert receives <= 1
                    assert sum(size > 0 for size in sizes) <= 1
        elif isinstance(step, AllReduce | ReduceScatter):
            ops = {op for axis, op in step.before.partials if axis in step.axes}
            assert ops == {step.reduce_op}
            assert all(parts[peer].shape == local.shape for peer in group)
            whole = REDUCE[ops.pop()]([parts[peer] for peer in group])
            result[at] = take(whole, before[at], after[at])
            if isinstance(step, AllReduce):
                assert wanted == local.shape
                sent = max(sent, 2 * (len(group) - 1) * local.size)
            else:
                sent = max(sent, (len(group) - 1) * result[at].size)
        elif isinstance(step, Slice):
            result[at] = take(local, before[at], after[at])
        elif isinstance(step, Scale):
            keeps = step.reduce_op != "sum" or not any(at[axis] for axis in step.axes)
            result[at] = local if keeps else np.zeros_like(local)
        elif isinstance(step, Pad):
            result[at] = np.zeros(wanted)
            put(result[at], after[at], before[at], local)
        else:
            raise AssertionError(f"unknown step {step}")
    return result, sent


def take(local: Array, own: Indices, wanted: Indices) -> Array:
    """The part of a local tensor at the wanted global indices, all of which it must hold."""
    places = [[have.index(i) for i in want] for have, want in zip(own, wanted, strict=True)]
    return local[np.ix_(*places)] if places else local.copy()


def put(local: Array, own: Indices, where: Indices, value: Array) -> None:
    """Write a part of a local tensor, given by global indices, all of which it must hold."""
    local[np.ix_(*([have.index(i) for i in want] for have, want in zip(own, where, strict=True)))] = value
