"""Layouts: one canonical interned value per meaning, bounds that partition the tensor, refusals with the numbers."""

from __future__ import annotations

import copy
import pickle
from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_core.errors import LayoutError
from hp_core.layout import Layout, from_placements, intern, layout_of
from hp_core.mesh import DeviceMesh
from hp_core.placement import Partial, RaggedShard, Replicate, Shard


@pytest.fixture
def layout() -> Layout:
    return Layout((2, 2), ("dp", "tp"))


def pieces(whole: list[int], parts: int) -> list[list[int]]:
    """A list cut as `torch.chunk` cuts, padded with empty pieces."""
    length = max(1, -(-len(whole) // parts))
    found = [whole[start : start + length] for start in range(0, len(whole), length)]
    return found + [[]] * (parts - len(found))


# -- values ---------------------------------------------------------------------------------------------------------


def test_equal_layouts_are_one_object_however_they_are_said(layout: Layout) -> None:
    same = [
        layout("dp", "tp"),
        layout("dp", ("tp",), None, "None"),
        layout(Shard(0), Shard(1)),
        Layout((2, 2), ("dp", "tp"), range(4))("dp", "tp"),
        Layout.from_device_mesh(DeviceMesh((2, 2), ("dp", "tp")))("dp", "tp"),
        layout_of(layout.mesh, [Shard(0), Shard(1)]),
        from_placements(layout.mesh, [Shard(-2), Shard(-1)], ndim=2),
    ]
    same += [pickle.loads(pickle.dumps(same[0])), copy.copy(same[0]), copy.deepcopy(same[0])]
    assert all(one is same[0] for one in same)
    assert layout("dp", "tp") is not layout("tp", "dp")
    assert layout() is layout.replicated is layout(None, None)
    assert layout_of(layout("dp")) is layout("dp")
    assert layout_of(layout.mesh) is layout()


def test_the_order_of_axes_on_one_dim_is_kept(layout: Layout) -> None:
    assert layout(("tp", "dp")).dim_axes == ((1, 0),)
    assert layout(("dp", "tp")).dim_axes == ((0, 1),)
    assert layout(Shard(0), Shard(0)) is layout(("dp", "tp"))
    assert layout(("dp", "tp")).placements == (Shard(0), Shard(0))
    with pytest.raises(LayoutError, match=r"\(tp\*dp\) cuts dim 0 by axes \('tp', 'dp'\) in this order"):
        _ = layout(("tp", "dp")).placements


def test_placements_come_back_as_they_were_given() -> None:
    layout = Layout((2, 3, 2), ("dp", "cp", "tp"))
    options = [Replicate(), Shard(0), Shard(1), Partial("avg")]
    for placements in product(options, repeat=3):
        assert layout(*placements).placements == placements
    ragged = (RaggedShard((1, 2)), Shard(1), Partial())
    assert layout(*ragged).placements == ragged


def test_properties_say_the_same_in_other_words() -> None:
    layout = Layout((2, 2, 2), ("dp", "cp", "tp"))
    cut = layout("dp", None, ("tp", "cp"))
    assert cut.alias_tensor_map == ("dp", "None", ("tp", "cp"))
    assert cut.tensor_map == (2, -1, (0, 1))
    assert cut.partial == (None, None, None)
    assert cut.compact_str == "(dp, -, tp*cp)"
    assert repr(cut) == "Layout[dp=2, cp=2, tp=2](dp, -, tp*cp)"
    assert (cut.axes_of(2), cut.axes_of(1), cut.axes_of(7)) == ((2, 1), (), ())
    assert cut.sharded_axes == {0, 1, 2}
    pending = layout(Shard(1), Partial("max"), Replicate())
    assert pending.partial == (None, "max", None)
    assert pending.is_partial()
    assert pending.compact_str == "(-, dp) P(max):cp"
    assert pending.active_axes == {0, 1}
    assert pending.gradient is layout(None, "dp")
    assert cut.gradient is cut
    assert pending.with_partials(()) is layout(None, "dp")
    assert Layout((1, 2), ("dp", "tp"))("dp", "tp").active_axes == {1}


# -- bounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(14))
def test_tp_then_dp_cuts_as_fsdp_cuts_what_tp_left(size: int) -> None:
    """Public report case 2: sharding a tensor-parallel shard further over dp gives pieces of it, for any size."""
    layout = Layout((2, 2), ("dp", "tp"))(("tp", "dp"))
    after_tp = pieces(list(range(size)), 2)
    for rank in range(4):
        dp, tp = divmod(rank, 2)
        ((start, stop),) = layout.bounds((size,), rank)
        assert list(range(start, stop)) == pieces(after_tp[tp], 2)[dp]


def test_the_five_elements_of_case_2(layout: Layout) -> None:
    """Public report case 2: 5 elements, cut by tp into [0, 1, 2] and [3, 4], each cut by dp."""
    bounds = {rank: layout(("tp", "dp")).bounds((5,), rank) for rank in range(4)}
    assert bounds == {0: ((0, 2),), 1: ((3, 4),), 2: ((2, 3),), 3: ((4, 5),)}


def test_an_uneven_dim_over_two_axes_loses_no_row(layout: Layout) -> None:
    """Public report case 1: (5, 3) with [S0, S0] on a 2x2 mesh; the ranks' rows, in order, are the tensor's."""
    rows = [layout(Shard(0), Shard(0)).bounds((5, 3), rank) for rank in range(4)]
    assert rows == [((0, 2), (0, 3)), ((2, 3), (0, 3)), ((3, 4), (0, 3)), ((4, 5), (0, 3))]


def test_five_rows_over_four_ranks_are_five_rows() -> None:
    """Public report case 5: (5, 10) with S0 over 4 ranks holds 5 rows in all, not 8."""
    shapes = [Layout((4,), ("tp",))("tp").local_shape((5, 10), rank) for rank in range(4)]
    assert shapes == [(2, 10), (2, 10), (1, 10), (0, 10)]


def test_offsets_of_a_tensor_smaller_than_the_mesh(layout: Layout) -> None:
    """Public report case 6: (2,) with [S0, S0] on a 2x2 mesh; an empty shard's offset is the end of the dim."""
    bounds = [layout(Shard(0), Shard(0)).bounds((2,), rank) for rank in range(4)]
    assert bounds == [((0, 1),), ((2, 2),), ((1, 2),), ((2, 2),)]


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[Layout, tuple[int, ...]]:
    """A layout on a mesh of up to 12 ranks, and the shape of a tensor."""
    sizes = draw(st.sampled_from([(1,), (2,), (5,), (2, 2), (3, 2), (1, 4), (2, 3, 2)]))
    ndim = draw(st.integers(1, 3))
    dims: list[list[int]] = [[] for _ in range(ndim)]
    for axis in draw(st.permutations(range(len(sizes)))):
        role = draw(st.integers(0, ndim))
        if role < ndim:
            dims[role].append(axis)
    shape = tuple(draw(st.lists(st.integers(0, 11), min_size=ndim, max_size=ndim)))
    return intern(DeviceMesh(sizes, ("a", "b", "c")[: len(sizes)]), tuple(map(tuple, dims))), shape


@given(laid_out())
def test_every_element_is_held_once_per_replica(question: tuple[Layout, tuple[int, ...]]) -> None:
    layout, shape = question
    holders = dict.fromkeys(product(*map(range, shape)), 0)
    for rank in layout.mesh.rank_list:
        bounds = layout.bounds(shape, rank)
        assert layout.local_shape(shape, rank) == tuple(stop - start for start, stop in bounds)
        for element in product(*(range(start, stop) for start, stop in bounds)):
            holders[element] += 1
    replicas = layout.mesh.size() // prod(layout.mesh.shape[axis] for axis in layout.sharded_axes)
    assert set(holders.values()) <= {replicas}


def test_ragged_shares_cut_in_proportion(layout: Layout) -> None:
    four = Layout((4,), ("dp",))(RaggedShard((1, 0, 3, 2)))
    assert [four.bounds((12, 5), rank)[0] for rank in range(4)] == [(0, 2), (12, 12), (2, 8), (8, 12)]
    both = layout(RaggedShard((3, 1)), Shard(1))
    assert [both.local_shape((8, 3), rank) for rank in range(4)] == [(6, 2), (6, 1), (2, 2), (2, 1)]
    assert both.compact_str == "(dp, tp) ragged(3, 1)"


def test_the_global_shape_follows_from_even_shards(layout: Layout) -> None:
    assert layout(("dp", "tp"), None).infer_global_shape((3, 5)) == (12, 5)
    with pytest.raises(LayoutError, match=r"ranks hold unequal shares.*\(3, 5\); pass shape="):
        layout(RaggedShard((3, 1)), Replicate()).infer_global_shape((3, 5))
    with pytest.raises(LayoutError, match="cuts dim 1"):
        layout("dp", "tp").infer_global_shape((3,))


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        (("ep",), r"no mesh axis 'ep'; the axes are \{'dp': 2, 'tp': 2\}"),
        (("dp", "dp"), r"mesh axis 'dp' is used twice in one layout \(dims \[0, 1\]\)"),
        ((("dp", "dp"),), r"mesh axis 'dp' is used twice"),
        ((Shard(0),), r"1 placements \[S\(0\)\] for the 2 axes of DeviceMesh\(dp=2, tp=2\)"),
        ((Shard(-1), Replicate()), r"S\(-1\) counts dims from the end"),
        ((Partial("sum"), Partial("max")), r"different kinds can't be mixed: \{'dp': 'sum', 'tp': 'max'\}"),
        ((RaggedShard((1, 2, 3)), Replicate()), r"are 3, but axis 'dp' has 2 ranks"),
        ((RaggedShard((1, 2)), Shard(0)), r"ragged shares \(1, 2\) must be the only cut of dim 0"),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(layout: Layout, entries: tuple[object, ...], text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        layout(*entries)  # type: ignore[arg-type]


def test_a_shape_that_contradicts_the_layout_is_refused(layout: Layout) -> None:
    with pytest.raises(LayoutError, match=r"cuts dim 1 over \('tp',\), but the tensor has only 1 dims: shape \(4,\)"):
        layout("dp", "tp").bounds((4,), 0)
    with pytest.raises(LayoutError, match=r"sum to 3, which doesn't divide dim 0 of shape \(4,\)"):
        layout(RaggedShard((1, 2)), Replicate()).bounds((4,), 0)
    with pytest.raises(LayoutError, match=r"S\(-3\) on axis 'dp': the tensor has 2 dims"):
        from_placements(layout.mesh, [Shard(-3), Replicate()], ndim=2)
    with pytest.raises(LayoutError, match=r"S\(2\) on axis 'tp': the tensor has 2 dims"):
        from_placements(layout.mesh, [Replicate(), Shard(2)], ndim=2)


def test_a_layout_is_said_in_one_way(layout: Layout) -> None:
    with pytest.raises(LayoutError, match="not both"):
        layout_of(layout, [Shard(0), Replicate()])
    with pytest.raises(LayoutError, match="has no equal here"):
        layout(Shard(0), object())  # type: ignore[arg-type]


def test_two_ragged_axes_are_refused(layout: Layout) -> None:
    with pytest.raises(LayoutError, match="only cut of dim 0"):
        layout(RaggedShard((1, 2)), RaggedShard((2, 1)))
