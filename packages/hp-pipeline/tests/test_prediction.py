"""What the simulator predicts is what ranks do: real runs of stages that sleep for known times, on four ranks.

A machine that is busy with other things makes runs longer, never shorter; so each schedule has a few tries.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from hp_core.process_group import get_rank
from hp_core.testing import run_ranks
from hp_pipeline import Costs, PipelineSchedule, PipelineStage, Recorder, Timeline, build_order, simulate
from hp_pipeline.passes import overlap_communication

RANKS, MICRO_BATCHES, TRIES = 4, 4, 6
FORWARD, INPUT, WEIGHT = 0.06, 0.05, 0.04
"""Seconds that a stage sleeps: in its forward, and in its backward for the gradients of inputs and of weights."""


class SleepInBackward(torch.autograd.Function):
    """The identity; its gradient takes a while."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class SleepingStage(nn.Module):
    """Known times on the ways to its input and to its weight, so that both halves of a split backward have their own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.awake = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.awake:
            return x * self.weight
        time.sleep(FORWARD)
        return SleepInBackward.apply(x, INPUT) * SleepInBackward.apply(self.weight, WEIGHT)


def slept(name: str) -> str:
    """On a rank: its timeline, after a run without sleep, in which ranks tell each other what travels."""
    order = build_order(name, RANKS, MICRO_BATCHES)
    modules = {stage: SleepingStage() for stage in order.stages_of(get_rank())}
    stages = [PipelineStage(module, stage, order.stages) for stage, module in modules.items()]
    recorder = Recorder(get_rank(), RANKS)
    schedule = PipelineSchedule(stages, order, loss_fn=lambda output: output.sum(), timeout=30, recorder=recorder)
    batch = torch.ones(MICRO_BATCHES, 4)
    schedule.run(batch)
    recorder.clear()
    for module in modules.values():
        module.awake = False
    torch.distributed.barrier()
    schedule.run(batch)
    return recorder.timeline().to_json()


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zbh1", "interleaved1f1b", "zbv"])
def test_a_real_run_takes_as_long_as_predicted(name: str) -> None:
    schedule = overlap_communication(build_order(name, RANKS, MICRO_BATCHES))
    nothing_to_send_back = [0.0] + [INPUT] * (schedule.stages - 1)  # the model's input needs no gradient
    predicted = simulate(schedule, Costs(forward=FORWARD, input_gradient=nothing_to_send_back, weight_gradient=WEIGHT))
    off = []
    for _ in range(TRIES):
        real = Timeline.merged(map(Timeline.from_json, run_ranks(RANKS, slept, name)))
        walked = [[event.step for event in real.of(rank)] for rank in range(RANKS)]
        assert walked == [list(steps) for steps in schedule.steps]
        off.append(real.end / predicted.step_time - 1)
        assert off[-1] > -0.01, f"{name}: faster than what it sleeps"
        if off[-1] <= 0.05:
            # what a step waits for its messages isn't recorded as its own
            assert sum(real.busy) == pytest.approx(sum(predicted.timeline.busy), rel=0.05)
            return
    pytest.fail(f"{name}: real runs took longer than predicted by {[f'{one:.1%}' for one in off]}")
