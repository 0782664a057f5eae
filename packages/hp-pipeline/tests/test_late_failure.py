"""A rank that fails when it has nothing left to send: the others can't hear of it in that run, and all do in the next."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hp_core.process_group import get_rank, get_world_size
from hp_core.testing import run_ranks
from hp_pipeline import MetaStep, MetaStepType, PeerFailed, PipelineSchedule, PipelineStage, build_order
from hp_pipeline.itinerary import unaware
from hp_pipeline.passes import overlap_communication
from hp_pipeline.steps import parse_step


def linear(stage: int) -> nn.Linear:
    """The same on all ranks."""
    torch.manual_seed(stage)
    return nn.Linear(3, 3).double()


def fails_late(name: str, parts: int, where: str, told: list[int]) -> None:
    """One rank fails in the first of three runs, in a step after which not all ranks can be told."""
    rank, ranks = get_rank(), get_world_size()
    placed = build_order(name, ranks, parts)
    own = {stage: linear(stage) for stage in placed.stages_of(rank)}
    stages = [PipelineStage(module, stage, placed.stages) for stage, module in own.items()]
    pipeline = PipelineSchedule(stages, name, parts, nn.functional.mse_loss, timeout=20)
    wrong = parse_step(where)
    ill = [True]

    def backward(step: MetaStep, context: Any) -> None:
        if step == wrong and ill[0]:
            raise ValueError("out of luck")
        context.default(step)

    pipeline.register_custom_function(wrong.type, backward)
    x, target = torch.randn(2, 2 * parts, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    fails = wrong.stage in own
    if fails or rank in told:
        with pytest.raises(ValueError if fails else PeerFailed, match="out of luck"):
            pipeline.run(x, target=target)
    else:
        pipeline.run(x, target=target)
    ill[0] = False
    owner = placed.placement[wrong.stage]
    with pytest.raises(PeerFailed, match=f"rank {owner} failed in step {where}: ValueError: out of luck"):
        pipeline.run(x, target=target)
    for module in own.values():
        module.zero_grad()
    pipeline.run(x, target=target)
    dense = nn.Sequential(*map(linear, range(placed.stages)))
    nn.functional.mse_loss(dense(x), target).backward()
    for stage, module in own.items():
        torch.testing.assert_close(module.weight.grad, dense[stage].weight.grad)


@pytest.mark.parametrize(
    ("ranks", "name", "where", "told"),
    [
        (2, "1f1b", "B0.3", []),  # the very last backward of all
        (2, "zbh1", "W1.3", []),  # weights alone
        (2, "zbv", "W3.3", []),
        (4, "1f1b", "B1.3", [0]),  # the rank before hears of it, those behind don't
    ],
)
def test_a_failure_that_comes_too_late_to_be_told_fails_the_next_run_of_all(
    ranks: int, name: str, where: str, told: list[int]
) -> None:
    run_ranks(ranks, fails_late, name, 4, where, told)


def test_who_can_hear_of_a_failure() -> None:
    schedule = overlap_communication(build_order("1f1b", 4, 4))
    ends = [len(steps) - 1 for steps in schedule.steps]
    assert [unaware(schedule, rank, 0) for rank in range(4)] == [[], [], [], []]
    assert unaware(schedule, 0, ends[0]) == [1, 2, 3]
    assert unaware(schedule, 3, ends[3]) == []  # its last step is a send, which the ranks before take in turn
    first, second = schedule.steps[:2]
    assert unaware(schedule, 1, second.index(MetaStep(MetaStepType.B, 1, 3))) == [2, 3]
    assert unaware(schedule, 0, first.index(MetaStep(MetaStepType.F, 0, 3))) == []
    backward = MetaStep(MetaStepType.B, 0, 0)
    assert unaware(schedule, 0, first.index(backward)) == [1, 2, 3]
    longer = overlap_communication(build_order("1f1b", 4, 5))
    assert unaware(longer, 0, longer.steps[0].index(backward)) == []  # a forward is still to be sent
