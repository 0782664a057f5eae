"""Over which ranks a sum over all elements of parameters must run, and what each rank must add so that each counts once.

Pure integers. A parameter is a global tensor: its layout says how many ranks hold each of its elements. Ranks may list
different tensors in the same place (sub-meshes of the same kind, one for each row of ranks), so each adds up only what
belongs to its own list: contributions meet in slots of one vector, numbered alike on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from hp_core.errors import LayoutError
from hp_core.layout import Layout
from hp_core.mesh import DeviceMesh

__all__ = ["Counting", "Place", "Sum", "count_once"]


@dataclass(frozen=True)
class Sum:
    """One reduction of a vector.

    Attributes:
        ranks: the ranks that take part, ascending.
        slots: length of the vector.
        read: which slots make up this rank's total.
        mesh: one of those that it is for.
    """

    ranks: tuple[int, ...]
    slots: int
    read: tuple[int, ...]
    mesh: DeviceMesh | None


@dataclass(frozen=True)
class Place:
    """Where a parameter's local elements are added.

    Attributes:
        sum: index of the reduction.
        slot: which slot.
        weight: by what they are multiplied: one by the number of ranks that add the same ones to the same slot.
    """

    sum: int
    slot: int
    weight: float


@dataclass(frozen=True)
class Counting:
    """The reductions, in the order in which all ranks run them, and a place for each parameter."""

    sums: tuple[Sum, ...]
    places: tuple[Place, ...]


@lru_cache(maxsize=64)
def count_once(
    layouts: tuple[Layout | None, ...],
    rank: int,
    world: int,
    mesh: DeviceMesh | None = None,
    distinct: tuple[frozenset[int], ...] = (),
) -> Counting:
    """Plan a sum in which each element of each parameter counts once.

    Without `mesh` there is one reduction over the ranks of all layouts, if one of the layouts is on all of these, or if
    they are the world; else one for each set of ranks, in the order of the parameters: from the sub-meshes that this rank
    is part of, nobody can tell which others there are.

    Args:
        layouts: of each parameter's gradient; None for a plain tensor, which counts as one that all ranks hold.
        rank: this process.
        world: number of processes.
        mesh: all ranks that hold parameters; then there is one reduction, over these.
        distinct: for each parameter the axes of `mesh` along which ranks list different ones in its place.

    Raises:
        LayoutError: the rank can't know of all sums that it must take part in.
    """
    if mesh is not None:
        return _over_mesh(layouts, rank, mesh, distinct)
    meshes = {_ranks(layout): layout.mesh for layout in layouts if layout is not None}
    if not meshes:
        return Counting((Sum((rank,), 1, (0,), None),), (Place(0, 0, 1.0),) * len(layouts))
    union = tuple(sorted({member for ranks in meshes for member in ranks}))
    if union in meshes or len(union) == world:
        if rank not in union:
            raise LayoutError(
                f"rank {rank} lists parameters that lie on ranks {list(union)} only, so it can't learn their norm; leave them out "
                f"on this rank, or pass mesh= with all ranks that clip."
            )
        slots = _Slots(union)
        places = tuple(
            Place(0, 0, 1 / len(union)) if layout is None else Place(0, slots.of(layout), 1 / _replicas(layout))
            for layout in layouts
        )
        return Counting((slots.sum(next(iter(meshes.values()))),), places)
    outside = [ranks for ranks in meshes if rank not in ranks]
    if outside:
        raise LayoutError(
            f"rank {rank} lists parameters on ranks {[list(ranks) for ranks in meshes]}: it isn't among {list(outside[0])}, and no "
            f"mesh covers them all. Pass mesh= with all ranks that clip."
        )
    order = {ranks: index for index, ranks in enumerate(meshes)}
    first = next(iter(meshes))
    return Counting(
        tuple(Sum(ranks, 1, (0,), one) for ranks, one in meshes.items()),
        tuple(
            Place(0, 0, 1 / len(first)) if layout is None else Place(order[_ranks(layout)], 0, 1 / _replicas(layout))
            for layout in layouts
        ),
    )


def _over_mesh(
    layouts: tuple[Layout | None, ...], rank: int, mesh: DeviceMesh, distinct: tuple[frozenset[int], ...]
) -> Counting:
    mesh.require_coordinate(rank)
    slots = _Slots(tuple(sorted(mesh.rank_list)))
    places = []
    for layout, apart in zip(layouts, distinct, strict=True):
        covered = frozenset() if layout is None else _axes_covered(layout, mesh, rank, bool(apart))
        alike = prod(size for axis, size in enumerate(mesh.shape) if axis not in covered | apart)
        own = 1 if layout is None else _replicas(layout)
        if layout is None or apart - covered:
            places.append(Place(0, 0, 1 / (own * alike)))
        else:
            places.append(Place(0, slots.of(layout), 1 / own))
    return Counting((slots.sum(mesh),), tuple(places))


class _Slots:
    """Slot 0 is for what all ranks hold together; each further set of ranks has a region, with a slot for each rank.

    The ranks of a sub-mesh meet in the slot of the first of them, so that sub-meshes of the same kind don't mix.
    """

    def __init__(self, union: tuple[int, ...]) -> None:
        self.union = union
        self.found: dict[tuple[int, ...], int] = {union: 0}

    def of(self, layout: Layout) -> int:
        ranks = _ranks(layout)
        if ranks not in self.found:
            region = len(self.found) - 1
            self.found[ranks] = 1 + region * len(self.union) + self.union.index(ranks[0])
        return self.found[ranks]

    def sum(self, mesh: DeviceMesh) -> Sum:
        regions = len(self.found) - 1
        return Sum(self.union, 1 + regions * len(self.union), tuple(self.found.values()), mesh)


def _axes_covered(layout: Layout, mesh: DeviceMesh, rank: int, apart: bool) -> frozenset[int]:
    """The axes of `mesh` along which the ranks of a layout lie."""
    ranks = _ranks(layout)
    coordinates = [mesh.get_coordinate(member) for member in ranks]
    known = [coordinate for coordinate in coordinates if coordinate is not None]
    covered = frozenset(axis for axis in range(mesh.ndim) if len({coordinate[axis] for coordinate in known}) > 1)
    is_grid = len(known) == len(ranks) and len(ranks) == prod(mesh.shape[axis] for axis in covered)
    if len(known) < len(ranks) or (apart and not (is_grid and rank in ranks)):
        raise LayoutError(
            f"rank {rank}: a parameter laid out {layout} on ranks {list(ranks)} doesn't lie on whole axes of {mesh!r}; pass as "
            f"mesh= the mesh from which the parameter's own was taken."
        )
    return covered


def _ranks(layout: Layout) -> tuple[int, ...]:
    return _sorted_ranks(layout.mesh)


@lru_cache(maxsize=256)
def _sorted_ranks(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(sorted(mesh.rank_list))


def _replicas(layout: Layout) -> int:
    """How many ranks of its mesh hold each element."""
    return prod(size for axis, size in enumerate(layout.mesh.shape) if axis not in layout.sharded_axes)
