"""Random questions for redistribution: meshes of up to 8 ranks, tensors of up to 4 dims, any two layouts on one or two meshes."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

from hypothesis import strategies as st

from hp_core.layout import Layout, intern
from hp_core.mesh import DeviceMesh

RANKS = 8
OPS = ("sum", "avg", "max", "min")


class Question(NamedTuple):
    """From which layout to which, for a tensor of which shape."""

    src: Layout
    dst: Layout
    shape: tuple[int, ...]


def grids(ranks: int, axes: int) -> list[tuple[int, ...]]:
    """All mesh shapes of up to so many ranks and exactly so many axes."""
    if axes == 0:
        return [()]
    return [(size, *rest) for size in range(1, ranks + 1) for rest in grids(ranks // size, axes - 1)]


GRIDS = [grid for axes in range(1, 5) for grid in grids(RANKS, axes)]
# Where most can go wrong: several axes of several ranks.
GRIDS += [(2, 2), (2, 3), (2, 4), (4, 2), (2, 2, 2), (2, 1, 3), (1, 2, 2, 2)] * 4


@lru_cache(maxsize=1 << 14)
def make_mesh(grid: tuple[int, ...], ranks: tuple[int, ...], names: str) -> DeviceMesh:
    return DeviceMesh(grid, tuple(names[: len(grid)]), ranks)


@st.composite
def meshes(draw: st.DrawFn, names: str) -> DeviceMesh:
    """A mesh of some of the 8 ranks, in some order."""
    grid = draw(st.sampled_from(GRIDS))
    size = prod(grid)
    kind = draw(st.sampled_from(["first", "first", "last", "spread", "permuted"]))
    ranks = list(range(RANKS))
    if kind == "last":
        ranks = ranks[RANKS - size :]
    elif kind == "spread":
        ranks = ranks[:: RANKS // size]
    elif kind == "permuted":
        ranks = draw(st.permutations(ranks))
    return make_mesh(grid, tuple(ranks[:size]), names)


@st.composite
def layouts(draw: st.DrawFn, mesh: DeviceMesh, shape: tuple[int, ...]) -> Layout:
    """Any layout of a tensor of this shape: axes in any order, pending by any one op, ragged shares."""
    ndim = len(shape)
    op = draw(st.sampled_from(OPS))
    dims: list[list[int]] = [[] for _ in range(ndim)]
    partials = []
    roles = draw(st.lists(st.integers(0, ndim + 1), min_size=mesh.ndim, max_size=mesh.ndim))
    for axis, role in enumerate(roles):
        if role < ndim:
            dims[role].append(axis)
        elif role == ndim:
            partials.append((axis, op))
    for axes in dims:
        if len(axes) > 1:
            axes[:] = draw(st.permutations(axes))
    ragged = None
    if ndim and len(dims[0]) == 1 and draw(st.booleans()):
        parts = mesh.shape[dims[0][0]]
        units = draw(st.lists(st.integers(0, 3), min_size=parts, max_size=parts))
        if sum(units) and shape[0] % sum(units) == 0:
            ragged = tuple(units)
    return intern(mesh, tuple(map(tuple, dims)), tuple(partials), ragged)


@st.composite
def views(draw: st.DrawFn, mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks in another grid."""
    grid = draw(st.sampled_from([grid for grid in GRIDS if prod(grid) == mesh.size()]))
    return make_mesh(grid, mesh.rank_list, "wxyz")


SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 8, 0, 12]), min_size=0, max_size=4).map(tuple)


@st.composite
def questions(draw: st.DrawFn, across: str) -> Question:
    """Two layouts of one tensor; sizes may be zero.

    Args:
        draw: hypothesis' own.
        across: "same" mesh, another "view" of the same ranks, or any two meshes ("other").
    """
    shape = draw(SHAPES)
    mesh = draw(meshes("abcd"))
    other = mesh if across == "same" else draw(views(mesh) if across == "view" else meshes("wxyz"))
    return Question(draw(layouts(mesh, shape)), draw(layouts(other, shape)), shape)


FEW_MESHES = [
    make_mesh((8,), tuple(range(8)), "a"),
    make_mesh((2, 2, 2), tuple(range(8)), "abc"),
    make_mesh((2, 4), tuple(range(8)), "wx"),
    make_mesh((2, 1, 2, 2), (7, 3, 5, 1, 6, 2, 4, 0), "abcd"),
    make_mesh((2, 2), (0, 1, 2, 3), "ab"),
    make_mesh((2, 2), (4, 5, 6, 7), "ab"),
    make_mesh((2, 2), (0, 2, 1, 3), "xy"),
    make_mesh((2, 3), (2, 3, 4, 5, 6, 7), "ab"),
    make_mesh((3,), (1, 6, 4), "a"),
    make_mesh((1,), (5,), "a"),
]
"""Meshes for real ranks, where every mesh costs process groups."""


@st.composite
def questions_on_few_meshes(draw: st.DrawFn) -> Question:
    """Two layouts of one tensor on one or two of `FEW_MESHES`."""
    shape = draw(SHAPES)
    meshes = [draw(st.sampled_from(FEW_MESHES)) for _ in range(2)]
    return Question(draw(layouts(meshes[0], shape)), draw(layouts(meshes[1], shape)), shape)
