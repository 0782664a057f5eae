"""Which rank holds what of each matrix of a parameter: the ground of Muon's plans. Pure integers, no framework.

A 2-D parameter is one matrix, a 3-D one a stack of them. A matrix that one rank holds as a whole needs no communication,
whatever cuts the stack; the others are in pieces, each of them a run of elements of its holder's local tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from hp_core.errors import LayoutError
from hp_core.geometry import Box, box_shape, flat_boxes, flat_share
from hp_core.layout import Layout

__all__ = ["Matrix", "Piece", "matrices_of", "newton_schulz_cost"]


@dataclass(frozen=True, slots=True)
class Piece:
    """What a rank holds of a matrix.

    Attributes:
        ranks: who holds it: one rank of each replica, replicas in the same order for all pieces.
        start: where it starts in the holder's flattened local tensor, in elements.
        stop: where it ends.
        boxes: its elements in the coordinates of the matrix, in the order in which they are held.
    """

    ranks: tuple[int, ...]
    start: int
    stop: int
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of a parameter.

    Attributes:
        parameter: number of the parameter in the optimizer.
        index: number of the matrix in the parameter's stack.
        rows: number of rows.
        columns: number of columns.
        pieces: disjoint and all of it.
    """

    parameter: int
    index: int
    rows: int
    columns: int
    pieces: tuple[Piece, ...]

    @property
    def is_cut(self) -> bool:
        """Whether no rank holds all of it."""
        return len(self.pieces) > 1


def matrices_of(parameter: int, shape: Sequence[int], layout: Layout) -> list[Matrix]:
    """The matrices with elements of a 2-D or 3-D parameter.

    Args:
        parameter: number of the parameter, for the matrices.
        shape: its global shape.
        layout: its layout.

    Raises:
        LayoutError: reductions are pending, or the layout doesn't fit the shape.
    """
    if layout.is_partial():
        raise LayoutError(
            f"a parameter of shape {tuple(shape)} is laid out {layout}; reduce it before it is optimized."
        )
    layout.check_shape(shape)
    rows, columns = shape[-2:]
    if not prod(shape):
        return []
    pieces: list[list[Piece]] = [[] for _ in range(prod(shape[:-2]))]
    for first, box, extent, ranks in _shares(layout, shape):
        height, width = box_shape(box)
        size = height * width
        start, stop = extent
        for number in range(start // size, -(-stop // size)):
            low, high = max(start, number * size), min(stop, (number + 1) * size)
            boxes = flat_boxes(box, low - number * size, high - number * size)
            pieces[first + number].append(Piece(ranks, low - start, high - start, boxes))
    return [Matrix(parameter, index, rows, columns, tuple(found)) for index, found in enumerate(pieces)]


def _shares(layout: Layout, shape: Sequence[int]) -> Iterator[tuple[int, Box, tuple[int, int], tuple[int, ...]]]:
    """What each rank holds that holds anything.

    Yields:
        First matrix of the stack in the rank's box, the matrices' box, the interval of the flattened box that the rank
        holds, and the ranks that do, one of each replica.
    """
    mesh = layout.mesh
    flat_axis = -1 if layout.flat is None else layout.flat[0]
    cutting = [axis for axis in sorted(layout.sharded_axes) if axis != flat_axis]
    replicas = [axis for axis in range(mesh.ndim) if axis not in layout.sharded_axes]

    def holders(coordinate: list[int]) -> tuple[int, ...]:
        ranks = []
        for indices in product(*(range(mesh.shape[axis]) for axis in replicas)):
            for axis, index in zip(replicas, indices, strict=True):
                coordinate[axis] = index
            ranks.append(mesh.rank_at(coordinate))
        return tuple(ranks)

    for indices in product(*(range(mesh.shape[axis]) for axis in cutting)):
        coordinate = [0] * mesh.ndim
        for axis, index in zip(cutting, indices, strict=True):
            coordinate[axis] = index
        box = layout.unflat.bounds_at(shape, tuple(coordinate))
        numel = prod(box_shape(box))
        if not numel:
            continue
        first, matrix = (box[0][0] if len(shape) == 3 else 0), box[-2:]
        if layout.flat is None:
            yield first, matrix, (0, numel), holders(coordinate)
            continue
        _, chunk, offset = layout.flat
        for index in range(offset // chunk, (offset + numel - 1) // chunk + 1):
            coordinate[flat_axis] = index
            yield first, matrix, flat_share(numel, chunk, offset, index), holders(coordinate)


def newton_schulz_cost(rows: int, columns: int) -> int:
    """Multiplications of one Newton-Schulz iteration."""
    short, long = min(rows, columns), max(rows, columns)
    return short * short * (2 * long + short)
