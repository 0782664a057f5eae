"""Pipelines of stages that are sharded or tensor-parallel themselves, and clipping over stages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hp_core import ColwiseParallel, RowwiseParallel, init_device_mesh, parallelize_module
from hp_core.testing import run_ranks
from hp_fsdp import clip_grad_norm_, fully_shard
from hp_pipeline.named import Schedule1F1B
from hp_pipeline.orders.registry import build_order
from hp_pipeline.passes import insert_communication, insert_fsdp, insert_swaps
from hp_pipeline.run import PipelineSchedule
from hp_pipeline.schedule import Schedule
from hp_pipeline.stage import PipelineStage

WIDTH = 6
mse = nn.functional.mse_loss


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def stages_of(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(Block(), Block()).double() for _ in range(count)]


def batch_of(replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.randn(2, 8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(replica))
    return both[0], both[1]


def check(own: dict[int, nn.Module], dense: list[nn.Module]) -> None:
    for index, stage in own.items():
        for (name, mine), other in zip(stage.named_parameters(), dense[index].parameters(), strict=True):
            gradient = mine.grad.full_tensor() if hasattr(mine.grad, "full_tensor") else mine.grad
            torch.testing.assert_close(
                gradient, other.grad, rtol=1e-12, atol=1e-12, msg=lambda text, at=(index, name): f"{at}: {text}"
            )


def with_fsdp(name: str, chunks: int, steps: bool, replicas: int, swaps: bool = False) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh.get_coordinate()
    schedule = build_order(name, 2, 4, chunks)
    if steps:
        schedule = insert_fsdp(insert_communication(schedule), range(schedule.stages))
    if swaps:
        schedule = insert_swaps(schedule, 1)
    models = stages_of(schedule.stages)
    dense = copy.deepcopy(models)
    own = {index: models[index] for index in schedule.stages_of(pp)}
    for stage in own.values():
        for block in stage:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(stage, mesh=mesh["dp"])
    stages = [PipelineStage(stage, index, schedule.stages, mesh=mesh["pp"]) for index, stage in own.items()]
    pipeline = PipelineSchedule(stages, schedule, loss_fn=mse, timeout=20)
    for run in range(2):
        for replica in range(2):
            x, target = batch_of(10 * run + replica)
            for rows, wanted in zip(x.chunk(4), target.chunk(4), strict=True):
                (mse(nn.Sequential(*dense)(rows), wanted) / 8).backward()
        x, target = batch_of(10 * run + dp)
        pipeline.run(x, target=target)
        check(own, dense)


@pytest.mark.parametrize("steps", [False, True], ids=["by itself", "with steps"])
@pytest.mark.parametrize(
    ("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("zbh1", 1), ("interleaved1f1b", 2), ("zbv", 2)]
)
def test_sharded_stages(name: str, chunks: int, steps: bool) -> None:
    run_ranks(4, with_fsdp, name, chunks, steps, 2)


@pytest.mark.parametrize("steps", [False, True], ids=["by itself", "with steps"])
def test_activations_of_sharded_stages_are_swapped(steps: bool) -> None:
    """Weights that the graph keeps don't move: they are gathered again, or whole until their own step."""
    run_ranks(4, with_fsdp, "gpipe", 1, steps, 2, True)


def reductions() -> int:
    """How many reductions a run makes."""
    from hp_core.platform.recorder import record_collectives

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh.get_coordinate()
    stage = stages_of(2)[pp]
    fully_shard(stage, mesh=mesh["dp"])
    pipeline = Schedule1F1B(PipelineStage(stage, pp, 2, mesh=mesh["pp"]), 4, mse)
    x, target = batch_of(dp)
    pipeline.run(x, target=target)
    with record_collectives() as log:
        pipeline.run(x, target=target)
    return sum(record.kind == "reduce_scatter" for record in log)


def test_gradients_are_reduced_once_for_all_micro_batches() -> None:
    assert run_ranks(4, reductions) == [1] * 4


def with_tensor_parallel(name: str, chunks: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    pp, _ = mesh.get_coordinate()
    schedule: Schedule = build_order(name, 2, 4, chunks)
    models = stages_of(schedule.stages)
    dense = copy.deepcopy(models)
    own = {index: models[index] for index in schedule.stages_of(pp)}
    for stage in own.values():
        for block in stage:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    stages = [PipelineStage(stage, index, schedule.stages, mesh=mesh) for index, stage in own.items()]
    pipeline = PipelineSchedule(stages, name, 4, mse, timeout=20)
    x, target = batch_of(0)
    for rows, wanted in zip(x.chunk(4), target.chunk(4), strict=True):
        (mse(nn.Sequential(*dense)(rows), wanted) / 4).backward()
    pipeline.run(x, target=target)
    check(own, dense)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("zbh1", 1), ("zbv", 2)])
def test_tensor_parallel_stages(name: str, chunks: int) -> None:
    run_ranks(4, with_tensor_parallel, name, chunks)


def clipped(norm_type: float) -> tuple[float, float]:
    """Case 57."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    rank = mesh.get_coordinate()[0]
    models = stages_of(2)
    dense = nn.Sequential(*copy.deepcopy(models))
    x, target = batch_of(0)
    for rows, wanted in zip(x.chunk(4), target.chunk(4), strict=True):
        (mse(dense(rows), wanted) / 4).backward()
    Schedule1F1B(PipelineStage(models[rank], rank, 2, mesh=mesh), 4, mse).run(x, target=target)
    expected = torch.nn.utils.clip_grad_norm_(dense.parameters(), 0.01, norm_type)
    found = clip_grad_norm_(models[rank].parameters(), 0.01, norm_type, mesh=mesh, distinct={"pp": None})
    own: list[Any] = list(models[rank].parameters())
    for mine, other in zip(own, dense[rank].parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-12)
    return float(found), float(expected)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_counts_all_stages(norm_type: float) -> None:
    for found, expected in run_ranks(2, clipped, norm_type):
        assert found == pytest.approx(expected, rel=1e-6)
