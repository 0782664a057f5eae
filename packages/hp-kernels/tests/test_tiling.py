"""How work is cut for the cores of an NPU: plain C++ that runs here as it does there."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_kernels.loading import require_native

UNIFIED_BYTES = 192 * 1024
sizes = st.integers(1, 300)
devices = {"cores": st.integers(1, 48), "unified_bytes": st.sampled_from([4096, 30_000, UNIFIED_BYTES])}


def places(tiling: dict[str, Any]) -> list[range]:
    """The tiles of each core."""
    result, start = [], 0
    for core in range(tiling["cores"]):
        end = start + tiling["tiles_per_core"] + (core < tiling["longer"])
        result.append(range(start, end))
        start = end
    return result


@given(
    outer=sizes,
    middle=sizes,
    inner=sizes,
    swapped=st.booleans(),
    dim=st.integers(1, 9000),
    item=st.sampled_from([2, 4]),
    **devices,
)
@settings(max_examples=100, deadline=None)
def test_tiles_of_the_merge(
    outer: int, middle: int, inner: int, swapped: bool, dim: int, item: int, cores: int, unified_bytes: int
) -> None:
    tiling = require_native().lse_merge_tiling(outer, middle, inner, swapped, dim, item, cores, unified_bytes)
    rows = tiling["groups"] * tiling["rows_per_group"]
    assert rows == outer * middle * inner
    tiles = tiling["groups"] * tiling["tiles_per_group"]
    # The tiles of a group cover its rows, with no tile to spare.
    assert (
        (tiling["tiles_per_group"] - 1) * tiling["tile_rows"]
        < tiling["rows_per_group"]
        <= tiling["tiles_per_group"] * tiling["tile_rows"]
    )
    cut = places(tiling)
    assert sum(map(len, cut)) == tiles
    assert cut[-1].stop == tiles
    assert len(cut) == min(cores, tiles)
    assert min(map(len, cut)) >= max(map(len, cut)) - 1
    # Alignment, limits of a transfer, and the size of the buffer.
    assert tiling["row_elements"] * item % 32 == 0
    assert tiling["dim_tile"] <= dim
    assert tiling["row_elements"] - tiling["dim_tile"] < 32 // item
    assert 1 <= tiling["tile_rows"] <= 4095
    assert tiling["unified_bytes"] <= unified_bytes
    # Whole rows wherever one fits, and no core idle for want of small tiles.
    if dim * item <= unified_bytes // 16:
        assert tiling["dim_tile"] == dim
    if not swapped and rows >= 2 * cores:
        assert tiling["cores"] > cores // 2


@given(
    tokens=st.integers(1, 5000),
    top_k=st.integers(1, 16),
    dim=st.integers(1, 20_000),
    item=st.sampled_from([2, 4]),
    combine=st.booleans(),
    weighted=st.booleans(),
    **devices,
)
@settings(max_examples=100, deadline=None)
def test_tiles_of_tokens(
    tokens: int, top_k: int, dim: int, item: int, combine: bool, weighted: bool, cores: int, unified_bytes: int
) -> None:
    tiling = require_native().permute_tiling(tokens, top_k, dim, item, combine, weighted, cores, unified_bytes)
    tiles = -(-tokens // tiling["tile_tokens"])
    cut = places(tiling)
    assert sum(map(len, cut)) == tiles
    assert len(cut) == min(cores, tiles)
    assert min(map(len, cut)) >= max(map(len, cut)) - 1
    assert tiling["row_elements"] * item % 32 == 0
    assert tiling["row_elements"] - tiling["dim_tile"] < 32 // item
    assert tiling["unified_bytes"] <= unified_bytes
    assert tiling["tile_tokens"] * cores < tokens + cores + tiling["tile_tokens"]


def test_a_known_shape() -> None:
    """Two partials of a 7B model's attention in bfloat16, on the 40 vector cores of an Atlas A2."""
    tiling = require_native().lse_merge_tiling(1, 4096, 32, True, 128, 2, 40, UNIFIED_BYTES)
    row = 6 * 128 * 2 + 2 * 128 * 4  # queues of bfloat16, twice each, and both partials in float32
    assert tiling["tile_rows"] == UNIFIED_BYTES // (row + 10 * 4) == 75
    assert tiling["tiles_per_group"] == 55
    assert (tiling["cores"], tiling["longer"], tiling["tiles_per_core"]) == (40, 0, 44)


@pytest.mark.parametrize(
    "arguments",
    [
        (0, 4, 4, True, 64, 2, 8, UNIFIED_BYTES),
        (2, 4, 4, True, 0, 2, 8, UNIFIED_BYTES),
        (2, 4, 4, True, 64, 8, 8, UNIFIED_BYTES),
        (2, 4, 4, True, 64, 2, 0, UNIFIED_BYTES),
        (2, 4, 4, True, 64, 2, 8, 300),
        (2, 4, 1 << 30, True, 64, 2, 8, UNIFIED_BYTES),
    ],
    ids=["no rows", "no columns", "float64", "no cores", "no room", "stride beyond 32 bits"],
)
def test_what_cannot_be_tiled(arguments: tuple[Any, ...]) -> None:
    assert require_native().lse_merge_tiling(*arguments) is None


def test_sizes_that_overflow() -> None:
    for wrong in ((1 << 40, 1 << 40, 1, True, 64), (-1, 1, 1, True, 64)):
        with pytest.raises(ValueError, match=r"64 bits|is no size"):
            require_native().lse_merge_tiling(*wrong, 2, 8, UNIFIED_BYTES)
    # Rows are numbered by int32 on the device.
    assert require_native().permute_tiling(1 << 30, 4, 8, 2, True, True, 8, UNIFIED_BYTES) is None
