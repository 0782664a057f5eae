"""One training step under a storage tracker, with one remedy against running out of memory or several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.blocks import Block
from hp_core import init_device_mesh
from hp_core.platform.torch.storages import StorageTracker
from hp_core.process_group import get_rank, get_world_size
from hp_fsdp import MixedPrecisionPolicy, fully_shard
from hp_pipeline import PipelineStage, Schedule1F1B, ScheduleGPipe

__all__ = ["LAYERS", "REMEDIES", "ROWS", "WIDTH", "Remedy", "measure"]

WIDTH, LAYERS, ROWS = 256, 8, 1024


@dataclass(frozen=True)
class Remedy:
    """How a step is run.

    Attributes:
        name: for the table.
        ranks: how many share the model.
        micro_batches: in how many parts the rows of a rank are computed.
        recompute: whether blocks keep only their inputs for the backward.
        shard: options of `fully_shard`; None: the model is whole.
        schedule: of the pipeline; None: no pipeline.
        deal: blocks on each rank of the pipeline.
        rows: of the batch on each rank; of a pipeline, of the whole batch.
    """

    name: str
    ranks: int = 1
    micro_batches: int = 1
    recompute: bool = False
    shard: dict[str, Any] | None = None
    schedule: str | None = None
    deal: tuple[int, ...] = ()
    rows: int = ROWS


_SHORT = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
REMEDIES = (
    Remedy("whole model on each rank"),
    Remedy("4 micro-batches, gradients added up", micro_batches=4),
    Remedy("recomputation of each block", recompute=True),
    Remedy("`fully_shard`", 4, shard={}),
    Remedy("`fully_shard(overlap=False)`", 4, shard={"overlap": False}),
    Remedy("`fully_shard`, computing in bfloat16", 4, shard={"mp_policy": MixedPrecisionPolicy(**_SHORT)}),
    Remedy("`fully_shard`, 4 micro-batches", 4, micro_batches=4, shard={}),
    Remedy("`fully_shard`, recomputation", 4, recompute=True, shard={}),
    Remedy("`fully_shard`, recomputation, 4 micro-batches", 4, micro_batches=4, recompute=True, shard={}),
    Remedy("pipeline, GPipe, 8 micro-batches", 4, 8, schedule="GPipe", deal=(2, 2, 2, 2)),
    Remedy("pipeline, 1F1B, 8 micro-batches", 4, 8, schedule="1F1B", deal=(2, 2, 2, 2)),
    Remedy("pipeline, 1F1B, 16 micro-batches", 4, 16, schedule="1F1B", deal=(2, 2, 2, 2)),
    Remedy("the same with 16 x the rows", 4, 16, schedule="1F1B", deal=(2, 2, 2, 2), rows=16 * ROWS),
    Remedy("the same, blocks dealt 1 + 2 + 2 + 3", 4, 16, schedule="1F1B", deal=(1, 2, 2, 3), rows=16 * ROWS),
)


class Stack(nn.Module):
    """Blocks one after the other."""

    def __init__(self, width: int, layers: int, recompute: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, width]` to the same."""
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def measure(remedy: Remedy, width: int = WIDTH, layers: int = LAYERS) -> dict[str, int]:
    """Bytes alive when most are, on this rank in its second step, by what they are; "all" is their sum."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    pipeline = remedy.schedule is not None
    model = Stack(width, remedy.deal[get_rank()] if pipeline else layers, remedy.recompute)
    if remedy.shard is not None:
        mesh = init_device_mesh("cpu", (get_world_size(),), mesh_dim_names=("dp",))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **remedy.shard)
        fully_shard(model, mesh=mesh, **remedy.shard)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, foreach=False)
    x, target = torch.randn(remedy.rows, width), torch.randn(remedy.rows, width)
    backward = _pipeline_of(remedy, model) if pipeline else _parts_of(remedy, model)

    def step() -> None:
        backward(x, target)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    step()
    states = (value for state in optimizer.state.values() for value in state.values() if value.dim())
    tracker = StorageTracker(
        {
            "parameters": parameters,
            "gradients": [one.grad for one in parameters if one.grad is not None],
            "optimizer states": list(states),
            "batch": [x, target],
        }
    )
    for name, buffers in _flat_buffers(model):
        tracker.label(name, buffers)
    with tracker:
        step()
    return {"all": tracker.peak, **tracker.at_peak}


def _parts_of(remedy: Remedy, model: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], object]:
    def backward(x: torch.Tensor, target: torch.Tensor) -> None:
        pieces = zip(x.chunk(remedy.micro_batches), target.chunk(remedy.micro_batches), strict=True)
        for piece, wanted in pieces:
            (nn.functional.mse_loss(model(piece), wanted) / remedy.micro_batches).backward()

    return backward


def _pipeline_of(remedy: Remedy, model: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], object]:
    kind: Any = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}[str(remedy.schedule)]
    stage = PipelineStage(model, get_rank(), get_world_size())
    schedule = kind(stage, micro_batches=remedy.micro_batches, loss_fn=nn.functional.mse_loss)
    return lambda x, target: schedule.run(x, target=target)


def _flat_buffers(model: nn.Module) -> Iterable[tuple[str, Sequence[torch.Tensor]]]:
    from hp_fsdp.hsdp_module import units_below

    segments = [segment for unit in units_below(model) for segment in unit.segments]
    yield "gathered parameters", [one.buffer for one in segments if one.buffer is not None]
    yield "gradient buffers", [one.gradients for one in segments if one.gradients is not None]
