"""Bounds: which half-open interval `[start, stop)` of a tensor dim a rank holds. Pure integers.

Even chunks, uneven chunks, several mesh axes on one dim and ragged shares are all only ways to make bounds; a flat share
is an interval of the flattened box, and a few boxes. No other file does chunk arithmetic. An empty interval is always
`(size, size)`, the end of the dim, whoever holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

Interval = tuple[int, int]
Box = tuple[Interval, ...]

__all__ = [
    "Box",
    "Interval",
    "box_numel",
    "box_pieces",
    "box_shape",
    "chunk_interval",
    "clipped",
    "contiguous_strides",
    "flat_boxes",
    "flat_share",
    "intersect",
    "origin_box",
    "ragged_interval",
    "relative_to",
]


def chunk_interval(parent: Interval, parts: int, index: int, size: int) -> Interval:
    """The `index`-th of `parts` ceil-sized chunks of `parent`, as `torch.chunk` cuts it.

    Args:
        parent: the interval to cut.
        parts: number of chunks, >= 1.
        index: which chunk.
        size: size of the whole dim, where empty chunks are put.
    """
    start, stop = parent
    length = -(-(stop - start) // parts)
    low = min(start + index * length, stop)
    high = min(low + length, stop)
    return (low, high) if high > low else (size, size)


def ragged_interval(parent: Interval, units: Sequence[int], index: int, size: int) -> Interval:
    """The share of rank `index` when `parent` is divided in proportion to `units` (whose sum divides its length)."""
    start, stop = parent
    unit = (stop - start) // sum(units)
    low = start + sum(units[:index]) * unit
    high = low + units[index] * unit
    return (low, high) if high > low else (size, size)


def flat_share(numel: int, chunk: int, offset: int, index: int) -> Interval:
    """The elements of a flattened piece that chunk `index` of a flat buffer holds.

    Args:
        numel: number of elements of the piece.
        chunk: elements of each chunk of the buffer.
        offset: where in the buffer the piece starts.
        index: which chunk.
    """
    low, high = (min(max(end * chunk - offset, 0), numel) for end in (index, index + 1))
    return (low, high) if high > low else (numel, numel)


def flat_boxes(box: Box, start: int, stop: int) -> tuple[Box, ...]:
    """The elements [start, stop) of a box that is flattened row-major, as boxes: in order, disjoint, none of them empty.

    A box of d dims gives at most 2d - 1: a beginning and an end of a row, of a row of rows, ..., and what lies between.
    """
    if start >= stop:
        return ()
    if not box:
        return (box,)
    (low, _), *inner = box
    rest = tuple(inner)
    row = box_numel(rest)
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)

    def within(index: int, begin: int, end: int) -> list[Box]:
        return [((low + index, low + index + 1), *piece) for piece in flat_boxes(rest, begin, end)]

    if first == last:
        return tuple(within(first, head, tail))
    boxes = within(first, head, row) if head else []
    if head:
        first += 1
    if first < last:
        boxes.append(((low + first, low + last), *rest))
    return (*boxes, *within(last, 0, tail))


def intersect(left: Box, right: Box) -> Box | None:
    """The box that both hold, or None if they share nothing."""
    result = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(left, right, strict=True))
    return result if all(low < high for low, high in result) else None


def relative_to(inner: Box, outer: Box) -> Box:
    """`inner` in coordinates that start at the corner of `outer`."""
    return tuple((a - c, b - c) for (a, b), (c, _) in zip(inner, outer, strict=True))


def box_shape(box: Box) -> tuple[int, ...]:
    """Side lengths of a box."""
    return tuple(stop - start for start, stop in box)


def origin_box(shape: Iterable[int]) -> Box:
    """The box of this shape at the origin."""
    return tuple((0, size) for size in shape)


def clipped(box: Box) -> Box:
    """An empty interval lies at the end of the dim, which may be outside of the tensor it is cut from: move it inside."""
    return tuple((0, 0) if start == stop else (start, stop) for start, stop in box)


def box_numel(box: Box) -> int:
    """Number of elements in a box (1 for the box of a scalar)."""
    return prod(stop - start for start, stop in box)


def box_pieces(box: Box, most: int) -> Iterator[Box]:
    """Cut a box into boxes of at most `most` elements that follow each other in memory; an empty one gives none."""
    if box_numel(box) <= most:
        if box_numel(box):
            yield box
        return
    (first, last), *rest = box
    inner = box_numel(tuple(rest))
    if inner <= most:
        rows = most // inner
        for row in range(first, last, rows):
            yield ((row, min(row + rows, last)), *rest)
    else:
        for row in range(first, last):
            for piece in box_pieces(tuple(rest), most):
                yield ((row, row + 1), *piece)


def contiguous_strides(shape: Iterable[int]) -> tuple[int, ...]:
    """Row-major strides, in elements, of a dense tensor of `shape`."""
    strides: list[int] = []
    step = 1
    for size in reversed(tuple(shape)):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
