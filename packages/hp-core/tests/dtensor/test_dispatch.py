"""Dispatch: the cache of plans and its keys, ops without a rule, rules of users, and running without dispatch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_core import DTensor, Layout, Partial, Replicate, Shard, SkipDTensorDispatch, distribute_tensor, init_device_mesh
from hp_core.dtensor.dispatch import dispatch_cache_clear, dispatch_cache_info
from hp_core.errors import ShardingRuleError
from hp_core.rules.registry import register_sharding_rule
from hp_core.rules.rule import FACTOR, OpCall, Operand, Output, Strategy, solve
from hp_core.testing import assert_same_error, record_collectives, run_ranks

VALUE = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def mesh2() -> Any:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def lay(value: torch.Tensor, *placements: Any) -> Any:
    return distribute_tensor(value, mesh2(), placements, src_data_rank=None)


def misses(function: Callable[[], Any]) -> int:
    before = dispatch_cache_info().misses
    function()
    return dispatch_cache_info().misses - before


def second_calls() -> None:
    x, y, index = lay(VALUE, Shard(0)), lay(VALUE, Shard(1)), lay(torch.tensor([0, 2]), Replicate())
    calls: list[Callable[[], Any]] = [
        lambda: x + y,
        lambda: x * 2,
        lambda: torch.stack([x, y]),
        lambda: torch.cat((x, y), dim=1),
        lambda: x.view(-1),
        lambda: x[0, 1:3],
        lambda: x.split([1, 3]),
        lambda: x.to(torch.float32),
        lambda: x.sum(dim=0, keepdim=True),
        lambda: F.layer_norm(x, (6,)),
        lambda: torch.einsum("ij,kj->ik", x, y),
        lambda: torch.linalg.vector_norm(x),
        lambda: F.cross_entropy(x, lay(torch.zeros(4, dtype=torch.int64), Shard(0))),
        lambda: x.index_select(0, index),
        lambda: x.clone().add_(y, alpha=2),
        lambda: torch._foreach_mul([x, y], 2.0),
    ]
    dispatch_cache_clear()
    for number, call in enumerate(calls):
        assert misses(call) > 0, number
        assert misses(call) == 0, number
        assert misses(call) == 0, number


def test_the_second_call_of_a_kind_plans_nothing() -> None:
    run_ranks(2, second_calls)


def changing_numbers() -> None:
    x, y = lay(VALUE, Shard(0)), lay(VALUE, Shard(0))
    others = [lay(VALUE, Shard(0)).add_(1) for _ in range(2)]

    def step(rate: float) -> None:
        x.add_(y, alpha=rate)
        x.mul_(rate)
        torch.add(x, rate)
        x.clamp(min=rate)
        torch._foreach_add_(others, [y, y], alpha=rate)
        torch._foreach_mul_(others, rate)

    step(0.5)
    assert misses(lambda: step(0.25)) == 0
    x * 0.5
    new_layout = Layout((2,), ("tp",))(Shard(0))
    assert misses(lambda: DTensor.from_local(x.to_local(), new_layout) * 0.125) == 0


def test_a_changing_step_size_or_an_equal_new_layout_does_not_miss() -> None:
    run_ranks(2, changing_numbers)


def look_alikes() -> None:
    x = lay(VALUE, Shard(0))
    dispatch_cache_clear()
    pairs: list[tuple[Callable[[Any], Any], Callable[[Any], Any]]] = [
        (lambda t: t.sum(0), lambda t: t.sum(1)),
        (lambda t: t.sum(0), lambda t: t.sum(0, True)),
        (lambda t: t.sum(dim=1), lambda t: t.sum(1, keepdim=True)),
        (lambda t: t.select(0, 0), lambda t: t.select(0, 1)),
        (lambda t: t[0], lambda t: t[0:1]),
        (lambda t: t[1], lambda t: t[:, 1]),
        (lambda t: t.view(2, 12), lambda t: t.view(12, 2)),
        (lambda t: t.sort(descending=False)[0], lambda t: t.sort(descending=True)[0]),
        (lambda t: t.std(0, correction=1), lambda t: t.std(0, correction=0)),
        (lambda t: t.transpose(0, 1), lambda t: t.transpose(1, 1)),
        (lambda t: t.std(0, True), lambda t: t.std(0, False)),
        (lambda t: t.squeeze(1), lambda t: t.unsqueeze(1)),
        (lambda t: torch.stack([t, t]), lambda t: torch.stack([t, t], 1)),
        (lambda t: torch.cat([t, t]), lambda t: torch.cat([t, t, t])),
        (lambda t: t.norm(2), lambda t: t.norm(3.0)),
        (lambda t: t.norm(2.0), lambda t: t.norm(1.0)),
        (lambda t: t.sum(True), lambda t: t.sum(1)),
        (lambda t: t.sum(False), lambda t: t.sum(0)),
        (lambda t: t * 1, lambda t: t * True),
        (lambda t: t + 1, lambda t: t + 1.0),
        (lambda t: t.long() + 1, lambda t: t.long() + 1.0),
        (lambda t: t.long() * 1, lambda t: t.long() * True),
        (lambda t: (t > 0) + 1, lambda t: (t > 0) + True),
        (lambda t: t.to(torch.float32), lambda t: t.to(torch.float16)),
        (lambda t: t.round(decimals=0), lambda t: t.round(decimals=1)),
    ]  # fmt: skip
    for number, pair in enumerate(pairs):
        for function in (*pair, *pair):
            try:
                expected = function(VALUE)
            except TypeError:
                continue
            got = function(x)
            assert got.dtype is expected.dtype, number
            assert got.shape == expected.shape, number
            torch.testing.assert_close(got.full_tensor(), expected, msg=str(number))


def test_calls_that_look_alike_are_told_apart() -> None:
    run_ranks(2, look_alikes)


def by_shape_and_dtype() -> None:
    for value in (VALUE, VALUE[:3], VALUE.float(), VALUE[:, :5], VALUE.T.contiguous()):
        for placement in (Shard(0), Shard(1), Replicate(), Partial()):
            x = DTensor.from_local(value / 2, mesh2(), [placement]) if placement == Partial() else lay(value, placement)
            result = x.mean(0) * x.shape[0]
            torch.testing.assert_close(result.full_tensor(), value.sum(0))
            assert result.dtype is value.dtype


def test_shapes_layouts_and_dtypes_are_told_apart() -> None:
    run_ranks(2, by_shape_and_dtype)


def falls_back() -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hp_core")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        x = lay(VALUE, Shard(0)).requires_grad_()
        dense = VALUE.clone().requires_grad_()
        for _ in range(2):
            result = torch.diff(x, dim=1)
            assert isinstance(result, DTensor)
            assert result.layout is x.layout
            expected = torch.diff(dense, dim=1)
            torch.testing.assert_close(result.full_tensor(), expected)
            result.square().sum().backward()
            expected.square().sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), dense.grad)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return messages


def test_an_op_without_a_rule_runs_as_torchs_own_and_says_so_once() -> None:
    for messages in run_ranks(2, falls_back):
        assert len(messages) == 1
        assert "diff" in messages[0]
        assert "framework's own distributed op" in messages[0]


def no_rule() -> None:
    torch.histogram(lay(torch.arange(4.0), Shard(0)), 3)


def test_an_op_without_any_rule_names_op_layouts_and_remedy() -> None:
    for message in assert_same_error(2, no_rule, ShardingRuleError, "histogram has no sharding rule"):
        assert "(4,) Layout[tp=2](tp)" in message
        assert "register_sharding_rule" in message


def own_op() -> None:
    @torch.library.custom_op("hp_core_tests::scaled_rows", mutates_args=())
    def op(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    def keep_factor(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]

    op.register_autograd(lambda ctx, gradient: (gradient * ctx.factor, None), setup_context=keep_factor)

    @register_sharding_rule(op, "x factor")
    def rule(call: OpCall) -> Strategy:
        x = call.spec("x")
        labels = tuple(range(x.ndim))
        return solve([Operand(x, labels, FACTOR)], [Output(labels)])

    for placement in (Replicate(), Shard(0), Shard(1)):
        x = lay(VALUE, placement).requires_grad_()
        result = op(x, 2.5)
        assert result.layout is x.layout
        torch.testing.assert_close(result.full_tensor(), VALUE * 2.5)
        result.sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), torch.full_like(VALUE, 2.5))
    with record_collectives() as log:
        pending = op(DTensor.from_local(VALUE, mesh2(), [Partial()]), 2.5)
    assert pending.is_partial()
    assert not log
    assert misses(lambda: op(x, 3.5)) == 0
    packet = vars(torch)["ops"].hp_core_tests.scaled_rows
    torch.testing.assert_close(packet(x, 2.5).full_tensor().detach(), VALUE * 2.5)
    torch.testing.assert_close(packet.default(x, 2.5).full_tensor().detach(), VALUE * 2.5)


def own_rule_by_name() -> None:
    @register_sharding_rule("trapezoid", "y")
    def rule(call: OpCall) -> Strategy:
        return solve([Operand(call.specs[0], ("rows", None))], [Output(("rows",))])

    x = lay(VALUE, Shard(0))
    result = torch.trapezoid(x)
    assert result.layout is x.layout
    torch.testing.assert_close(result.full_tensor(), torch.trapezoid(VALUE))


def wrong_rule() -> None:
    @register_sharding_rule("cumulative_trapezoid", "y")
    def rule(call: OpCall) -> Strategy:
        return solve([Operand(call.specs[0], ("rows", "columns"))], [Output(("rows", "columns"))])

    torch.cumulative_trapezoid(lay(VALUE, Shard(1)))


def test_a_rule_that_gives_another_shape_than_the_op_is_refused() -> None:
    assert_same_error(2, wrong_rule, ShardingRuleError, "the sharding rule of cumulative_trapezoid gives")


def storm() -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hp_core")
    logger.addHandler(handler)
    try:
        dispatch_cache_clear()
        x = lay(VALUE, Replicate())
        for step in range(300):
            x.roll(step, 0)
        for step in range(300):
            x * float(step)
    finally:
        logger.removeHandler(handler)
        dispatch_cache_clear()
    return messages


def test_a_storm_of_misses_is_told_once_with_what_differs() -> None:
    for messages in run_ranks(2, storm):
        [message] = messages
        assert "roll has missed the cache of op plans 256 times" in message
        assert "254 before, 255 now" in message


def writes_in_place() -> list[str]:
    faults = []
    calls: dict[str, Callable[[Any], Any]] = {
        "cumsum_": lambda t: t.cumsum_(0),
        "cumprod_": lambda t: t.cumprod_(1),
        "tril_": lambda t: t.tril_(),
        "softplus": lambda t: t.mul_(2).cumsum_(1),
    }
    for name, call in calls.items():
        expected = call(VALUE.clone())
        for placement in (Shard(0), Shard(1), Replicate()):
            leaf, dense = lay(VALUE, placement).requires_grad_(), VALUE.clone().requires_grad_()
            target = leaf * 1
            result = call(target)
            if result is not target or target.layout is not leaf.layout:
                faults.append(f"{name} {placement}: another tensor, or laid out {target.layout}")
            if not torch.allclose(target.detach().full_tensor(), expected):
                faults.append(f"{name} {placement}: values")
            target.square().sum().backward()
            call(dense * 1).square().sum().backward()
            if not torch.allclose(leaf.grad.full_tensor(), dense.grad):  # type: ignore[arg-type]
                faults.append(f"{name} {placement}: gradient")
    return faults


def test_an_in_place_op_that_must_move_its_target_writes_it_all_the_same() -> None:
    assert run_ranks(2, writes_in_place) == [[], []]


@pytest.mark.parametrize(
    "call", ["x.apply_(abs)", "x.resize_(2, 2)", "x.transpose_(0, 1)", "x.squeeze_(0)", "x.fill_diagonal_(1.0)"]
)
def test_a_write_that_no_rule_knows_of_is_refused(call: str) -> None:
    assert_same_error(2, refused_write, ShardingRuleError, "in place", call)


def refused_write(call: str) -> None:
    x = lay(VALUE, Shard(0))
    eval(call, {"x": x})


@pytest.mark.parametrize("function", [own_op, own_rule_by_name], ids=lambda f: f.__name__)
def test_rules_of_users(function: Callable[[], None]) -> None:
    run_ranks(2, function)


def skipped() -> None:
    x = lay(VALUE, Shard(0))
    total = x.sum()
    with SkipDTensorDispatch():
        local = x * 2
        assert type(local) is torch.Tensor
        assert torch.equal(local, x.to_local() * 2)
        assert type(x.sum()) is torch.Tensor
        x.add_(1)
        assert torch.equal(x.to_local(), x._local)
    assert isinstance(x * 2, DTensor)
    torch.testing.assert_close(x.sum().item(), total.item() + 24)
    torch.testing.assert_close(x.full_tensor(), VALUE + 1)


def test_dispatch_can_be_skipped() -> None:
    run_ranks(2, skipped)


FALLBACKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pad": lambda x: F.pad(x, (1, 1)),
    "repeat": lambda x: x.repeat(2, 3),
    "diagonal": lambda x: x.diagonal(),
    "tensordot": lambda x: torch.tensordot(x, x, ([0], [0])),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.exp()),
    "diff": lambda x: torch.diff(x, dim=0),
}


def fallbacks_equal_dense() -> list[str]:
    faults = []
    value = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for name, function in FALLBACKS.items():
        dense = value.clone().requires_grad_()
        expected = function(dense)
        expected.square().sum().backward()
        for placement in (Replicate(), Shard(0), Shard(1), Partial()):
            if placement == Partial():
                x = DTensor.from_local(value / 2, mesh2(), [placement]).requires_grad_()
            else:
                x = lay(value, placement).requires_grad_()
            result = function(x)
            result.square().sum().backward()
            if not torch.allclose(result.detach().full_tensor(), expected.detach()):
                faults.append(f"{name} {placement}: values differ")
            if x.grad.layout is not x.layout.gradient or not torch.allclose(x.grad.full_tensor(), dense.grad):  # type: ignore[arg-type]
                faults.append(f"{name} {placement}: gradient differs")
    return faults


def test_fallbacks_on_uneven_pieces_equal_dense() -> None:
    assert run_ranks(2, fallbacks_equal_dense) == [[], []]


def out_and_keywords() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    value = torch.arange(24.0).view(4, 6)
    x = distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)
    target = distribute_tensor(torch.zeros(4, 6), mesh, [Shard(1)], src_data_rank=None)
    for op in (torch.maximum, torch.add, torch.mul):
        assert op(x, x + 1, out=target) is target
        assert target.layout.placements == (Shard(1),)
        assert torch.equal(target.full_tensor(), op(value, value + 1))
    assert torch.equal(torch.transpose(input=x, dim0=0, dim1=1).full_tensor(), value.t())


def test_out_is_written_in_its_own_layout_and_the_first_operand_may_be_named() -> None:
    run_ranks(2, out_and_keywords)


def bad_keyword(which: str) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)], src_data_rank=None)
    if which == "ignored":
        torch.rand_like(x, requires_grad=True)
    elif which == "plain out":
        torch.add(x, x, out=torch.empty(4, 6))
    else:
        torch._foreach_mul_([x[0]], 2.0)


def test_a_keyword_that_would_be_ignored_and_a_write_that_would_be_lost_are_refused() -> None:
    assert_same_error(
        2, bad_keyword, ShardingRuleError, "rand_like on DTensors doesn't take requires_grad=True", "ignored"
    )
    assert_same_error(2, bad_keyword, ShardingRuleError, "out= on DTensors takes one DTensor", "plain out")
    assert_same_error(2, bad_keyword, ShardingRuleError, "would be lost to the tensor", "foreach")
