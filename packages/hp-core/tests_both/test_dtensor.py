"""DTensors mean the same on both frameworks: what a rank holds, what moves, which gradients come, which numbers are drawn.

Written once against the public API; the expected values, layouts, messages and collectives are those of both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hp_core as hp
from hp_core import Layout, Partial, Replicate, Shard, init_device_mesh
from hp_core.testing import run_ranks

from .layouts import SHAPE, WEIGHT, WHOLE, grid, lay, layouts, own

# -- making them ------------------------------------------------------------------------------------------------------


def _made(framework: Any) -> list[str]:
    assert hp.get_platform().name == framework.name
    faults = []
    for layout in layouts(grid()):
        given = lay(framework, WHOLE, layout)
        told = (tuple(given.shape), given.ndim, given.layout, given.is_partial(), tuple(given.local_shape))
        if told != (SHAPE, 2, layout, bool(layout.partials), layout.local_shape(SHAPE)):
            faults.append(f"{layout.compact_str}: {told}")
        if not np.array_equal(framework.array(given.full_tensor()), WHOLE):
            faults.append(f"{layout.compact_str}: values")
    return faults


def test_parts_make_the_global_tensor_in_every_layout(framework: Any) -> None:
    assert run_ranks(4, _made, framework) == [[]] * 4


def _distributed(framework: Any) -> list[str]:
    faults = []
    mesh = grid()
    # only the values of the third rank count
    value = WHOLE if hp.get_rank() == 2 else WHOLE * 0
    for layout in layouts(mesh):
        x = hp.distribute_tensor(framework.tensor(value), layout, src_data_rank=2)
        if x.layout is not layout or not np.array_equal(framework.array(x.full_tensor()), WHOLE):
            faults.append(f"{layout.compact_str}: values")
        if not layout.partials and not np.array_equal(framework.array(x.to_local()), own(WHOLE, layout)):
            faults.append(f"{layout.compact_str}: part")
    return faults


def test_distribute_tensor_sends_each_rank_its_part(framework: Any) -> None:
    assert run_ranks(4, _distributed, framework) == [[]] * 4


# -- redistribution and gradients -------------------------------------------------------------------------------------


def _every_way(framework: Any) -> list[str]:
    faults = []
    choices = layouts(grid())
    for number, src in enumerate(choices):
        for dst in choices[number % 3 :: 3]:
            seen: list[Any] = []

            def loss(local: Any, src: Layout = src, dst: Layout = dst, seen: list[Any] = seen) -> Any:
                x = hp.DTensor.from_local(local, src, shape=SHAPE).redistribute(dst)
                seen.append(x)
                return (x * lay(framework, WEIGHT, dst.gradient)).sum().full_tensor()

            value, [gradient] = framework.differentiate(loss, own(WHOLE, src))
            where = f"{src.compact_str} -> {dst.compact_str}"
            if seen[0].layout is not dst or value != (WHOLE * WEIGHT).sum():
                faults.append(f"{where}: values")
            if not np.array_equal(gradient, own(WEIGHT, src.gradient)):
                faults.append(f"{where}: gradient")
    return faults


def test_redistribution_keeps_values_and_sends_gradients_back(framework: Any) -> None:
    assert run_ranks(4, _every_way, framework, timeout=120.0) == [[]] * 4


MOVES = {
    (Shard(0), Replicate()): ({"all_gather": 1}, {}),
    (Shard(0), Shard(1)): ({"all_to_all": 1}, {"all_to_all": 1}),
    (Partial(), Replicate()): ({"all_reduce": 1}, {}),
    (Partial(), Shard(1)): ({"reduce_scatter": 1}, {"all_gather": 1}),
    (Replicate(), Shard(0)): ({}, {"all_gather": 1}),
    (Replicate(), Partial()): ({}, {}),
}
"""Collectives of the way there, and of the gradient's way back if the use doesn't vary over the ranks."""


def _moves(framework: Any) -> list[Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    base = Layout.from_device_mesh(mesh)
    whole, found = WEIGHT[:4, :4], []
    for src, dst in MOVES:
        counts: list[dict[str, int]] = []

        def loss(local: Any, src: Any = src, dst: Any = dst, counts: list[dict[str, int]] = counts) -> Any:
            with hp.record_collectives() as log:
                moved = hp.DTensor.from_local(local, base(src), shape=(4, 4)).redistribute(base(dst))
            counts.append(dict(log.counts))
            return moved.to_local().sum()

        with hp.record_collectives() as log:
            framework.differentiate(loss, own(whole, base(src)))
        back = {kind: n - counts[0].get(kind, 0) for kind, n in log.counts.items() if n != counts[0].get(kind, 0)}
        found.append((counts[0], back))
    return found


def test_ways_cost_the_same_collectives(framework: Any) -> None:
    for found in run_ranks(2, _moves, framework):
        assert dict(zip(MOVES, found, strict=True)) == MOVES


def _across(framework: Any) -> bool:
    front, line = Layout((2,), ("front",), (0, 1)), Layout((4,), ("all",))
    nothing = WHOLE[:0] if hp.get_rank() == 2 else WHOLE[:0, 0]  # any tensor without elements
    held = own(WHOLE, front("front")) if hp.get_rank() < 2 else nothing

    def loss(local: Any) -> Any:
        x = hp.DTensor.from_local(local, front("front"), shape=SHAPE).redistribute(line(None, "all"))
        assert np.array_equal(framework.array(x.detach().to_local()), own(WHOLE, line(None, "all")))
        return (x * lay(framework, WEIGHT, line(None, "all"))).sum().full_tensor()

    value, [gradient] = framework.differentiate(loss, held)
    wanted = own(WEIGHT, front("front")) if hp.get_rank() < 2 else nothing
    return value == (WHOLE * WEIGHT).sum() and np.array_equal(gradient, wanted)


def test_redistribution_to_another_mesh_and_back(framework: Any) -> None:
    assert run_ranks(4, _across, framework) == [True] * 4


def _beside(framework: Any) -> bool:
    base = Layout.from_device_mesh(grid())

    def loss(local: Any) -> Any:
        x = hp.DTensor.from_local(local, base("dp", "tp"), shape=SHAPE).redistribute(base, async_op=True)
        assert (tuple(x.shape), x.layout) == (SHAPE, base)  # known before it has arrived
        return (x * lay(framework, WEIGHT, base)).sum().full_tensor()

    value, [gradient] = framework.differentiate(loss, own(WHOLE, base("dp", "tp")))
    return value == (WHOLE * WEIGHT).sum() and np.array_equal(gradient, own(WEIGHT, base("dp", "tp")))


def test_redistribution_that_is_waited_for_at_first_use(framework: Any) -> None:
    assert run_ranks(4, _beside, framework) == [True] * 4


def _network(framework: Any, sequence: bool) -> Any:
    """Projections of one input, gated, and a projection back: as an attention or feed-forward block is cut."""
    linear, silu = framework.functional.linear, framework.functional.silu
    base = Layout.from_device_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    stream = base(Shard(0)) if sequence else base
    random = np.random.default_rng(0)
    shapes = {"x": (4, 6), "norm": (6,), "q": (8, 6), "k": (8, 6), "v": (8, 6), "o": (6, 8)}
    dense = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    cut = {"x": stream, "norm": base, "o": base(Shard(1)), **dict.fromkeys("qkv", base(Shard(0)))}

    def network(tensors: tuple[Any, ...], gather: bool) -> Any:
        x, norm, q, k, v, o = tensors
        x = x * norm
        x = x.redistribute(base) if gather else x
        return linear(silu(linear(x, q)) * linear(x, k) + linear(x, v), o)

    forward: dict[str, int] = {}

    def sharded(*locals_: Any) -> Any:
        with hp.record_collectives() as log:
            given = zip(dense, locals_, strict=True)
            y = network(
                tuple(hp.DTensor.from_local(local, cut[name], shape=dense[name].shape) for name, local in given),
                sequence,
            )
            pending = y.layout
            y = y.redistribute(stream)
            loss = (y * y).sum().to_local()
        forward.update(log.counts)
        assert pending is base(Partial())
        return loss

    with hp.record_collectives() as log:
        _, gradients = framework.differentiate(sharded, *[own(value, cut[name]) for name, value in dense.items()])
    backward = {kind: n - forward.get(kind, 0) for kind, n in log.counts.items() if n != forward.get(kind, 0)}
    _, wanted = framework.differentiate(lambda *t: (network(t, False) ** 2).sum(), *dense.values())
    errors = [
        np.abs(gradient - own(value, cut[name])).max() / np.abs(value).max()
        for name, gradient, value in zip(dense, gradients, wanted, strict=True)
    ]
    return forward, backward, float(max(errors))


@pytest.mark.parametrize(
    ("sequence", "forward", "backward"),
    [
        (False, {"all_reduce": 1}, {"all_reduce": 1}),
        # and one all-reduce for the gain of the norm, which works on a cut sequence
        (True, {"all_gather": 1, "reduce_scatter": 1}, {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1}),
    ],
    ids=["replicated", "sequence"],
)
def test_the_law_of_gradients_costs_no_more_than_by_hand(
    framework: Any, sequence: bool, forward: dict[str, int], backward: dict[str, int]
) -> None:
    for there, back, error in run_ranks(2, _network, framework, sequence):
        assert (there, back) == (forward, backward)
        assert error < 1e-5


def _styles(framework: Any) -> Any:
    random = np.random.default_rng(3)
    sizes = [(8, 6), (8,), (4, 8), (4,)]
    w1, b1, w2, b2 = (random.normal(size=size).astype(np.float32) for size in sizes)
    batch = random.normal(size=(6, 6)).astype(np.float32)

    def model() -> Any:
        return framework.sequential(framework.linear(w1, b1), framework.activation(), framework.linear(w2, b2))

    dense, sharded, mesh = model(), model(), grid()
    keep = {"use_local_output": False}
    hp.parallelize_module(sharded, mesh, {"0": hp.ColwiseParallel(**keep), "2": hp.RowwiseParallel(**keep)})
    base = Layout.from_device_mesh(mesh)
    x = lay(framework, batch, base("dp"))
    value, gradients = framework.differentiate_module(lambda: (sharded(x) ** 2).mean().full_tensor(), sharded)
    wanted, whole = framework.differentiate_module(lambda: (dense(framework.tensor(batch)) ** 2).mean(), dense)
    cuts = [base("tp"), base("tp"), base(None, "tp"), base]
    errors = [np.abs(g - own(w, cut)).max() for g, w, cut in zip(gradients, whole, cuts, strict=True)]
    return value, wanted, float(max(errors)), tuple(sharded(x).shape)


def test_styles_on_two_axes_give_the_gradients_of_one_process(framework: Any) -> None:
    for value, wanted, error, shape in run_ranks(4, _styles, framework):
        assert value == pytest.approx(wanted, rel=1e-5)
        assert error < 1e-5
        assert shape == (6, 4)


def _custom(framework: Any) -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    base = Layout.from_device_mesh(mesh)
    scale = WEIGHT[0]

    @hp.custom_shard(out_placements=[Shard(0)], in_placements=([Shard(0)], [Replicate()]))
    def scaled(x: Any, weight: Any) -> Any:
        return x * weight

    def loss(x: Any, weight: Any) -> Any:
        y = scaled(hp.DTensor.from_local(x, base("tp"), shape=SHAPE), hp.DTensor.from_local(weight, base))
        return (y * y).sum().full_tensor()

    _, (of_x, of_weight) = framework.differentiate(loss, own(WHOLE, base("tp")), scale)
    wanted = own(2 * WHOLE * scale**2, base("tp")), (2 * WHOLE**2 * scale).sum(0)
    return bool(np.allclose(of_x, wanted[0]) and np.allclose(of_weight, wanted[1]))


def test_a_function_of_local_parts_has_the_dense_gradients(framework: Any) -> None:
    assert run_ranks(2, _custom, framework) == [True, True]


def _planned(framework: Any) -> int:
    base = Layout.from_device_mesh(grid())
    x, y = lay(framework, WHOLE, base("dp")), lay(framework, WEIGHT, base(None, "tp"))

    def call() -> Any:
        return framework.functional.softmax((x + y)[1:].transpose(0, 1), dim=-1)

    call()
    before = hp.dispatch_cache_info().misses
    call()
    return hp.dispatch_cache_info().misses - before


def test_a_second_call_plans_nothing(framework: Any) -> None:
    assert run_ranks(4, _planned, framework) == [0] * 4


# -- factories and random numbers -------------------------------------------------------------------------------------


def _factories(framework: Any) -> list[str]:
    faults = []
    float32, alone = framework.dtype("float32"), hp.DeviceMesh((1,), ("one",), (hp.get_rank(),))
    made: dict[str, Callable[..., Any]] = {
        "zeros": lambda **where: hp.zeros(*SHAPE, dtype=float32, **where),
        "ones": lambda **where: hp.ones(*SHAPE, dtype=float32, **where),
        "full": lambda **where: hp.full(SHAPE, 2.5, dtype=float32, **where),
        "rand": lambda **where: hp.rand(*SHAPE, dtype=float32, **where),
        "randn": lambda **where: hp.randn(*SHAPE, dtype=float32, **where),
        "randint": lambda **where: hp.randint(-3, 900, SHAPE, **where),
    }
    for name, make in made.items():
        hp.manual_seed(5)
        wanted = framework.array(make(device_mesh=alone).to_local())
        for layout in layouts(grid()):
            hp.manual_seed(5)
            x = make(layout=layout)
            if x.layout is not layout or not np.array_equal(framework.array(x.full_tensor()), wanted):
                faults.append(f"{name} laid out {layout.compact_str}")
    if tuple(hp.empty(*SHAPE, layout=layouts(grid())[1]).shape) != SHAPE:
        faults.append("empty")
    return faults


def test_factories_give_one_global_tensor_in_every_layout(framework: Any) -> None:
    assert run_ranks(4, _factories, framework) == [[]] * 4


DIGESTS = {
    "rand": "47e6a0ff1b2cbb02",
    "randn": "b00768799f8ecd14",
    "randint": "e33cb25705e1d9e7",
    "dropout": "185ba5749360d381",
}
"""Of the bytes drawn from one seed: the same on both frameworks, and in every release, or runs can't be repeated."""


def _digests(framework: Any) -> dict[str, str]:
    alone = hp.DeviceMesh((1,), ("one",))
    float32 = framework.dtype("float32")
    ones = hp.ones(8, 16, dtype=float32, device_mesh=alone)
    draws: dict[str, Callable[[], Any]] = {
        "rand": lambda: hp.rand(37, 11, dtype=float32, device_mesh=alone),
        "randn": lambda: hp.randn(37, 11, dtype=float32, device_mesh=alone),
        "randint": lambda: hp.randint(-3, 900, (37, 11), device_mesh=alone),
        "dropout": lambda: framework.functional.dropout(ones, 0.25),
    }
    found = {}
    for name, draw in draws.items():
        hp.manual_seed(1234567890123)
        found[name] = hashlib.sha256(framework.array(draw().to_local()).tobytes()).hexdigest()[:16]
    return found


def test_a_seed_gives_the_same_bits(framework: Any) -> None:
    assert run_ranks(1, _digests, framework) == [DIGESTS]
