"""Mistakes: each gives the same error on all ranks, before anything is communicated, and nothing hangs.

A mistake is one line: what it is, the call, the type of the error, and words that the message must hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hp_core import (
    ColwiseParallel,
    DTensor,
    Layout,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    parallelize_module,
    randn,
    zeros,
)
from hp_core.errors import HyperParallelError, LayoutError, MeshError, PlanError, ShardingRuleError
from hp_core.testing import record_collectives, run_ranks


class World:
    """What the mistakes are made with, on this rank."""

    def __init__(self) -> None:
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.layout = Layout.from_device_mesh(self.mesh)
        self.x = self.lay(torch.ones(4, 6), Shard(0), Replicate())
        self.y = self.lay(torch.ones(4, 6), Replicate(), Shard(1))
        self.ids = self.lay(torch.arange(4), Shard(0), Replicate())
        self.pending = DTensor.from_local(torch.ones(4, 6), self.mesh, [Partial(), Replicate()])

    def lay(self, value: torch.Tensor, *placements: Any) -> Any:
        return distribute_tensor(value, self.mesh, placements, src_data_rank=None)


Mistake = tuple[str, Callable[[World], Any], type[Exception], str]

LAYOUTS: list[Mistake] = [
    (
        "a shard of a dim that isn't there",
        lambda w: w.lay(torch.ones(4, 6), Shard(2), Replicate()),
        LayoutError,
        "2 dims",
    ),
    (
        "a negative dim out of range",
        lambda w: w.lay(torch.ones(4, 6), Shard(-3), Replicate()),
        HyperParallelError,
        "-3",
    ),
    ("an unknown axis", lambda w: w.layout("pp"), LayoutError, "no mesh axis 'pp'"),
    ("an axis used twice", lambda w: w.layout("tp", "tp"), LayoutError, "tp"),
    ("too few placements", lambda w: w.lay(torch.ones(4, 6), Shard(0)), LayoutError, "placement"),
    ("too many placements", lambda w: w.x.redistribute(w.mesh, [Shard(0)] * 3), LayoutError, "placement"),
    ("placements and names mixed", lambda w: w.layout(Shard(0), "tp"), LayoutError, "tp"),
    ("an unknown reduction", lambda w: Partial("median"), HyperParallelError, "median"),
    ("two kinds of pending reductions", lambda w: w.layout(Partial("sum"), Partial("max")), LayoutError, "max"),
    ("ragged shares for fewer ranks", lambda w: w.layout(RaggedShard((1, 2, 3)), Replicate()), LayoutError, "3"),
    (
        "ragged shares that don't divide",
        lambda w: w.lay(torch.ones(4), RaggedShard((1, 2)), Replicate()),
        LayoutError,
        "divide",
    ),
    (
        "a local tensor of another shape",
        lambda w: DTensor.from_local(torch.ones(3, 6), w.layout("dp"), shape=(4, 6)),
        LayoutError,
        "(2, 6)",
    ),
    ("a DTensor as a local tensor", lambda w: DTensor.from_local(w.x, w.layout("dp")), LayoutError, "plain tensor"),
    ("a DTensor distributed again", lambda w: distribute_tensor(w.x, w.layout("tp")), LayoutError, "redistribute"),
    (
        "a source rank outside of the mesh",
        lambda w: distribute_tensor(torch.ones(4), w.layout("tp"), src_data_rank=7),
        LayoutError,
        "src_data_rank=7",
    ),
    ("a gradient laid out otherwise", lambda w: setattr(w.x, "grad", w.y), LayoutError, "law of gradients"),
    ("a gradient that is plain", lambda w: setattr(w.x, "grad", torch.ones(4, 6)), LayoutError, "must be a DTensor"),
    ("a write to a pending sum", lambda w: w.pending.add_(1.0), ShardingRuleError, "redistribute it first"),
    ("a size no tensor has", lambda w: zeros(4, -1, device_mesh=w.mesh), HyperParallelError, "-1"),
]

MESHES: list[Mistake] = [
    ("a mesh larger than the world", lambda w: init_device_mesh("cpu", (8,), mesh_dim_names=("tp",)), MeshError, "8"),
    ("a rank twice", lambda w: init_device_mesh("cpu", (2,), mesh_dim_names=("tp",), rank_list=(0, 0)), MeshError, "0"),
    ("an axis name twice", lambda w: init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "tp")), MeshError, "tp"),
    ("an axis the mesh doesn't have", lambda w: w.mesh["cp"], MeshError, "cp"),
    (
        "an unknown device",
        lambda w: init_device_mesh("abacus", (4,), mesh_dim_names=("tp",)),
        HyperParallelError,
        "abacus",
    ),
    (
        "operands on different meshes",
        lambda w: (
            w.x
            + distribute_tensor(
                torch.ones(4, 6),
                init_device_mesh("cpu", (4,), mesh_dim_names=("all",)),
                [Replicate()],
                src_data_rank=None,
            )
        ),
        ShardingRuleError,
        "different meshes",
    ),
    ("a plain tensor among DTensors", lambda w: w.x + torch.ones(4, 6), LayoutError, "plain tensor"),
    (
        "a pattern that matches nothing",
        lambda w: parallelize_module(nn.Sequential(nn.Linear(4, 4)), w.mesh["tp"], {"1": ColwiseParallel()}),
        PlanError,
        "'1'",
    ),
]

DTYPES: list[Mistake] = [
    ("a product of two dtypes", lambda w: w.x @ w.y.double().t(), RuntimeError, "dtype"),
    ("a linear of two dtypes", lambda w: F.linear(w.x, w.y.half()), RuntimeError, "dtype"),
    ("a float result written to integers", lambda w: w.ids.add_(0.5), RuntimeError, "not possible"),
    ("a mean of integers", lambda w: w.ids.mean(), RuntimeError, "dtype"),
    ("float indices of an embedding", lambda w: F.embedding(w.x, w.y), RuntimeError, "indices"),
    ("float indices to select by", lambda w: w.y.index_select(0, w.x[:, 0]), RuntimeError, "index"),
    ("bitwise ops of floats", lambda w: w.x & w.y, RuntimeError, "bitwise"),
    ("integer noise", lambda w: randn(4, device_mesh=w.mesh, dtype=torch.int64), LayoutError, "floating point"),
    (
        "integer logits",
        lambda w: F.cross_entropy(w.lay(torch.ones(4, 6, dtype=torch.int64), Shard(0), Replicate()), w.ids),
        (RuntimeError),
        "Long",
    ),
]

DEVICES: list[Mistake] = [
    (
        "a local tensor on another device than the mesh",
        lambda w: DTensor.from_local(
            torch.ones(4), init_device_mesh("cuda", (4,), mesh_dim_names=("gpu",)), [Shard(0)]
        ),
        LayoutError,
        "'cpu'",
    ),
    (
        "one mesh on two devices",
        lambda w: init_device_mesh("npu", (2, 2), mesh_dim_names=("dp", "tp")),
        MeshError,
        "can't also be on 'npu'",
    ),
    ("a device that isn't there", lambda w: torch.zeros_like(w.x, device="cuda"), Exception, "CUDA"),
]

SHAPES: list[Mistake] = [
    (
        "shapes that don't broadcast",
        lambda w: w.x + w.lay(torch.ones(5, 6), Shard(0), Replicate()),
        ShardingRuleError,
        "don't broadcast",
    ),
    ("a product that doesn't fit", lambda w: w.x @ w.y, ShardingRuleError, "contracted dims"),
    (
        "a linear that doesn't fit",
        lambda w: F.linear(w.x, w.lay(torch.ones(3, 5), Shard(0), Replicate())),
        ShardingRuleError,
        "contracted dims",
    ),
    (
        "a bias that doesn't fit",
        lambda w: F.linear(w.x, w.y, w.lay(torch.ones(5), Replicate(), Replicate())),
        ShardingRuleError,
        "don't fit",
    ),
    ("a view of another size", lambda w: w.x.view(5, 5), ShardingRuleError, "(5, 5)"),
    ("a reshape with two unknowns", lambda w: w.x.reshape(-1, -1), ShardingRuleError, "(-1, -1)"),
    ("an expand of a dim that isn't one", lambda w: w.x.expand(5, 6), ShardingRuleError, "can't become 5"),
    ("a sum over a dim out of range", lambda w: w.x.sum(2), (IndexError, ShardingRuleError), "out of range"),
    ("a softmax over a dim out of range", lambda w: w.x.softmax(5), (IndexError, ShardingRuleError), "out of range"),
    (
        "a transpose of dims out of range",
        lambda w: w.x.transpose(0, 4),
        (IndexError, ShardingRuleError),
        "out of range",
    ),
    ("a permutation that repeats", lambda w: w.x.permute(0, 0), (RuntimeError, ShardingRuleError), "permute"),
    ("too many indices", lambda w: w.x[0, 0, 0], (IndexError, ShardingRuleError), "too many"),
    ("an index out of range", lambda w: w.x[7], IndexError, "7"),
    (
        "a cat of pieces that don't fit",
        lambda w: torch.cat([w.x, w.lay(torch.ones(4, 5), Shard(0), Replicate())]),
        (RuntimeError, ShardingRuleError),
        "5",
    ),
    ("a stack of different shapes", lambda w: torch.stack([w.x, w.ids]), (RuntimeError, ShardingRuleError), "(4,)"),
    ("a split that doesn't add up", lambda w: w.x.split([1, 2]), (RuntimeError, ShardingRuleError), "split"),
    ("a top-k of more than there is", lambda w: w.x.topk(9, 0), (RuntimeError, ShardingRuleError), "range"),
    ("a gather of other dims", lambda w: w.x.gather(0, w.ids), (RuntimeError, ShardingRuleError), "gather"),
    ("a norm of other dims", lambda w: F.layer_norm(w.x, (5,)), (RuntimeError, ShardingRuleError), "normalized_shape"),
    (
        "targets of another batch",
        lambda w: F.cross_entropy(w.x, w.lay(torch.arange(3), Replicate(), Replicate())),
        (RuntimeError, ValueError, ShardingRuleError),
        "3",
    ),
    ("an einsum of other dims", lambda w: torch.einsum("ab,bc->ac", w.x, w.y), (RuntimeError, ShardingRuleError), "6"),
    (
        "heads that don't group",
        lambda w: F.scaled_dot_product_attention(
            *[w.lay(torch.ones(1, n, 4, 2), Replicate(), Replicate()) for n in (3, 2, 2)], enable_gqa=True
        ),
        (RuntimeError, ShardingRuleError),
        "3",
    ),
    (
        "an in-place op that would grow",
        lambda w: w.ids.add_(w.lay(torch.ones(3, 4, dtype=torch.int64), Replicate(), Replicate())),
        (RuntimeError, ShardingRuleError),
        "shape",
    ),
    ("an out= of another shape", lambda w: torch.add(w.x, w.y, out=w.ids), ShardingRuleError, "out="),
]

MISTAKES = {"layouts": LAYOUTS, "meshes": MESHES, "dtypes": DTYPES, "devices": DEVICES, "shapes": SHAPES}


def make(mistakes: list[Mistake]) -> list[tuple[str, str, str]]:
    """Make all of them on this rank; returns what each raised and said, with its fault if it has one."""
    world = World()
    found = []
    for name, call, kind, words in mistakes:
        fault = ""
        with record_collectives() as log:
            try:
                call(world)
            except Exception as error:
                said = re.sub(r"rank \d+", "rank N", str(error))
                raised = type(error).__name__
                if not isinstance(error, kind):
                    fault = f"raised {raised}"
                if words not in said:
                    fault += f"; doesn't say {words!r}"
            else:
                raised, said, fault = "", "", "raised nothing"
        if log:
            fault += f"; communicated before: {log.summary()}"
        found.append((f"{name}: {fault.lstrip('; ')}" if fault else "", raised, said))
    return found


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_told_alike_on_all_ranks_before_anything_moves(kind: str) -> None:
    first, *others = run_ranks(4, make, MISTAKES[kind], timeout=60)
    faults = [f"{fault} ({raised}: {said})" for fault, raised, said in first if fault]
    for rank, found in enumerate(others, 1):
        faults += [
            f"rank {rank} differs: {here} for {there}"
            for here, there in zip(found, first, strict=True)
            if here != there
        ]
    assert not faults, "\n".join(faults)


def test_there_are_many() -> None:
    assert sum(map(len, MISTAKES.values())) >= 30
