"""A mesh of which two meshes over the same ranks are both coarser views, and layouts written on it.

(4,) and (2, 2), or (2, 4) and (4, 2), or a mesh and its transpose: cut into the digits that both have, they are one mesh,
on which ordinary collectives lead from a layout of the one to a layout of the other.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import NamedTuple

from hp_core.layout import Layout, intern
from hp_core.mesh import DeviceMesh

__all__ = ["Refinement", "common_refinement", "on_refinement"]

Digits = tuple[tuple[int, ...], ...]
"""Per axis of a mesh, the axes of the refined mesh that it consists of, outermost first."""


class Refinement(NamedTuple):
    """The common refinement of two meshes.

    Attributes:
        mesh: the refined mesh.
        first: the axes that the first mesh' axes consist of.
        second: the axes that the second mesh' axes consist of.
    """

    mesh: DeviceMesh
    first: Digits
    second: Digits


def common_refinement(first: DeviceMesh, second: DeviceMesh) -> Refinement | None:
    """The coarsest mesh of which both are views.

    Returns:
        None if there is none: other ranks, sizes that don't fit, an order of ranks that no arrangement of axes explains.
    """
    total = len(first.rank_list)
    own, other = _row_major(first.shape), _strides_in(second, first)
    if other is None or total == 1:
        return None
    spans = [
        [(stride, stride * size) for stride, size in zip(strides, mesh.shape, strict=True)]
        for mesh, strides in ((first, own), (second, other))
    ]
    points = sorted({end for mesh_spans in spans for span in mesh_spans for end in span} | {1, total})
    digits = list(pairwise(points))[::-1]  # outermost first
    if any(stop % start for start, stop in digits):
        return None
    consists = [
        tuple(
            tuple(axis for axis, (start, stop) in enumerate(digits) if low <= start and stop <= high)
            for low, high in mesh_spans
        )
        for mesh_spans in spans
    ]
    names = []
    for axis in range(len(digits)):
        pair = [
            mesh.mesh_dim_names[next(i for i, parts in enumerate(consist) if axis in parts)]
            for mesh, consist in zip((first, second), consists, strict=True)
        ]
        names.append(pair[0] if pair[0] == pair[1] else "/".join(pair))
    shape = tuple(stop // start for start, stop in digits)
    return Refinement(DeviceMesh(shape, names, first.rank_list, first.device_type), *consists)


def on_refinement(layout: Layout, mesh: DeviceMesh, digits: Digits, shape: tuple[int, ...]) -> Layout | None:
    """The same layout on the refined mesh; None if some rank would hold another part there.

    Chunks of chunks are the chunks of the whole only where sizes divide (5 elements: 2, 2, 1, 0 in quarters, but 2, 1,
    1, 1 in halves of halves), and ragged shares can't be taken apart.
    """
    ragged = layout.ragged
    if ragged is not None:
        parts = digits[layout.axes_of(0)[0]]
        if len(parts) > 1:
            return None
        ragged = ragged if parts else None
    dims = tuple(tuple(part for axis in axes for part in digits[axis]) for axes in layout.dim_axes)
    partials = tuple(sorted((part, reduce_op) for axis, reduce_op in layout.partials for part in digits[axis]))
    refined = intern(mesh, dims, partials, ragged)
    same = all(layout.bounds(shape, rank) == refined.bounds(shape, rank) for rank in mesh.rank_list)
    return refined if same else None


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _strides_in(mesh: DeviceMesh, base: DeviceMesh) -> tuple[int, ...] | None:
    """By how much a step along each axis of `mesh` changes the position in `base`, if that is the same everywhere."""
    if len(mesh.rank_list) != len(base.rank_list):
        return None
    position = {rank: index for index, rank in enumerate(base.rank_list)}
    places = [position.get(rank, -1) for rank in mesh.rank_list]
    own = _row_major(mesh.shape)
    strides = tuple(places[step] if size > 1 else 1 for step, size in zip(own, mesh.shape, strict=True))
    for index, place in enumerate(places):
        told = sum(index // step % size * stride for step, size, stride in zip(own, mesh.shape, strides, strict=True))
        if told != place:
            return None
    return strides
