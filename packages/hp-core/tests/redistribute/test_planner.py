"""The planner: plans are right (run on arrays by the simulator) and optimal (against brute force).

Meshes (2,), (2, 2) and (4, 2), all pairs of layouts of 1-D to 3-D tensors, even and uneven, also smaller than the mesh.
"""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_core.errors import LayoutError, RedistributeError
from hp_core.layout import Layout, intern
from hp_core.mesh import DeviceMesh
from hp_core.placement import Partial, RaggedShard, Replicate, Shard
from hp_core.redistribute.planner import (
    CostModel,
    explain_redistribute,
    plan_cache_clear,
    plan_cache_info,
    plan_redistribute,
)
from hp_core.redistribute.steps import AllGather, AllReduce, AllToAll, Pad, Permute, Plan, ReduceScatter, Scale, Slice

from .brute_force import BruteForce, all_layouts
from .simulate import contributions, run_plan, value_of

ITEMSIZE = 4

# Latency in ns, then ns per byte for the axes: a message costs nothing; about as much as the tensors here; nearly all.
BYTES, BALANCED, LATENCY, UNEVEN_AXES = (0, (1, 1)), (40, (1, 1)), (100_000, (1, 1)), (40, (7, 1))


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return DeviceMesh(shape, ("dp", "tp", "cp", "ep")[: len(shape)])


def cost_model(mesh: DeviceMesh, latency: int, byte_time: tuple[int, ...]) -> CostModel:
    bandwidths = {name: 1e9 / time for name, time in zip(mesh.mesh_dim_names, byte_time, strict=False)}
    return CostModel(latency * 1e-9, 1e9, bandwidths)


def kinds(plan: Plan) -> list[type]:
    return [type(step) for step in plan.steps]


def check(plan: Plan, seed: int = 0) -> None:
    """Run a plan on arrays; every rank must end with exactly its part of the value, or a contribution to it."""
    full = np.arange(prod(plan.global_shape), dtype=float).reshape(plan.global_shape) + 7
    result = run_plan(plan, contributions(plan.src, full, seed))
    np.testing.assert_allclose(value_of(plan.dst, result, plan.global_shape), full, rtol=0, atol=1e-9)


def check_all_pairs(
    layouts: list[Layout], shape: tuple[int, ...], latency: int, byte_time: tuple[int, ...], every: int = 1
) -> None:
    """Plans between all layouts (or each `every`-th pair) are right and cost as little as brute force can do."""
    mesh = layouts[0].mesh
    model = cost_model(mesh, latency, byte_time)
    exhaustive = BruteForce(layouts, shape, ITEMSIZE, latency, byte_time)
    for number, src in enumerate(layouts):
        cheapest = exhaustive.costs_from(src)
        for dst in layouts[number % every :: every]:
            plan = plan_redistribute(src, dst, shape, ITEMSIZE, cost_model=model)
            check(plan, number)
            cost = sum(
                latency * step.messages + step.nbytes * max(byte_time[axis] for axis in step.axes)
                for step in plan.steps
            )
            assert cost == cheapest[dst], f"costs {cost} ns, brute force {cheapest[dst]} ns:\n{plan}"


@pytest.mark.parametrize("costs", [BYTES, BALANCED, LATENCY], ids=["bytes", "balanced", "latency"])
@pytest.mark.parametrize("shape", [(1,), (5,), (8,), (5, 3), (4, 8), (1, 2, 3), (5, 4, 3)], ids=str)
def test_all_pairs_on_one_axis(shape: tuple[int, ...], costs: tuple[int, tuple[int, ...]]) -> None:
    check_all_pairs(all_layouts(mesh_of((2,)), len(shape), ("sum", "max")), shape, *costs)


@pytest.mark.parametrize("costs", [BYTES, BALANCED, LATENCY, UNEVEN_AXES], ids=["bytes", "balanced", "latency", "axes"])
@pytest.mark.parametrize("shape", [(3,), (16,), (5, 3), (8, 4), (1, 6)], ids=str)
@pytest.mark.parametrize("sizes", [(2, 2), (4, 2)], ids=str)
def test_all_pairs_on_two_axes(
    sizes: tuple[int, ...], shape: tuple[int, ...], costs: tuple[int, tuple[int, ...]]
) -> None:
    check_all_pairs(all_layouts(mesh_of(sizes), len(shape)), shape, *costs)


@pytest.mark.parametrize(
    ("sizes", "shape", "costs"),
    [
        ((2, 2), (5, 4, 3), BYTES),
        ((2, 2), (4, 2, 6), BALANCED),
        ((2, 2), (1, 3, 7), LATENCY),
        ((4, 2), (8, 4, 12), BYTES),
        ((4, 2), (5, 3, 9), BALANCED),
        ((4, 2), (3, 2, 6), LATENCY),
        ((4, 2), (6, 7, 2), UNEVEN_AXES),
    ],
    ids=str,
)
def test_all_pairs_of_three_dims(
    sizes: tuple[int, ...], shape: tuple[int, ...], costs: tuple[int, tuple[int, ...]]
) -> None:
    check_all_pairs(all_layouts(mesh_of(sizes), 3), shape, *costs)


@pytest.mark.parametrize("ops", [("avg", "sum"), ("max", "min", "sum")], ids=str)
def test_all_pairs_with_other_reduce_ops(ops: tuple[str, ...]) -> None:
    check_all_pairs(all_layouts(mesh_of((4, 2)), 2, ops), (6, 5), *BALANCED)


@pytest.mark.parametrize("costs", [BYTES, BALANCED, LATENCY], ids=["bytes", "balanced", "latency"])
@pytest.mark.parametrize("shape", [(12,), (6, 5)], ids=str)
def test_all_pairs_with_ragged_shares(shape: tuple[int, ...], costs: tuple[int, tuple[int, ...]]) -> None:
    layouts = all_layouts(mesh_of((4, 2)), len(shape), ragged=[(0, (1, 0, 3, 2)), (1, (2, 1))])
    ragged = [layout for layout in layouts if layout.ragged]
    assert len(ragged) >= 4
    # A plan meets only the shares of its source and target, so each kind of shares is compared with a graph of its own.
    for shares in ((1, 0, 3, 2), (2, 1)):
        check_all_pairs([layout for layout in layouts if layout.ragged in (None, shares)], shape, *costs)
    for src, dst in product(ragged, ragged):
        check(plan_redistribute(src, dst, shape, ITEMSIZE))


@pytest.mark.parametrize("costs", [(0, (1, 1, 1)), (40, (1, 1, 1)), (20, (5, 3, 1))], ids=str)
@pytest.mark.parametrize("shape", [(8, 12), (5, 3)], ids=str)
def test_a_sample_of_pairs_on_three_axes(shape: tuple[int, ...], costs: tuple[int, tuple[int, ...]]) -> None:
    check_all_pairs(all_layouts(mesh_of((2, 2, 2)), 2), shape, *costs, every=61)


@pytest.mark.parametrize(
    ("sizes", "shape"), [((2, 2), (5, 3)), ((4,), (5, 10)), ((2, 2), (2,)), ((3, 2), (7, 2))], ids=str
)
def test_gathering_uneven_nested_cuts_gives_the_tensor_back(sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Public report cases 1 and 5: no row is lost, moved or invented when an uneven dim is gathered over all axes."""
    layout = Layout(sizes, ("p", "q")[: len(sizes)])
    plan = plan_redistribute(layout(*[Shard(0)] * len(sizes)), layout(), shape, 4)
    assert kinds(plan) == [AllGather]
    check(plan)


# -- single plans that must look so ---------------------------------------------------------------------------------


def test_exchanging_two_cuts_is_one_message() -> None:
    layout = Layout((2, 2), ("dp", "tp"))
    plan = plan_redistribute(layout("dp", "tp"), layout("tp", "dp"), (8, 8), 4)
    assert kinds(plan) == [Permute]
    assert plan.nbytes == 4 * 4 * 4


def test_shards_change_dims_in_one_exchange() -> None:
    layout = Layout((4,), ("tp",))
    plan = plan_redistribute(layout("tp"), layout(None, "tp"), (8, 8), 4)
    assert kinds(plan) == [AllToAll]
    assert plan.nbytes == 3 * (2 * 2) * 4


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        ([Shard(0), Shard(0)], [Replicate(), Replicate()], [AllGather]),
        ([Shard(0), Shard(1)], [Replicate(), Replicate()], [AllGather]),
        ([Partial(), Partial()], [Replicate(), Replicate()], [AllReduce]),
        ([Partial(), Partial()], [Shard(1), Shard(0)], [ReduceScatter]),
        ([Partial(), Replicate()], [Shard(1), Shard(0)], [Slice, ReduceScatter]),
        ([Replicate(), Replicate()], [Shard(1), Shard(0)], [Slice]),
        ([Replicate(), Replicate()], [Partial(), Partial()], [Scale]),
        ([Shard(0), Shard(1)], [Partial(), Partial()], [Pad]),
        ([Partial(), Shard(1)], [Partial(), Shard(1)], []),
        ([Partial("avg"), Partial("avg")], [Partial("avg"), Partial("avg")], []),
        ([Partial(), Replicate()], [Partial("max"), Replicate()], [AllReduce, Scale]),
    ],
)
def test_axes_are_merged_into_one_collective(src: list[object], dst: list[object], expected: list[type]) -> None:
    layout = Layout((2, 2), ("dp", "tp"))
    model = CostModel(latency=1e-3, bandwidth=1e12)
    plan = plan_redistribute(layout(*src), layout(*dst), (8, 8), 4, cost_model=model)  # type: ignore[arg-type]
    assert sorted(kind.__name__ for kind in kinds(plan)) == sorted(kind.__name__ for kind in expected)


def test_replicas_share_the_work_of_a_large_reduction() -> None:
    """Ranks that hold the same contribution each reduce a part of it; a small tensor isn't worth the second message."""
    layout = Layout((4, 2), ("dp", "tp"))
    src, dst = layout(Partial(), Replicate()), layout()
    assert kinds(plan_redistribute(src, dst, (4, 4), 4)) == [AllReduce]
    large = plan_redistribute(src, dst, (4096, 4096), 4)
    assert kinds(large) == [Slice, AllReduce, AllGather]
    assert large.nbytes == 4096 * 4096 * 4 * 5 // 4


def test_a_slow_axis_carries_only_what_it_must() -> None:
    """Hierarchical all-reduce: scatter over the fast axis, reduce over the slow one, gather over the fast one."""
    layout = Layout((2, 4), ("node", "local"))
    model = CostModel(1e-6, 100e9, {"node": 1e9})
    plan = plan_redistribute(layout(Partial(), Partial()), layout(), (1024, 1024), 4, cost_model=model)
    assert [(type(step), step.axis_names) for step in plan.steps] == [
        (ReduceScatter, ("local",)),
        (AllReduce, ("node",)),
        (AllGather, ("local",)),
    ]


def test_axes_of_one_rank_cost_nothing() -> None:
    layout = Layout((2, 1, 2), ("dp", "cp", "tp"))
    nothing = plan_redistribute(layout(None, "cp"), layout(("cp",)), (4, 4), 4)
    assert nothing.steps == ()
    assert nothing.messages == 0
    pending = plan_redistribute(layout(Replicate(), Partial("max"), Replicate()), layout(), (4, 4), 4)
    assert pending.steps == ()
    gather = plan_redistribute(layout(("dp", "cp", "tp")), layout(None, "cp"), (5, 4), 4)
    assert kinds(gather) == [AllGather]
    assert gather.steps[0].axes == (0, 2)
    check(gather)
    one = Layout((1,), ("tp",))
    check(plan_redistribute(one(RaggedShard((3,))), one(Partial()), (3, 2), 4))


def test_scalars_and_empty_tensors() -> None:
    layout = Layout((2, 2), ("dp", "tp"))
    for src, dst in product([layout(), layout(Partial(), Replicate())], repeat=2):
        check(plan_redistribute(src, dst, (), 4))
    for src, dst in product([layout("dp", "tp"), layout(), layout(Partial(), Partial())], repeat=2):
        check(plan_redistribute(src, dst, (0, 3), 4))


# -- memory ---------------------------------------------------------------------------------------------------------


def test_a_memory_limit_forbids_large_intermediates() -> None:
    layout = Layout((2, 2), ("dp", "tp"))
    src, dst = layout(("dp", "tp"), None), layout(None, ("tp", "dp"))
    one_message = CostModel(latency=1.0, bandwidth=1e9)
    reduced = layout(Partial(), Shard(0)), layout(Shard(1), Replicate())
    free = plan_redistribute(*reduced, (8, 8), 4, cost_model=one_message)
    assert free.peak_bytes == 256
    tight = plan_redistribute(*reduced, (8, 8), 4, cost_model=one_message, memory_limit=128)
    assert tight.peak_bytes == 128
    assert tight.messages > free.messages
    check(tight)
    check(plan_redistribute(src, dst, (8, 8), 4, memory_limit=64))


def test_a_memory_limit_that_nothing_keeps_is_an_error_with_numbers() -> None:
    layout = Layout((2, 2), ("dp", "tp"))
    with pytest.raises(RedistributeError, match=r"memory_limit=255 B.*source takes 64 B.*target 256 B.*peaks at 256 B"):
        plan_redistribute(layout("dp", "tp"), layout(), (8, 8), 4, memory_limit=255)
    assert plan_redistribute(layout("dp", "tp"), layout(), (8, 8), 4, memory_limit=256).peak_bytes == 256


# -- refusals -------------------------------------------------------------------------------------------------------


def test_a_shape_that_contradicts_a_layout_is_the_layouts_error() -> None:
    layout = Layout((2, 2), ("dp", "tp"))
    with pytest.raises(LayoutError, match=r"cuts dim 1 over \('tp',\), but the tensor has only 1 dims"):
        plan_redistribute(layout(), layout("dp", "tp"), (8,), 4)
    with pytest.raises(LayoutError, match=r"sum to 3, which doesn't divide dim 0"):
        plan_redistribute(layout(RaggedShard((1, 2)), Replicate()), layout(), (8,), 4)


def test_a_cost_model_needs_sensible_numbers() -> None:
    with pytest.raises(RedistributeError, match="bandwidths > 0"):
        CostModel(axis_bandwidth={"dp": 0.0})
    with pytest.raises(RedistributeError, match="latency >= 0"):
        CostModel(latency=-1.0)
    layout = Layout((2,), ("dp",))
    with pytest.raises(RedistributeError, match="itemsize 0"):
        plan_redistribute(layout(), layout(), (2,), 0)


# -- values ---------------------------------------------------------------------------------------------------------


def test_equal_questions_get_the_same_plan_from_the_cache() -> None:
    plan_cache_clear()
    first = plan_redistribute(Layout((2, 2), ("dp", "tp"))("dp"), Layout((2, 2), ("dp", "tp"))(), (5, 3), 4)
    again = plan_redistribute(
        Layout((2, 2), ("dp", "tp"))("dp"), Layout((2, 2), ("dp", "tp"))(), [5, 3], 4, cost_model=CostModel()
    )
    assert again is first
    assert plan_cache_info()[:2] == (1, 1)
    plan_cache_clear()
    anew = plan_redistribute(first.src, first.dst, (5, 3), 4)
    assert anew is not first
    assert (anew, hash(anew)) == (first, hash(first))


def test_plans_print_axes_shapes_and_bytes() -> None:
    layout = Layout((2, 2), ("dp", "tp"))
    text = explain_redistribute(layout("dp", "tp"), layout(None, "tp"), (5, 3))
    assert text.splitlines() == [
        "(dp, tp) -> (-, tp), shape (5, 3), 4 B per element: 1 message, 24 B sent per rank, peak 40 B",
        "  1. all_gather over dp: (dp, tp) -> (-, tp), local (3, 2) -> (5, 2), 24 B",
    ]
    assert "nothing to do" in explain_redistribute(layout("dp"), layout("dp"), (5, 3))
    assert "all_reduce(max) over dp" in explain_redistribute(layout(Partial("max"), Replicate()), layout(), (5, 3))


# -- anything at all ------------------------------------------------------------------------------------------------


@st.composite
def questions(draw: st.DrawFn) -> tuple[Layout, Layout, tuple[int, ...], CostModel]:
    """Two layouts on a mesh of up to 8 ranks, the shape of a tensor, what communication costs."""
    sizes = draw(st.sampled_from([(2,), (3,), (8,), (2, 3), (3, 1, 2), (2, 2, 2), (1, 4, 2), (1, 2, 2, 2), (7,)]))
    ndim = draw(st.integers(1, 4))
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=ndim, max_size=ndim)))
    mesh = mesh_of(sizes)
    layouts = []
    for _ in range(2):
        op = draw(st.sampled_from(["sum", "avg", "max", "min"]))
        dims: list[list[int]] = [[] for _ in range(ndim)]
        partials = []
        for axis in draw(st.permutations(range(len(sizes)))):
            role = draw(st.integers(0, ndim + 1))
            if role < ndim:
                dims[role].append(axis)
            elif role == ndim:
                partials.append((axis, op))
        ragged = None
        if len(dims[0]) == 1 and draw(st.booleans()):
            parts = sizes[dims[0][0]]
            units = draw(st.lists(st.integers(0, 3), min_size=parts, max_size=parts))
            if sum(units) and shape[0] % sum(units) == 0:
                ragged = tuple(units)
        layouts.append(intern(mesh, tuple(map(tuple, dims)), tuple(sorted(partials)), ragged))
    model = draw(st.sampled_from([CostModel(), CostModel(0.0), CostModel(1.0), CostModel(1e-7, 1e9, {"dp": 1e8})]))
    return layouts[0], layouts[1], shape, model


@settings(max_examples=600)
@given(questions())
def test_any_plan_is_right(question: tuple[Layout, Layout, tuple[int, ...], CostModel]) -> None:
    src, dst, shape, model = question
    check(plan_redistribute(src, dst, shape, 8, cost_model=model))


def test_large_meshes_are_planned_too() -> None:
    """Above 64 ranks volumes come from even splits; the plans are as on a small mesh."""
    layout = Layout((8, 8, 8, 8), ("pp", "dp", "cp", "tp"))
    swap = plan_redistribute(layout(None, "cp", "tp"), layout(None, "tp", "cp"), (16, 64, 64), 4)
    assert kinds(swap) == [Permute]
    gather = plan_redistribute(layout(("dp", "tp"), "cp"), layout(None, "cp"), (64, 64), 4)
    assert kinds(gather) == [AllGather]
    many = plan_redistribute(layout("pp", "dp", "cp", "tp"), layout("tp", "cp", "dp", "pp"), (64, 64, 64, 64), 2)
    assert many.messages == 1
    assert many.nbytes <= 64**4 // 8**4 * 2
