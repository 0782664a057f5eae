"""The optimizers on modules that `fully_shard` has sharded: equal to dense, one tensor per unit, no needless messages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hp_core import init_device_mesh
from hp_core.testing import record_collectives, run_ranks
from hp_fsdp import fully_shard
from hp_fsdp.optim import AdamW, get_hyper_optimizer


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16), nn.LayerNorm(16))


def train(kind: str, granularity: str) -> tuple[int, list[int]]:
    torch.manual_seed(0)
    dense = nn.Sequential(*[block() for _ in range(3)]).double()  # Adam blows up the rounding of gradients near zero
    model = copy.deepcopy(dense)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for one in (*model, model):
        fully_shard(one, mesh=mesh, shard_granularity=lambda _, param: granularity if param.dim() > 1 else "element")
    optimizers = [
        AdamW(each.parameters(), lr=0.01)
        if kind == "adamw"
        else get_hyper_optimizer(each, muon_kwargs={"lr": 0.05, "ns_dtype": "float64"}, adamw_kwargs={"lr": 0.01})
        for each in (model, dense)
    ]
    rank = mesh.get_local_rank()
    for step in range(4):
        batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        for each, rows, optimizer in zip(
            (dense, model), (batch, batch[4 * rank :][:4]), reversed(optimizers), strict=True
        ):
            optimizer.zero_grad()
            each(rows).square().mean().backward()
            with record_collectives() as log:
                optimizer.step()
    for param, expected in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(param.detach().full_tensor(), expected.detach(), rtol=1e-8, atol=1e-9)  # type: ignore[operator]
    mine: Any = optimizers[0]
    runs = [run for group in mine._groups.values() for run in group.runs] if kind == "adamw" else []
    return len(log), [run.flat.numel() for run in runs if run.flat.numel()]


@pytest.mark.parametrize(
    ("kind", "granularity", "messages"), [("adamw", "element", 0), ("hyper", "element", 2), ("hyper", "whole", 0)]
)
def test_four_steps_equal_dense(kind: str, granularity: str, messages: int) -> None:
    for sent, runs in run_ranks(2, train, kind, granularity):
        assert sent == messages
        assert kind != "adamw" or len(runs) == 3, "one for each unit"
