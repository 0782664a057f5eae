"""What is compared: the same blocks in the same stages, run by hp-pipeline and by torch.distributed.pipelining.

`SHARED` are the schedules that both have. A torch that is older than one of them goes without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as torch_pipelining
import torch.nn.functional as F
from torch import nn

from benchmarks.blocks import Block
from hp_pipeline import MetaStep, MetaStepType, PipelineSchedule, PipelineStage, Schedule, build_order

__all__ = ["OURS", "SHARED", "TABLED", "TORCH", "Contender", "Size", "contender", "torch_schedule"]

OURS, TORCH = "hp-pipeline", "torch"
_NAMES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved1f1b": "ScheduleInterleaved1F1B",
    "loopedbfs": "ScheduleLoopedBFS",
    "interleavedzb": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
SHARED = {name: theirs for name, theirs in _NAMES.items() if hasattr(torch_pipelining.schedules, theirs)}
"""Our name -> torch's."""
TABLED = tuple(name for name in SHARED if name != "1f1b")
"""Those that torch has a table of. Its 1F1B runs without one: that of torch 2.13 is for display, and leaves a forward out."""


@dataclass(frozen=True)
class Size:
    """How large the model and a batch are.

    Attributes:
        width: D.
        blocks: how many there are, over all stages.
        rows: of a micro-batch.
        micro_batches: of a batch.
    """

    width: int = 384
    blocks: int = 8
    rows: int = 32
    micro_batches: int = 8


@dataclass
class Contender:
    """One way to train the stack on this rank.

    Attributes:
        stages: this rank's parts of the model, by stage.
        schedule: hp-pipeline's or torch's.
        x: the batch, `[rows * micro_batches, width]`.
        target: what the output should be.
    """

    stages: dict[int, nn.Module]
    schedule: Any
    x: torch.Tensor
    target: torch.Tensor

    def step(self) -> None:
        """Forward and backward of a batch; gradients are there afterwards, and those of the step before gone."""
        self.zero_grad()
        if isinstance(self.schedule, PipelineSchedule):
            self.schedule.run(self.x, target=self.target)
        else:
            first, last = 0 in self.stages, self.schedule._num_stages - 1 in self.stages
            self.schedule.step(
                *((self.x,) if first else ()), **({"target": self.target} if last else {}), return_outputs=False
            )

    def zero_grad(self) -> None:
        """No gradients."""
        for stage in self.stages.values():
            stage.zero_grad()

    def compute(self, micro_batches: int) -> None:
        """What the stages compute in a step, one micro-batch after another, with nothing sent and nothing waited for."""
        self.zero_grad()
        for x, target in zip(self.x.chunk(micro_batches), self.target.chunk(micro_batches), strict=True):
            for number, stage in self.stages.items():
                leaf = x.detach().requires_grad_(number > 0)
                F.mse_loss(stage(leaf), target).backward()

    def gradients(self) -> dict[tuple[int, str], torch.Tensor]:
        """Copies of the gradients by stage and name."""
        return {
            (number, name): parameter.grad.clone()
            for number, stage in self.stages.items()
            for name, parameter in stage.named_parameters()
            if parameter.grad is not None
        }


def contender(name: str, order: str, size: Size, dtype: torch.dtype = torch.float32) -> Contender:
    """Build the stages of this rank, with weights and a batch that are equal for all contenders.

    Args:
        name: `OURS` or `TORCH`.
        order: one of `SHARED`.
        size: of the model.
        dtype: of everything.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    schedule = build_order(order, ranks, size.micro_batches)
    count = schedule.stages
    own = schedule.stages_of(rank)
    stages = {number: _part(number, count, size).to(dtype) for number in own}
    generator = torch.Generator().manual_seed(7)
    shape = (size.rows * size.micro_batches, size.width)
    x, target = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))
    built: Any
    if name == OURS:
        parts = [PipelineStage(module, number, count) for number, module in stages.items()]
        built = PipelineSchedule(parts, schedule, loss_fn=F.mse_loss)
    else:
        device = torch.device("cpu")
        theirs = [torch_pipelining.PipelineStage(module, number, count, device) for number, module in stages.items()]
        single = order in ("gpipe", "1f1b")
        kind = getattr(torch_pipelining.schedules, SHARED[order])
        built = kind(theirs[0] if single else theirs, size.micro_batches, loss_fn=F.mse_loss)
    return Contender(stages, built, x, target)


def _part(number: int, count: int, size: Size) -> nn.Module:
    """The blocks of a stage, each from a seed of its own."""
    blocks = []
    for index in range(size.blocks * number // count, size.blocks * (number + 1) // count):
        torch.manual_seed(index)
        blocks.append(Block(size.width))
    return nn.Sequential(*blocks)


class _Stage:
    """What torch's schedules ask of a stage when they make their tables."""

    def __init__(self, index: int, count: int, rank: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_rank, self.group_size = index, count, rank, ranks
        self.is_first, self.is_last = index == 0, index == count - 1
        self.submod = None
        self.stage_index_to_group_rank: dict[int, int] = {}


def torch_schedule(order: str, ranks: int, micro_batches: int) -> Schedule:
    """Torch's own table of a schedule, as one of ours: computations only.

    Args:
        order: one of `TABLED`.
        ranks: how many there are.
        micro_batches: how many there are.
    """
    placement = build_order(order, ranks, micro_batches).placement
    own = [number for number, owner in enumerate(placement) if owner == 0]
    stages: Sequence[Any] = [_Stage(number, len(placement), 0, ranks) for number in own]
    kind = getattr(torch_pipelining.schedules, SHARED[order])
    made = kind(stages if len(placement) > ranks else stages[0], micro_batches, loss_fn=F.mse_loss)

    def converted(action: Any) -> MetaStep:
        if action.sub_actions is not None:
            forward, backward = sorted(
                map(converted, action.sub_actions), key=lambda step: step.type is not MetaStepType.F
            )
            return MetaStep.overlapped(backward, forward)
        return MetaStep(MetaStepType(action.computation_type.value), action.stage_index, action.microbatch_index)

    def exists(action: Any) -> bool:
        return action is not None and action.computation_type.value in ("F", "B", "I", "W", "OVERLAP_F_B")

    steps = [list(map(converted, filter(exists, made.pipeline_order[rank]))) for rank in range(ranks)]
    return Schedule(order, micro_batches, placement, ()).with_steps(steps)
