"""Flat layouts: shares of flattened pieces that partition the tensor, as intervals and as boxes; their plans; refusals."""

from __future__ import annotations

import copy
import pickle
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hp_core
import hyper_parallel
from hp_core.errors import LayoutError, RedistributeError
from hp_core.geometry import Box, box_numel, flat_boxes, flat_share
from hp_core.layout import Layout, from_placements, intern
from hp_core.mesh import DeviceMesh
from hp_core.placement import FlatShard, Partial, RaggedShard, Replicate, Shard
from hp_core.redistribute import explain_redistribute, plan_redistribute


@pytest.fixture
def layout() -> Layout:
    return Layout((2, 2), ("dp", "tp"))


# -- geometry -------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=4),
    st.integers(0, 700),
    st.integers(0, 700),
)
def test_boxes_of_an_interval_hold_its_elements_in_order(sides: list[tuple[int, int]], start: int, stop: int) -> None:
    box: Box = tuple((low, low + length) for low, length in sides)
    start, stop = (min(end, box_numel(box)) for end in (start, stop))
    boxes = flat_boxes(box, start, stop)
    elements = [*product(*(range(low, high) for low, high in box))]
    held = [element for one in boxes for element in product(*(range(low, high) for low, high in one))]
    assert held == elements[start:stop]
    assert all(box_numel(one) for one in boxes)
    assert len(boxes) <= max(2 * len(box) - 1, 1)


def test_the_bound_of_2d_minus_1_boxes_is_reached() -> None:
    assert flat_boxes(((0, 4), (0, 4), (0, 4)), 5, 59) == (
        ((0, 1), (1, 2), (1, 4)),
        ((0, 1), (2, 4), (0, 4)),
        ((1, 3), (0, 4), (0, 4)),
        ((3, 4), (0, 2), (0, 4)),
        ((3, 4), (2, 3), (0, 3)),
    )


@given(st.integers(0, 40), st.integers(0, 9), st.integers(0, 30), st.integers(1, 6))
def test_shares_are_what_the_chunks_of_a_buffer_hold(numel: int, chunk: int, offset: int, ranks: int) -> None:
    buffer = [-1] * offset + list(range(numel))
    for index in range(ranks):
        start, stop = flat_share(numel, chunk, offset, index)
        assert list(range(start, stop)) == [i for i in buffer[index * chunk : (index + 1) * chunk] if i >= 0]
        assert start < stop or start == stop == numel


# -- values ---------------------------------------------------------------------------------------------------------


def test_flat_layouts_are_interned_values(layout: Layout) -> None:
    flat = layout(FlatShard(5, 3), Shard(1))
    same = [
        intern(layout.mesh, ((), (1,)), (), None, (0, 5, 3)),
        from_placements(layout.mesh, [FlatShard(5, 3), Shard(-1)], ndim=2),
        layout(*flat.placements),
        flat.gradient,
        flat.with_partials(()),
        pickle.loads(pickle.dumps(flat)),
        copy.deepcopy(flat),
    ]
    assert all(one is flat for one in same)
    assert flat.placements == (FlatShard(5, 3), Shard(1))
    assert flat.unflat is layout(None, "tp")
    assert flat.unflat.unflat is flat.unflat
    assert flat.replicated is layout()
    assert flat is not layout(FlatShard(5, 2), Shard(1))
    assert flat is not layout(FlatShard(6, 3), Shard(1))
    assert layout(FlatShard(5), Replicate()) is layout(FlatShard(5, 0), Replicate())


def test_flat_layouts_say_what_they_are(layout: Layout) -> None:
    flat = layout(FlatShard(5, 3), Shard(1))
    assert flat.compact_str == "(-, tp) flat(5+3):dp"
    assert layout(FlatShard(5), Replicate()).compact_str == "flat(5+0):dp"
    assert repr(flat) == "Layout[dp=2, tp=2](-, tp) flat(5+3):dp"
    assert str(FlatShard(128, 32)) == "Flat(128+32)"
    assert flat.sharded_axes == flat.active_axes == {0, 1}
    pending = layout(FlatShard(5, 3), Partial())
    assert pending.partials == ((1, "sum"),)
    assert pending.gradient is layout(FlatShard(5, 3), Replicate())
    assert pending.unflat is layout(Replicate(), Partial())
    alone = Layout((1, 2), ("dp", "tp"))(FlatShard(8), Replicate())
    assert alone.active_axes == frozenset()
    assert alone.local_shape((2, 3), 1) == (6,)


def test_the_word_is_public() -> None:
    assert hp_core.FlatShard is hyper_parallel.FlatShard is FlatShard
    assert pickle.loads(pickle.dumps(FlatShard(3, 4))) == FlatShard(3, 4)


# -- what ranks hold --------------------------------------------------------------------------------------------------


def test_a_share_is_of_the_piece_that_tensor_parallelism_left(layout: Layout) -> None:
    """(3, 5) cut by tp in columns 0-2 and 3-4; the nine and six elements of these start at element 2 of chunks of 6."""
    flat = layout(FlatShard(6, 2), Shard(1))
    assert [flat.flat_interval((3, 5), rank) for rank in range(4)] == [(0, 4), (0, 4), (4, 9), (4, 6)]
    assert [flat.local_shape((3, 5), rank) for rank in range(4)] == [(4,), (4,), (5,), (2,)]
    assert flat.boxes((3, 5), 0) == (((0, 1), (0, 3)), ((1, 2), (0, 1)))
    assert flat.boxes((3, 5), 1) == (((0, 2), (3, 5)),)
    assert flat.boxes((3, 5), 2) == (((1, 2), (1, 3)), ((2, 3), (0, 3)))
    assert flat.boxes((3, 5), 3) == (((2, 3), (3, 5)),)
    assert flat.largest_local_shape((3, 5)) == (5,)


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[Layout, tuple[int, ...]]:
    """A flat layout on a mesh of up to 12 ranks, and the shape of a tensor."""
    sizes = draw(st.sampled_from([(1,), (2,), (5,), (2, 2), (3, 2), (1, 4), (2, 3, 2)]))
    ndim = draw(st.integers(0, 3))
    axes = draw(st.permutations(range(len(sizes))))
    dims: list[list[int]] = [[] for _ in range(ndim)]
    for axis in axes[1:]:
        role = draw(st.integers(0, ndim))
        if role < ndim:
            dims[role].append(axis)
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=ndim, max_size=ndim)))
    offset = draw(st.integers(0, 20))
    chunk = -(-(prod(shape) + offset) // sizes[axes[0]]) + draw(st.integers(0, 10))
    mesh = DeviceMesh(sizes, ("a", "b", "c")[: len(sizes)])
    return intern(mesh, tuple(map(tuple, dims)), (), None, (axes[0], chunk, offset)), shape


@given(laid_out())
def test_every_element_is_held_once_per_replica(question: tuple[Layout, tuple[int, ...]]) -> None:
    layout, shape = question
    numbers = np.arange(prod(shape)).reshape(shape)
    holders = np.zeros(shape, dtype=int)
    sizes = []
    for rank in layout.mesh.rank_list:
        start, stop = layout.flat_interval(shape, rank)
        piece = numbers[tuple(slice(*interval) for interval in layout.unflat.bounds(shape, rank))].reshape(-1)
        held: list[int] = []
        for box in layout.boxes(shape, rank):
            holders[tuple(slice(*interval) for interval in box)] += 1
            held += numbers[tuple(slice(*interval) for interval in box)].reshape(-1).tolist()
        assert held == piece[start:stop].tolist()
        assert layout.local_shape(shape, rank) == (len(held),)
        sizes.append(len(held))
    replicas = layout.mesh.size() // prod(layout.mesh.shape[axis] for axis in layout.sharded_axes)
    assert set(holders.reshape(-1).tolist()) <= {replicas}
    assert layout.largest_local_shape(shape) == (max(sizes),)


def test_boxes_of_other_layouts_are_their_bounds(layout: Layout) -> None:
    assert layout("dp", "tp").boxes((3, 2), 3) == (((2, 3), (1, 2)),)
    assert layout(("dp", "tp")).boxes((2,), 3) == ()
    assert layout().boxes((), 0) == ((),)


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placements", "text"),
    [
        ((FlatShard(4), FlatShard(4)), r"flat on axes \['dp', 'tp'\]; one axis at most.*flatten\(\)"),
        ((FlatShard(4),), r"1 placements \[Flat\(4\+0\)\] for the 2 axes"),
        ((FlatShard(4), RaggedShard((1, 2, 3))), "are 3, but axis 'tp' has 2 ranks"),
    ],
)
def test_what_makes_no_sense_is_refused(layout: Layout, placements: tuple[object, ...], text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        layout(*placements)  # type: ignore[arg-type]


def test_an_axis_has_one_use(layout: Layout) -> None:
    with pytest.raises(LayoutError, match="'dp' is used twice"):
        layout(FlatShard(4), Replicate()).with_partials(((0, "sum"),))
    with pytest.raises(LayoutError, match="'tp' is used twice"):
        intern(layout.mesh, ((1,),), (), None, (1, 4, 0))


@pytest.mark.parametrize(("chunk", "offset"), [(-1, 0), (1, -1)])
def test_negative_numbers_are_refused(chunk: int, offset: int) -> None:
    with pytest.raises(LayoutError, match=rf"FlatShard\({chunk}, {offset}\).*>= 0"):
        FlatShard(chunk, offset)


def test_a_buffer_that_is_too_short_for_the_largest_piece_is_refused(layout: Layout) -> None:
    """(3, 5) leaves tensor-parallel pieces of 9 and 6 elements; two chunks of 6 reach 9 elements beyond offset 3."""
    layout(FlatShard(6, 3), Shard(1)).check_shape((3, 5))
    for rank in (0, 1):  # whoever asks, also where the own piece would fit
        with pytest.raises(
            LayoutError, match=r"reach 8 elements beyond offset 4.*\(3, 5\) has up to 9; give larger chunks"
        ):
            layout(FlatShard(6, 4), Shard(1)).local_shape((3, 5), rank)
    with pytest.raises(LayoutError, match="cuts dim 1"):
        layout(FlatShard(6, 3), Shard(1)).check_shape((5,))


def test_there_are_no_bounds_to_ask_for(layout: Layout) -> None:
    flat = layout(FlatShard(20), Replicate())
    for ask in (flat.bounds, lambda shape, rank: flat.bounds_at(shape, (0, 0))):
        with pytest.raises(LayoutError, match=r"no boxes: ask boxes\(\) or flat_interval\(\).*layout.unflat"):
            ask((3, 5), 0)
    with pytest.raises(LayoutError, match=r"pass shape="):
        flat.infer_global_shape((8,))
    with pytest.raises(LayoutError, match=r"shares no flattened pieces; ask bounds\(\)"):
        flat.unflat.flat_interval((3, 5), 0)


# -- plans ------------------------------------------------------------------------------------------------------------


def kinds(src: Layout, dst: Layout, shape: tuple[int, ...]) -> list[str]:
    return [step.kind for step in plan_redistribute(src, dst, shape, 4).steps]


def test_plans_go_over_the_layout_with_whole_pieces(layout: Layout) -> None:
    flat = layout(FlatShard(6, 2), Shard(1))
    assert kinds(flat, flat.unflat, (3, 5)) == ["all_gather"]
    assert kinds(flat.unflat, flat, (3, 5)) == ["slice"]
    assert kinds(layout(), flat, (3, 5)) == ["slice", "slice"]
    assert kinds(flat, layout(), (3, 5)) == ["all_gather", "all_gather"]
    assert kinds(flat, layout(FlatShard(8, 2), Shard(1)), (3, 5)) == ["all_gather", "slice"]
    assert kinds(flat, layout(FlatShard(8), Replicate()), (3, 5)) == ["all_gather", "all_gather", "slice"]
    assert kinds(flat, flat, (3, 5)) == []


def test_what_is_pending_is_finished_on_the_shares(layout: Layout) -> None:
    flat, pending = layout(FlatShard(8), Replicate()), layout(FlatShard(8), Partial())
    assert kinds(pending, flat, (3, 5)) == ["all_reduce"]
    assert kinds(flat, pending, (3, 5)) == ["scale"]
    assert kinds(pending, layout(), (3, 5)) == ["all_reduce", "all_gather"]
    assert kinds(pending, layout(Replicate(), Partial()), (3, 5)) == ["all_gather"]
    assert kinds(layout(Replicate(), Partial()), flat, (3, 5)) == ["slice", "all_reduce"]
    assert kinds(layout(Partial(), Replicate()), flat, (3, 5)) == ["reduce_scatter"]
    assert kinds(layout(Partial(), Partial()), flat, (3, 5)) == ["reduce_scatter", "all_reduce"]
    assert kinds(layout(Partial("max"), Replicate()), flat, (3, 5)) == ["reduce_scatter"]
    assert kinds(flat, layout(Partial(), Replicate()), (3, 5)) == ["pad"]
    assert kinds(flat, layout(Partial("max"), Replicate()), (3, 5)) == ["all_gather", "scale"]


def test_two_ways_to_say_the_same_shares_need_no_step(layout: Layout) -> None:
    """Ten elements in chunks of 10 or of 12, from the start of the buffer: all on the first rank."""
    assert kinds(layout(FlatShard(10), Replicate()), layout(FlatShard(12), Replicate()), (10,)) == []
    single = Layout((1, 2), ("dp", "tp"))
    assert kinds(single(FlatShard(10), Shard(0)), single(FlatShard(40, 7), Shard(0)), (10,)) == []


def test_an_axis_of_one_rank_costs_nothing() -> None:
    single = Layout((1, 2), ("dp", "tp"))
    flat = single(FlatShard(20), Shard(0))
    plan = plan_redistribute(flat, single(None, None), (4, 3), 4)
    assert [(step.kind, step.messages) for step in plan.steps] == [("all_gather", 0), ("all_gather", 1)]
    assert plan.steps[0].nbytes == 0
    assert "local (6,) -> (2, 3), local" in str(plan)


def test_a_plan_says_what_it_does_and_costs(layout: Layout) -> None:
    """The larger share of the first column's 9 elements has 5; shares travel padded to the largest."""
    flat = layout(FlatShard(6, 2), Shard(1))
    text = explain_redistribute(flat, flat.unflat, (3, 5), 4)
    assert text == (
        "(-, tp) flat(6+2):dp -> (-, tp), shape (3, 5), 4 B per element: 1 message, 20 B sent per rank, peak 36 B\n"
        "  1. all_gather over dp: (-, tp) flat(6+2):dp -> (-, tp), local (5,) -> (3, 3), 20 B"
    )
    pending = layout(Partial(), Shard(1))
    assert "reduce_scatter(sum) over dp: (-, tp) P(sum):dp -> (-, tp) flat(6+2):dp, local (3, 3) -> (5,), 20 B" in (
        explain_redistribute(pending, flat, (3, 5))
    )
    pending = layout(FlatShard(8), Partial())
    assert "all_reduce(sum) over tp: flat(8+0):dp P(sum):tp -> flat(8+0):dp, local (8,) -> (8,), 32 B" in (
        explain_redistribute(pending, pending.gradient, (3, 5))
    )


def test_a_memory_limit_counts_the_gathered_piece(layout: Layout) -> None:
    flat, other = layout(FlatShard(8), Replicate()), layout(FlatShard(9), Replicate())
    assert plan_redistribute(flat, other, (3, 5), 4, memory_limit=60).peak_bytes == 60
    with pytest.raises(RedistributeError, match=r"makes a local tensor of 60 B, more than memory_limit=59 B"):
        plan_redistribute(flat, other, (3, 5), 4, memory_limit=59)
    with pytest.raises(LayoutError, match="give larger chunks"):
        plan_redistribute(flat.unflat, layout(FlatShard(7), Replicate()), (3, 5), 4)
