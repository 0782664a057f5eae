"""Bounds: chunks are cut as `torch.chunk` cuts, ragged shares in proportion, and boxes meet where they should."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_core.geometry import (
    Box,
    box_numel,
    box_shape,
    chunk_interval,
    contiguous_strides,
    intersect,
    ragged_interval,
    relative_to,
)

intervals = st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted).map(tuple)
boxes = st.tuples(intervals, intervals)


@pytest.mark.parametrize(
    ("size", "parts", "expected"),
    [
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (5, 4, [(0, 2), (2, 4), (4, 5), (5, 5)]),
        (6, 4, [(0, 2), (2, 4), (4, 6), (6, 6)]),
        (2, 4, [(0, 1), (1, 2), (2, 2), (2, 2)]),
        (0, 2, [(0, 0), (0, 0)]),
        (3, 1, [(0, 3)]),
    ],
)
def test_chunks_are_ceil_sized_and_empty_ones_stand_at_the_end(
    size: int, parts: int, expected: list[tuple[int, int]]
) -> None:
    assert [chunk_interval((0, size), parts, index, size) for index in range(parts)] == expected


@given(st.integers(0, 50), st.integers(1, 9))
def test_chunks_are_those_of_a_list_cut_in_ceil_sized_pieces(size: int, parts: int) -> None:
    whole = list(range(size))
    length = max(1, -(-size // parts))
    pieces = [whole[start : start + length] for start in range(0, size, length)]
    pieces += [[]] * (parts - len(pieces))
    assert [list(range(*chunk_interval((0, size), parts, index, size))) for index in range(parts)] == pieces


@given(st.integers(0, 40), st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_nested_chunks_partition_the_dim_in_order(size: int, parts: list[int]) -> None:
    level = [(0, size)]
    for count in parts:
        level = [chunk_interval(parent, count, index, size) for parent in level for index in range(count)]
    assert [i for start, stop in level for i in range(start, stop)] == list(range(size))
    assert all(interval == (size, size) for interval in level if interval[0] == interval[1])


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6).filter(any), st.integers(0, 5))
def test_ragged_shares_partition_the_dim_in_proportion(units: list[int], unit: int) -> None:
    size = sum(units) * unit
    shares = [ragged_interval((0, size), units, index, size) for index in range(len(units))]
    assert [stop - start for start, stop in shares] == [share * unit for share in units]
    assert [i for start, stop in shares for i in range(start, stop)] == list(range(size))
    starts = [0, *accumulate(share * unit for share in units)]
    for interval, start, share in zip(shares, starts, units, strict=False):
        assert interval == ((start, start + share * unit) if share * unit else (size, size))


@given(boxes, boxes)
def test_the_intersection_holds_exactly_the_points_of_both(left: Box, right: Box) -> None:
    def points(box: Box) -> set[tuple[int, int]]:
        (a, b), (c, d) = box
        return {(i, j) for i in range(a, b) for j in range(c, d)}

    found = intersect(left, right)
    assert (points(found) if found else set()) == points(left) & points(right)
    assert found is None or points(found)


def test_boxes_are_measured_and_moved() -> None:
    box = ((2, 5), (1, 1), (4, 6))
    assert box_shape(box) == (3, 0, 2)
    assert box_numel(box) == 0
    assert box_numel(()) == 1
    assert relative_to(((3, 4), (6, 8)), ((2, 5), (6, 9))) == ((1, 2), (0, 2))
    assert intersect((), ()) == ()


def test_strides_are_row_major_also_of_empty_tensors() -> None:
    assert contiguous_strides((2, 3, 4)) == (12, 4, 1)
    assert contiguous_strides((2, 0, 4)) == (4, 4, 1)
    assert contiguous_strides(()) == ()
