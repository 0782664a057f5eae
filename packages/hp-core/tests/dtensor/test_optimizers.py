"""torch's own optimizers and gradient clipping on DTensor parameters, against the dense model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hp_core import Replicate, Shard, distribute_tensor, init_device_mesh
from hp_core.testing import record_collectives, run_ranks

SHAPES = [(8, 5), (8,), (3, 8), (5,)]
PLACEMENTS = {
    2: [(Shard(0),), (Shard(0),), (Shard(1),), (Replicate(),)],
    4: [(Replicate(), Shard(0)), (Shard(0), Shard(0)), (Shard(0), Shard(1)), (Replicate(), Replicate())],
}


def parameters() -> list[torch.Tensor]:
    return [
        torch.randn(shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        for i, shape in enumerate(SHAPES)
    ]


def loss_of(x: Any, w1: Any, b1: Any, w2: Any, scale: Any) -> Any:
    return F.linear(torch.tanh(F.linear(x * scale, w1, b1)), w2).square().mean()


def train(make: Callable[..., torch.optim.Optimizer], ranks: int, clip: float | None) -> None:
    shape, names = ((2,), ("tp",)) if ranks == 2 else ((2, 2), ("dp", "tp"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    dense = [nn.Parameter(value) for value in parameters()]
    sharded = [
        nn.Parameter(distribute_tensor(value, mesh, placements, src_data_rank=None))
        for value, placements in zip(parameters(), PLACEMENTS[ranks], strict=True)
    ]
    optimizers = make(dense), make(sharded)
    batches = [
        torch.randn(4, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64) for step in range(3)
    ]
    batch_placement = (Shard(0), Replicate())[-ranks // 2 :] if ranks == 4 else (Replicate(),)
    for batch in batches:
        loss_of(batch, *dense).backward()
        loss_of(distribute_tensor(batch, mesh, batch_placement, src_data_rank=None), *sharded).backward()
        if clip is not None:
            norms = [nn.utils.clip_grad_norm_(group, clip) for group in (dense, sharded)]
            assert float(norms[0]) == pytest.approx(float(norms[1]), rel=1e-10)
        for optimizer in optimizers:
            with record_collectives() as log:
                optimizer.step()
            assert not log, log.summary()
            optimizer.zero_grad()
    for expected, got in zip(dense, sharded, strict=True):
        torch.testing.assert_close(got.detach().full_tensor(), expected.detach(), rtol=1e-10, atol=1e-10)
    for parameter, state in optimizers[1].state.items():
        for name, value in state.items():
            if torch.is_tensor(value) and name != "step":
                assert value.layout is parameter.layout  # type: ignore[attr-defined]
                assert value.to_local().shape == parameter.to_local().shape  # type: ignore[attr-defined]


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda group, **kwargs: torch.optim.SGD(group, lr=0.1, momentum=0.9, weight_decay=0.01, **kwargs),
    "plain sgd": lambda group, **kwargs: torch.optim.SGD(group, lr=0.1, **kwargs),
    "adam": lambda group, **kwargs: torch.optim.Adam(group, lr=0.01, **kwargs),
    "adam amsgrad": lambda group, **kwargs: torch.optim.Adam(group, lr=0.01, amsgrad=True, **kwargs),
    "adamw": lambda group, **kwargs: torch.optim.AdamW(group, lr=0.01, weight_decay=0.1, **kwargs),
}


@pytest.mark.parametrize("kind", [{"foreach": True}, {"foreach": False}, {"fused": True}, {}], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_steps_equal_dense(name: str, kind: dict[str, bool]) -> None:
    make = OPTIMIZERS[name]
    run_ranks(2, train, lambda group: make(group, **kind), 2, None)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_three_steps_on_a_mesh_of_two_axes(name: str) -> None:
    run_ranks(4, train, OPTIMIZERS[name], 4, None)


@pytest.mark.parametrize("ranks", [2, 4])
def test_clipping_by_the_global_norm(ranks: int) -> None:
    run_ranks(ranks, train, OPTIMIZERS["sgd"], ranks, 0.05)


def scheduled() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dense = nn.Parameter(parameters()[0])
    sharded = nn.Parameter(distribute_tensor(parameters()[0], mesh, [Shard(0)], src_data_rank=None))
    for parameter in (dense, sharded):
        optimizer = torch.optim.AdamW([parameter], lr=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
        for _ in range(3):
            parameter.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            schedule.step()
        saved = optimizer.state_dict()
        again = torch.optim.AdamW([parameter], lr=0.1)
        again.load_state_dict(saved)
        parameter.square().sum().backward()
        again.step()
    torch.testing.assert_close(sharded.detach().full_tensor(), dense.detach())


def test_schedules_zero_grad_and_state_dicts() -> None:
    run_ranks(2, scheduled)
