"""Redistribution to another mesh: other ranks, more, fewer, or the same in another arrangement, with the gradient's way back.

Ranks outside of a mesh hold nothing there, and take part by calling the same functions.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hp_core import DTensor, Layout, Partial, RaggedShard, Shard, distribute_tensor, get_rank
from hp_core.errors import LayoutError, MeshError, ShardingRuleError
from hp_core.redistribute import explain_redistribute, plan_redistribute, redistribute_cache_info
from hp_core.redistribute.steps import AllGather, AllReduce, AllToAll, Pad, ReduceScatter, Scale, Slice, Transfer
from hp_core.testing import assert_same_error, record_collectives, run_ranks

SQUARE = Layout((2, 2), ("dp", "tp"))
LINE = Layout((4,), ("x",))
FRONT = Layout((2,), ("front",), (0, 1))
BACK = Layout((2,), ("back",), (2, 3))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def lay(value: torch.Tensor, layout: Layout, grad: bool = True) -> Any:
    """The tensor on its mesh; nothing, on other ranks."""
    if layout.mesh.get_coordinate() is not None:
        return distribute_tensor(value, layout, src_data_rank=None).requires_grad_(grad)
    nothing = torch.empty(0, dtype=value.dtype)
    return DTensor.from_local(nothing, layout, shape=tuple(value.shape)).requires_grad_(grad)


def own_part(value: torch.Tensor, layout: Layout) -> torch.Tensor:
    if layout.mesh.get_coordinate() is None:
        return value.new_empty(0)
    return value[tuple(slice(*interval) for interval in layout.bounds(tuple(value.shape)))]


# -- what is planned --------------------------------------------------------------------------------------------------


def kinds(src: Layout, dst: Layout, shape: tuple[int, ...]) -> list[type]:
    return [type(step) for step in plan_redistribute(src, dst, shape, 4).steps]


@pytest.mark.parametrize(
    ("src", "dst", "shape", "expected"),
    [
        (SQUARE("dp", "tp"), LINE("x"), (8, 8), [AllToAll]),  # a common refinement: an ordinary collective within dp
        (SQUARE("dp", "tp"), LINE("x"), (5, 8), [Transfer]),  # chunks of chunks of 5 aren't the chunks of 5
        (SQUARE(("dp", "tp")), LINE("x"), (8, 8), []),
        (SQUARE(), LINE("x"), (8,), [Slice]),
        (SQUARE(Partial(), Partial()), LINE(), (8,), [AllReduce]),
        (FRONT("front"), BACK("back"), (8,), [Transfer]),
        (FRONT(Partial()), BACK("back"), (4096, 64), [ReduceScatter, Transfer]),
        (FRONT("front"), BACK(Partial()), (8,), [Transfer, Pad]),
        (FRONT("front"), BACK(Partial("max")), (8,), [Transfer, AllGather, Scale]),
        (BACK(), FRONT(Partial("max")), (8,), [Transfer, Scale]),
        (FRONT(RaggedShard((3, 1))), BACK(RaggedShard((0, 1))), (8,), [Transfer]),
    ],
    ids=str,
)
def test_plans(src: Layout, dst: Layout, shape: tuple[int, ...], expected: list[type]) -> None:
    assert kinds(src, dst, shape) == expected


def test_the_same_meaning_in_other_words_costs_nothing() -> None:
    turned = Layout((2, 2), ("tp", "dp"), (0, 2, 1, 3))
    assert kinds(SQUARE("dp", "tp"), turned("dp", "tp"), (5, 3)) == []
    assert kinds(SQUARE(Partial(), Shard(0)), turned(Shard(0), Partial()), (5, 3)) == []
    backwards = Layout((4,), ("x",), (3, 2, 1, 0))
    assert kinds(LINE(Partial("avg")), backwards(Partial("avg")), (5,)) == []
    assert kinds(LINE("x"), backwards("x"), (8,)) == [Transfer]


def test_replicas_share_the_sending() -> None:
    """Each of four replicas sends to one of four others, which a lone holder must do alone."""
    far = Layout((4,), ("x",), (4, 5, 6, 7))
    assert plan_redistribute(LINE(), far("x"), (8,), 4).nbytes == 2 * 4
    assert plan_redistribute(Layout((1,), ("x",)), far("x"), (8,), 4).nbytes == 8 * 4


def test_what_replicates_crosses_once() -> None:
    """Many ranks that want all of it get a part each, which they gather among themselves."""
    far = Layout((8,), ("x",), range(8, 16))
    plan = plan_redistribute(Layout((8,), ("y",))("y"), far(), (1024, 1024), 4)
    assert [step.kind for step in plan.steps] == ["transfer", "all_gather"]
    assert plan.steps[0].nbytes == 1024 * 1024 * 4 // 8


def test_a_memory_limit_holds_between_meshes_too() -> None:
    free = plan_redistribute(FRONT(Partial()), BACK("back"), (64,), 4)
    assert free.peak_bytes == 256
    with pytest.raises(ValueError, match=r"memory_limit=64 B.*source takes 256 B.*target 128 B"):
        plan_redistribute(FRONT(Partial()), BACK("back"), (64,), 4, memory_limit=64)


def test_plans_print_both_meshes_and_bytes() -> None:
    text = explain_redistribute(FRONT(Partial()), BACK("back"), (4096, 64))
    assert text.splitlines() == [
        "P(sum):front on [front=2: ranks 0-1] -> (back) on [back=2: ranks 2-3], shape (4096, 64), 4 B per element: "
        "2 messages, 1048576 B sent per rank, peak 1048576 B",
        "  1. reduce_scatter(sum) over front: P(sum):front -> (front), local (4096, 64) -> (2048, 64), 524288 B",
        "  2. transfer: (front) on [front=2: ranks 0-1] -> (back) on [back=2: ranks 2-3], local (2048, 64) -> (2048, 64), "
        "524288 B",
    ]


# -- what is run ------------------------------------------------------------------------------------------------------


def there_and_back() -> list[tuple[dict[str, int], int]]:
    value, weight = normal(6, 5), normal(6, 5, seed=1)
    seen = []
    for src, dst in (
        (FRONT("front"), BACK(None, "back")),
        (FRONT("front"), LINE("x")),
        (LINE(None, "x"), FRONT("front")),
        (SQUARE("dp", "tp"), LINE("x")),
        (SQUARE(Shard(0), Partial()), BACK("back")),
        (FRONT(RaggedShard((2, 1))), BACK(RaggedShard((1, 2)))),
    ):
        x = lay(value, src.gradient)
        if src.partials and x.local_shape != (0,):
            x = x.redistribute(src)
        y = x.redistribute(dst)
        x.retain_grad()
        assert torch.equal(y.to_local().detach(), own_part(value, dst)), (src, dst)
        with record_collectives() as log:
            if dst.mesh.get_coordinate() is None:
                assert y.local_shape == (0,)
                y.backward()
            else:
                (y.square() * lay(weight, dst, grad=False)).sum().backward()
        assert x.grad.layout is src.gradient
        torch.testing.assert_close(x.grad.to_local(), own_part(2 * value * weight, src.gradient))
        seen.append((dict(log.counts), log.nbytes))
    return seen


def test_values_and_gradients_take_the_way_there_and_back() -> None:
    seen = run_ranks(4, there_and_back)
    # the first pair: each rank of the back sends half of its columns to each rank of the front
    assert [ways[0][0] for ways in seen] == [{"recv": 2}] * 2 + [{"send": 2}] * 2
    assert [ways[0][1] for ways in seen] == [0, 0, 6 * 3 * 8, 6 * 2 * 8]


def a_chain_of_stages() -> None:
    """Two stages on disjoint ranks: every rank runs the same script, and only members compute."""
    x, up, down = normal(4, 6), normal(8, 6, seed=1), normal(6, 8, seed=2)
    dense = [tensor.clone().requires_grad_() for tensor in (x, up, down)]
    torch.nn.functional.linear(torch.nn.functional.linear(dense[0], dense[1]), dense[2]).square().sum().backward()
    in_front = FRONT.mesh.get_coordinate() is not None
    mine = [lay(x, FRONT(None, None)), lay(up, FRONT("front")), lay(down, BACK(None, "back"))]
    hidden = torch.nn.functional.linear(mine[0], mine[1]) if in_front else lay(normal(4, 8), FRONT(None, "front"))
    arrived = hidden.redistribute(BACK(None, "back"))
    if in_front:
        arrived.backward()
    else:
        torch.nn.functional.linear(arrived, mine[2]).square().sum().backward()
    for tensor, expected in zip(mine, dense, strict=True):
        if tensor.device_mesh.get_coordinate() is not None:
            torch.testing.assert_close(tensor.grad.full_tensor(), expected.grad)


def test_a_chain_of_stages_trains_as_the_dense_model() -> None:
    run_ranks(4, a_chain_of_stages)


def varying_use() -> None:
    """Two uses that each give a contribution: their sum goes back once, along the way that all ranks know."""
    src, value = FRONT(RaggedShard((3, 1))), normal(512, 512)
    contributions = plan_redistribute(BACK(Partial()), src, (512, 512), 8)
    assert contributions.steps[-1] != plan_redistribute(BACK(), src, (512, 512), 8).steps[-1]  # so it matters
    x = lay(value, src)
    arrived = x.redistribute(BACK())
    if get_rank() < 2:
        arrived.backward()
    else:
        up, gate = (lay(normal(8, 512, seed=seed), BACK("back")) for seed in (1, 2))
        linear = torch.nn.functional.linear
        (linear(arrived, up) * linear(arrived, gate)).sum().backward()
    dense = value.clone().requires_grad_()
    (dense @ normal(8, 512, seed=1).T * (dense @ normal(8, 512, seed=2).T)).sum().backward()
    torch.testing.assert_close(x.grad.to_local(), own_part(dense.grad, src))  # type: ignore[arg-type]


def test_contributions_are_summed_before_they_go_back() -> None:
    run_ranks(4, varying_use, timeout=30)


def wide_gradient() -> list[str]:
    x = lay(torch.ones(4).bfloat16(), FRONT("front"))
    y = x.redistribute(BACK("back"), backward_dtype=torch.float32)
    with record_collectives() as log:
        if get_rank() < 2:
            y.backward()
        else:
            (y * 3).sum().backward()
    assert x.grad.dtype is torch.bfloat16
    assert x.grad.to_local().tolist() == ([3.0, 3.0] if get_rank() < 2 else [])
    return [record.dtype for record in log]


def test_the_gradient_travels_in_the_dtype_asked_for() -> None:
    assert run_ranks(4, wide_gradient) == [["float32"]] * 4


def cached() -> None:
    x = lay(torch.ones(4), FRONT("front"), grad=False)
    x.redistribute(BACK("back"))
    before = redistribute_cache_info()
    for _ in range(3):
        x.redistribute(Layout((2,), ("back",), (2, 3))("back"))
    after = redistribute_cache_info()
    assert (after.hits - before.hits, after.misses) == (3, before.misses)


def test_the_second_time_is_found_in_the_cache() -> None:
    run_ranks(4, cached)


def overlapping_groups() -> None:
    """Rank 0 has made three groups, rank 3 none, when both are to make one together."""
    value = torch.arange(6.0)
    for ranks in ((0, 1), (0, 2)):
        if get_rank() in ranks:
            part = distribute_tensor(value, Layout((2,), ("x",), ranks)("x"), src_data_rank=None)
            assert torch.equal(part.full_tensor(), value)
    if get_rank() != 1:
        three = distribute_tensor(value, Layout((3,), ("x",), (0, 2, 3))("x"), src_data_rank=None)
        assert torch.equal(three.full_tensor(), value)


def test_members_that_made_different_numbers_of_groups_meet() -> None:
    run_ranks(4, overlapping_groups, timeout=30)


# -- what is refused --------------------------------------------------------------------------------------------------


def outside() -> str:
    x = lay(torch.ones(4), FRONT("front"), grad=False)
    assert torch.equal(x.redistribute(LINE()).to_local(), torch.ones(4))
    if get_rank() < 2:
        return ""
    with pytest.raises(MeshError, match="not part of") as error:
        x.full_tensor()
    with pytest.raises(LayoutError, match="is outside of"):
        DTensor.from_local(torch.ones(2), FRONT("front"), shape=(4,))
    with pytest.raises(LayoutError, match="global shape="):
        DTensor.from_local(torch.empty(0), FRONT("front"))
    return str(error.value)


def test_a_rank_outside_of_the_mesh_has_no_values() -> None:
    told = run_ranks(4, outside)
    assert "rank 3 is not part of DeviceMesh(front=2)" in told[3]


def strange(which: str) -> None:
    x = lay(torch.ones(4, 3), FRONT("front"))
    if which == "dim":
        x.redistribute(BACK.mesh, [Shard(2)])
    elif which == "shares":
        x.redistribute(BACK(RaggedShard((1, 2))))
    elif which == "mixed":
        x.redistribute(SQUARE(Partial(), Partial("max")))
    else:
        x.redistribute(BACK.mesh, [Shard(0), Shard(1)])


@pytest.mark.parametrize("which", ["dim", "shares", "mixed", "count"])
def test_what_cannot_be_is_refused_alike_on_all_ranks(which: str) -> None:
    assert_same_error(4, strange, (LayoutError, ShardingRuleError), "", which)
