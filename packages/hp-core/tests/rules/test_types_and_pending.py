"""Elementwise ops on tensors of different types, and on those that wait for a reduction: what is kept pending, what is not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from hp_core import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_core.errors import ShardingRuleError
from hp_core.testing import assert_same_error, record_collectives, run_ranks


def promoted(dtypes: dict[str, list[torch.dtype]]) -> list[str]:
    """Which promotions differ from dense: two tensors, a tensor and a 0-d one, a tensor and a Python number."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    functions = {
        "add": torch.add,
        "mul": torch.mul,
        "div": torch.true_divide,
        "pow": torch.pow,
        "where": lambda x, y: (
            torch.where(distribute_tensor(torch.ones(4).bool(), mesh, [Shard(0)]), x, y)
            if isinstance(x, DTensor) or isinstance(y, DTensor)
            else torch.where(torch.ones(4).bool(), x, y)
        ),
        "eq": torch.eq,
        "maximum": torch.maximum,
        "remainder": torch.remainder,
    }
    faults = []
    for left, right, shape, (name, function) in product(dtypes["left"], dtypes["right"], [(4,), ()], functions.items()):
        values = torch.tensor([1, 1, 1, 1]).to(left), torch.ones(shape).to(right)
        try:
            expected = function(*values)
        except RuntimeError:
            continue
        placed = [
            distribute_tensor(value, mesh, [Shard(0) if value.dim() else Replicate()], src_data_rank=None)
            for value in values
        ]
        result = function(*placed)
        if result.dtype != expected.dtype or not torch.equal(result.full_tensor(), expected):
            faults.append(f"{name} {left} {right} {shape}: {result.dtype} for {expected.dtype}")
    for left, number, (name, function) in product(dtypes["left"], [True, 2, 2.5], list(functions.items())[:3]):
        value = torch.ones(4).to(left)
        expected = function(value, number)
        result = function(distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None), number)
        if result.dtype != expected.dtype or not torch.equal(result.full_tensor(), expected):
            faults.append(f"{name} {left} {number}: {result.dtype} for {expected.dtype}")
    return faults


def test_types_are_promoted_as_dense_ones() -> None:
    dtypes = [torch.bool, torch.uint8, torch.int32, torch.int64, torch.bfloat16, torch.float32, torch.float64]
    assert run_ranks(2, promoted, {"left": dtypes, "right": dtypes}) == [[], []]


PENDING: dict[str, tuple[Callable[[Any, Any], Any], bool, int]] = {
    "cast upward": (lambda x, _: x.bfloat16().float(), True, 0),
    "cast to the same": (lambda x, _: x.float(), True, 0),
    "cast to double": (lambda x, _: x.double(), True, 0),
    "cast to int": (lambda x, _: x.int(), False, 1),
    "cast down": (lambda x, _: x.bfloat16(), False, 1),
    "times a number": (lambda x, _: x * 3, True, 0),
    "divided by a number": (lambda x, _: x / 4, True, 0),
    "negated": (lambda x, _: -x, True, 0),
    "plus a number": (lambda x, _: x + 2, False, 1),
    "plus replicated": (lambda x, y: x + y, True, 0),
    "minus replicated": (lambda x, y: x - y, True, 0),
    "replicated minus": (lambda x, y: y - x, True, 0),
    "times replicated": (lambda x, y: x * y, True, 0),
    "divided by replicated": (lambda x, y: x / y, True, 0),
    "squared": (lambda x, _: x * x, True, 1),  # one of the two is summed
    "exponential": (lambda x, _: x.exp(), False, 1),
    "plus itself": (lambda x, _: x + x, True, 0),
    "halfway to replicated": (lambda x, y: torch.lerp(x, y, 0.5), True, 0),
    "chosen from replicated": (lambda x, y: torch.where((y > 1).detach(), x, y), True, 0),
}


def pending_results() -> dict[str, tuple[bool, int, float]]:
    """For each op whether the sum is still pending, how many messages went, and the largest error."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = torch.tensor([0.5, -2.0, 3.25, 1.0])
    other = torch.tensor([1.5, 2.0, 0.5, 1.25])
    found = {}
    for name, (function, _, _) in PENDING.items():
        part = whole * (3 if mesh.get_local_rank("tp") == 0 else -2)
        x = DTensor.from_local(part, mesh, [Partial()])
        y = distribute_tensor(other, mesh, [Replicate()])
        if name == "cast upward":
            x = DTensor.from_local(part.bfloat16(), mesh, [Partial()])
        with record_collectives() as log:
            result = x.float() if name == "cast upward" else function(x, y)
        expected = function(whole, other)
        error = (result.full_tensor().double() - expected.double()).abs().max().item()
        found[name] = (result.is_partial(), len(log), error)
    return found


def test_linear_ops_keep_a_pending_sum_and_others_reduce_it_once() -> None:
    """Public reports, case 15 (a cast upward communicates nothing) and case 14 (a cast to int reduces first)."""
    for found in run_ranks(2, pending_results):
        for name, (_, pending, messages) in PENDING.items():
            assert found[name][:2] == (pending, messages), name
            assert found[name][2] < 1e-6, name


def test_a_cast_upward_keeps_a_pending_maximum() -> None:
    def cast() -> tuple[bool, int, list[float]]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = DTensor.from_local(
            torch.tensor([1.0, 5.0]).roll(mesh.get_local_rank("tp")).bfloat16(), mesh, [Partial("max")]
        )
        with record_collectives() as log:
            result = x.float()
        return result.is_partial(), len(log), result.full_tensor().tolist()

    assert run_ranks(2, cast) == [(True, 0, [5.0, 5.0])] * 2


@pytest.mark.parametrize("op", ["add", "sub", "copy_", "lerp", "where"])
def test_pending_reductions_of_different_kinds_are_refused(op: str) -> None:
    def mixed() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = DTensor.from_local(torch.ones(4), mesh, [Partial("sum")])
        y = DTensor.from_local(torch.ones(4), mesh, [Partial("max")])
        if op == "lerp":
            torch.lerp(x, y, 0.5)
        elif op == "where":
            torch.where(distribute_tensor(torch.ones(4).bool(), mesh, [Replicate()]), x, y)
        else:
            getattr(x, op)(y)

    assert_same_error(2, mixed, ShardingRuleError, "wait for different reductions.*reduce_partial")


def test_ops_that_need_final_values_reduce_every_kind() -> None:
    def multiplied() -> list[float]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = DTensor.from_local(torch.ones(2), mesh, [Partial("sum")])
        y = DTensor.from_local(torch.full((2,), 3.0), mesh, [Partial("max")])
        return [*(x * y).full_tensor().tolist(), *torch.maximum(x, y).full_tensor().tolist()]

    assert run_ranks(2, multiplied) == [[6.0, 6.0, 3.0, 3.0]] * 2
