"""The cheapest cost of every redistribution on a small mesh, by exhaustion.

All layouts are listed; for each ordered pair it is decided from the meaning of the primitives whether one of them leads
from the one to the other, and what it costs, by counting elements of index sets. Nothing is pruned, nothing is shared
with the planner. (An exchange over more axes than have to move isn't listed: the same bytes move in a larger group.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import permutations, product
from math import prod

from hp_core.layout import Layout, intern
from hp_core.mesh import DeviceMesh

from .simulate import Coordinate, coordinates, held


def all_layouts(
    mesh: DeviceMesh, ndim: int, ops: Sequence[str] = ("sum",), ragged: Sequence[tuple[int, tuple[int, ...]]] = ()
) -> list[Layout]:
    """All layouts of a tensor of `ndim` dims: every axis cuts some dim, in every order, or is pending, or replicates.

    Args:
        mesh: the mesh.
        ndim: number of dims.
        ops: reduce ops of pending axes.
        ragged: pairs of an axis and shares by which it may also cut dim 0, alone.
    """
    found: dict[Layout, None] = {}
    for roles in product(range(ndim + 2), repeat=mesh.ndim):
        cut = [[axis for axis, role in enumerate(roles) if role == dim] for dim in range(ndim)]
        pending = [axis for axis, role in enumerate(roles) if role == ndim]
        for dims in product(*(permutations(axes) for axes in cut)):
            for op in ops if pending else ("sum",):
                partials = tuple((axis, op) for axis in pending)
                found[intern(mesh, dims, partials)] = None
                for axis, shares in ragged:
                    if dims[0] == (axis,):
                        found[intern(mesh, dims, partials, shares)] = None
    return list(found)


class BruteForce:
    """All primitive moves between all layouts of one tensor, with their cost.

    Args:
        layouts: the layouts.
        shape: shape of the global tensor.
        itemsize: bytes per element.
        latency: cost of a message, in whole nanoseconds.
        byte_time: cost of a byte along each mesh axis, in whole nanoseconds.
    """

    def __init__(
        self, layouts: list[Layout], shape: tuple[int, ...], itemsize: int, latency: int, byte_time: Sequence[int]
    ) -> None:
        self.mesh = layouts[0].mesh
        self.places = coordinates(self.mesh.shape)
        # Index sets as bit masks: the bits that two ranks share are what one can give to the other.
        self.masks = {
            layout: {at: [sum(1 << int(i) for i in own) for own in held(layout, shape, at)] for at in self.places}
            for layout in layouts
        }
        self.ndim = len(shape)
        self.latency = latency
        self.byte_time = byte_time
        self.itemsize = itemsize
        self.edges: dict[Layout, list[tuple[int, Layout]]] = {
            layout: [(cost, other) for other in layouts for cost in self._primitives(layout, other)]
            for layout in layouts
        }

    def costs_from(self, src: Layout) -> dict[Layout, int]:
        """Cheapest cost to every layout, in nanoseconds."""
        best = {src: 0}
        queue = [(0, 0, src)]
        count = 0
        while queue:
            cost, _, layout = heappop(queue)
            if cost > best[layout]:
                continue
            for price, other in self.edges[layout]:
                if cost + price < best.get(other, cost + price + 1):
                    best[other] = cost + price
                    count += 1
                    heappush(queue, (cost + price, count, other))
        return best

    def _primitives(self, old: Layout, new: Layout) -> Iterator[int]:
        """The costs of all primitives that lead from `old` to `new` in one step."""
        cuts = (
            [self._tokens(old, dim) for dim in range(self.ndim)],
            [self._tokens(new, dim) for dim in range(self.ndim)],
        )
        axes_cut = [{axis for tokens in dims for axis, _ in tokens} for dims in cuts]
        grows = all(after[: len(before)] == before for before, after in zip(*cuts, strict=True))
        shrinks = all(before[: len(after)] == after for before, after in zip(*cuts, strict=True))
        was, becomes = dict(old.partials), dict(new.partials)
        added, removed = axes_cut[1] - axes_cut[0], axes_cut[0] - axes_cut[1]
        if old is new:
            return
        if was == becomes:
            if shrinks:  # all-gather
                group = prod(self.mesh.shape[axis] for axis in removed)
                yield self._price((group - 1) * self._most(old) * self.itemsize, removed)
            elif grows:  # slice
                yield 0
            elif not added and not removed:  # all-to-all or permute
                moving = set()
                for before, after in zip(*cuts, strict=True):
                    same = 0
                    while same < min(len(before), len(after)) and before[same] == after[same]:
                        same += 1
                    moving |= {axis for axis, _ in before[same:] + after[same:]}
                yield self._price(max(self._sends(old, new, moving, at) for at in self.places) * self.itemsize, moving)
        elif becomes.items() < was.items():
            finished = set(was) - set(becomes)
            group = prod(self.mesh.shape[axis] for axis in finished)
            if cuts[0] == cuts[1]:  # all-reduce
                yield self._price(-(-2 * (group - 1) * self._most(old) * self.itemsize // group), finished)
            elif grows and added == finished:  # reduce-scatter
                yield self._price((group - 1) * self._most(new) * self.itemsize, finished)
        elif was.items() < becomes.items():
            started = set(becomes) - set(was)
            if cuts[0] == cuts[1] or (shrinks and removed == started and set(becomes.values()) == {"sum"}):  # scale
                yield 0

    def _tokens(self, layout: Layout, dim: int) -> list[tuple[int, object]]:
        axes = layout.dim_axes[dim] if dim < len(layout.dim_axes) else ()
        return [(axis, layout.ragged if dim == 0 else None) for axis in axes]

    def _most(self, layout: Layout) -> int:
        return max(prod(mask.bit_count() for mask in masks) for masks in self.masks[layout].values())

    def _sends(self, old: Layout, new: Layout, axes: set[int], at: Coordinate) -> int:
        return sum(
            prod((a & b).bit_count() for a, b in zip(self.masks[old][at], self.masks[new][peer], strict=True))
            for peer in self.places
            if peer != at and all(peer[axis] == at[axis] for axis in range(self.mesh.ndim) if axis not in axes)
        )

    def _price(self, nbytes: int, axes: set[int]) -> int:
        return self.latency + nbytes * max(self.byte_time[axis] for axis in axes)
