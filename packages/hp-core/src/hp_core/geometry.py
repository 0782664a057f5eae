"""Bounds: which half-open interval `[start, stop)` of a tensor dim a rank holds. Pure integers.

Even chunks, uneven chunks, several mesh axes on one dim and ragged shares are all only ways to make bounds. No other
file does chunk arithmetic. An empty interval is always `(size, size)`, the end of the dim, whoever holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

Interval = tuple[int, int]
Box = tuple[Interval, ...]

__all__ = [
    "Box",
    "Interval",
    "box_numel",
    "box_shape",
    "chunk_interval",
    "clipped",
    "contiguous_strides",
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


def contiguous_strides(shape: Iterable[int]) -> tuple[int, ...]:
    """Row-major strides, in elements, of a dense tensor of `shape`."""
    strides: list[int] = []
    step = 1
    for size in reversed(tuple(shape)):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
