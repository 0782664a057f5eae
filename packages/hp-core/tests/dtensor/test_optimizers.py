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
        for value in state.values():
            if torch.is_tensor(value) and value.dim():  # counters and the like are plain numbers
                assert value.layout is parameter.layout  # type: ignore[attr-defined]
                assert value.to_local().shape == parameter.to_local().shape  # type: ignore[attr-defined]


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda group, **kwargs: torch.optim.SGD(group, lr=0.1, momentum=0.9, weight_decay=0.01, **kwargs),
    "plain sgd": lambda group, **kwargs: torch.optim.SGD(group, lr=0.1, **kwargs),
    "adam": lambda group, **kwargs: torch.optim.Adam(group, lr=0.01, **kwargs),
    "adam amsgrad": lambda group, **kwargs: torch.optim.Adam(group, lr=0.01, amsgrad=True, **kwargs),
    "adamw": lambda group, **kwargs: torch.optim.AdamW(group, lr=0.01, weight_decay=0.1, **kwargs),
}
OTHERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adagrad": lambda group, **kwargs: torch.optim.Adagrad(group, lr=0.1, lr_decay=0.1, weight_decay=0.01, **kwargs),
    "rmsprop": lambda group, **kwargs: torch.optim.RMSprop(group, lr=0.01, momentum=0.9, centered=True, **kwargs),
    "plain rmsprop": lambda group, **kwargs: torch.optim.RMSprop(group, lr=0.01, **kwargs),
    "nadam": lambda group, **kwargs: torch.optim.NAdam(group, lr=0.01, weight_decay=0.01, **kwargs),
    "nadam decoupled": lambda group, **kwargs: torch.optim.NAdam(
        group, lr=0.01, weight_decay=0.01, decoupled_weight_decay=True, **kwargs
    ),
    "radam": lambda group, **kwargs: torch.optim.RAdam(group, lr=0.01, **kwargs),
    "adadelta": lambda group, **kwargs: torch.optim.Adadelta(group, lr=1.0, **kwargs),
    "adamax": lambda group, **kwargs: torch.optim.Adamax(group, lr=0.01, **kwargs),
    "rprop": lambda group, **kwargs: torch.optim.Rprop(group, lr=0.01, **kwargs),
    "asgd": lambda group, **kwargs: torch.optim.ASGD(group, lr=0.01, **kwargs),
    "sgd maximize nesterov": lambda group, **kwargs: torch.optim.SGD(
        group, lr=0.01, momentum=0.9, nesterov=True, maximize=True, **kwargs
    ),
}


@pytest.mark.parametrize("kind", [{"foreach": True}, {"foreach": False}, {"fused": True}, {}], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_steps_equal_dense(name: str, kind: dict[str, bool]) -> None:
    make = OPTIMIZERS[name]
    run_ranks(2, train, lambda group: make(group, **kind), 2, None)


def test_fused_adagrad_equals_dense() -> None:
    run_ranks(2, train, lambda group: torch.optim.Adagrad(group, lr=0.1, fused=True), 2, None)


@pytest.mark.parametrize("kind", [{"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("name", OTHERS)
def test_three_steps_of_the_other_optimizers_equal_dense(name: str, kind: dict[str, bool]) -> None:
    make = OTHERS[name]
    run_ranks(2, train, lambda group: make(group, **kind), 2, None)


def train_whole(make: Callable[..., torch.optim.Optimizer], tolerance: float, matrices_only: bool) -> int:
    """Optimizers that look at whole parameters: three steps equal dense; returns how many messages the last one took."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    chosen = [i for i, shape in enumerate(SHAPES) if len(shape) == 2 or not matrices_only]
    values, cuts = [parameters()[i] for i in chosen], [PLACEMENTS[2][i] for i in chosen]
    dense = [nn.Parameter(value) for value in values]
    sharded = [
        nn.Parameter(distribute_tensor(value, mesh, placements, src_data_rank=None))
        for value, placements in zip(values, cuts, strict=True)
    ]

    def step(group: list[Any], optimizer: torch.optim.Optimizer) -> Any:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = sum(((parameter - 0.5) ** 2).sum() * (1 + i) for i, parameter in enumerate(group))
            loss.backward()
            return loss

        return optimizer.step(closure)

    optimizers = make(dense), make(sharded)
    for _ in range(3):
        step(dense, optimizers[0])
        with record_collectives() as log:
            step(sharded, optimizers[1])
    for expected, got in zip(dense, sharded, strict=True):
        torch.testing.assert_close(got.detach().full_tensor(), expected.detach(), rtol=tolerance, atol=tolerance)
    return len(log)


@pytest.mark.parametrize(
    ("make", "tolerance", "matrices_only"),
    [
        (lambda group: torch.optim.LBFGS(group, lr=0.1, max_iter=3), 1e-9, False),
        (lambda group: torch.optim.LBFGS(group, max_iter=4, line_search_fn="strong_wolfe"), 1e-9, False),
        (lambda group: torch.optim.Adafactor(group, lr=0.1, foreach=False), 1e-9, False),
        (lambda group: torch.optim.Adafactor(group, lr=0.1, foreach=True), 1e-9, False),
        (lambda group: torch.optim.Muon(group, lr=0.1), 0.02, True),
    ],
    ids=["lbfgs", "lbfgs with line search", "adafactor", "adafactor foreach", "muon"],
)
def test_optimizers_of_whole_parameters_equal_dense(
    make: Callable[..., torch.optim.Optimizer], tolerance: float, matrices_only: bool
) -> None:
    """Muon's orthogonalisation is in bfloat16 (public reports, case 105: not of the local shards)."""
    messages = run_ranks(2, train_whole, make, tolerance, matrices_only)
    assert messages[0] == messages[1] > 0


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
