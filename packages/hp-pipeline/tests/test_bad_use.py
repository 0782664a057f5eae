"""Mistakes raise on every rank, naming who said what; nothing hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hp_core.errors import CommTimeoutError, PlanError, ProcessGroupError
from hp_core.process_group import get_rank, get_world_size
from hp_core.testing import assert_same_error, close_ranks, run_ranks
from hp_core.testing.failures import RankFailure
from hp_pipeline.named import Schedule1F1B, ScheduleGPipe, ScheduleZBV
from hp_pipeline.orders.registry import build_order
from hp_pipeline.run import PipelineSchedule
from hp_pipeline.stage import PipelineStage
from hp_pipeline.steps import MetaStepType
from hp_pipeline.transport import PeerFailed

mse = nn.functional.mse_loss


def layer(width: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(width, width)


def wrong_index() -> None:
    Schedule1F1B(PipelineStage(layer(), 0, get_world_size()), 4, mse)


def index_outside() -> None:
    Schedule1F1B(PipelineStage(layer(), 1 if get_rank() == 0 else 2, 2), 4, mse)


def different_stage_num() -> None:
    Schedule1F1B(PipelineStage(layer(), get_rank(), 2 if get_rank() == 0 else 3), 4, mse)


def different_micro_batches() -> None:
    Schedule1F1B(PipelineStage(layer(), get_rank(), 2), 4 if get_rank() == 0 else 8, mse)


def different_schedules() -> None:
    kind = ScheduleGPipe if get_rank() == 0 else Schedule1F1B
    kind(PipelineStage(layer(), get_rank(), 2), 4, mse)


def different_options() -> None:
    Schedule1F1B(PipelineStage(layer(), get_rank(), 2), 4, mse, reduction="sum" if get_rank() else "mean")


def no_stage() -> None:
    PipelineSchedule([] if get_rank() else [PipelineStage(layer(), 0, 1)], "1f1b", 4, mse)


def wrong_ranks() -> None:
    """The V wants stages 0 and 3 on rank 0."""
    own = ((0, 1), (2, 3))[get_rank()]
    ScheduleZBV([PipelineStage(layer(), stage, 4) for stage in own], 4, mse)


def no_micro_batch() -> None:
    Schedule1F1B(PipelineStage(layer(), get_rank(), 2), 0 if get_rank() else 4, mse)


def unknown_order() -> None:
    PipelineSchedule(PipelineStage(layer(), get_rank(), 2), "2f2b", 4, mse)


def wrong_skip() -> None:
    Schedule1F1B(PipelineStage(layer(), get_rank(), 2), 4, mse, skips=[(0, 1, "x")])


def nameless_skip() -> None:
    Schedule1F1B(PipelineStage(layer(), get_rank(), 3), 4, mse, skips=[(0, 2, "early")])


def bad_schedule() -> None:
    """Without its last backward."""
    good = build_order("1f1b", 2, 4)
    bad = good.with_steps([good.steps[0][:-1], good.steps[1]])
    PipelineSchedule(PipelineStage(layer(), get_rank(), 2), bad, loss_fn=mse)


def missing_share() -> None:
    shared = {"words": [(0, "weight"), (1, "nothing")]}
    Schedule1F1B(PipelineStage(layer(), get_rank(), 2, shared_parameters=shared), 4, mse)


def unlike_shares() -> None:
    shared = {"words": [(0, "weight"), (1, "weight")]}
    Schedule1F1B(PipelineStage(layer(4 + get_rank()), get_rank(), 2, shared_parameters=shared), 4, mse)


@pytest.mark.parametrize(
    ("build", "ranks", "match"),
    [
        (wrong_index, 2, r"stages \[1\] are on no rank.*stage 0 is on ranks \[0, 1\].*rank 0: \[0\]; rank 1: \[0\]"),
        (index_outside, 2, r"stages \[0\] are on no rank.*indices \[2\] are outside 0\.\.1"),
        (different_stage_num, 2, r"numbers of stages \(stage_num\): ranks \[0\] say \[2\]; ranks \[1\] say \[3\]"),
        (different_micro_batches, 2, r"numbers of micro-batches: ranks \[0\] say 4; ranks \[1\] say 8"),
        (different_schedules, 2, r"schedules: ranks \[0\] say gpipe \(\w+\); ranks \[1\] say 1f1b \(\w+\)"),
        (different_options, 2, r"reduction: ranks \[0\] say mean; ranks \[1\] say sum"),
        (no_stage, 2, "rank 1: it was given no stage"),
        (
            wrong_ranks,
            2,
            r"on other ranks: by stage, the schedule says ranks \{1: 1, 3: 0\}, the pipeline \{1: 0, 3: 1\}",
        ),
        (no_micro_batch, 2, r"numbers of micro-batches: ranks \[0\] say 4; ranks \[1\] say 0"),
        (unknown_order, 2, "there is no schedule '2f2b'"),
        (wrong_skip, 2, "a skip connection goes from a stage to a later one that isn't the next"),
        (nameless_skip, 3, "the forward of stage 2 has no argument 'early'"),
        (bad_schedule, 2, "1f1b"),
        (missing_share, 2, r"rank 1: stage 1 has no parameter 'nothing'"),
        (
            unlike_shares,
            2,
            r"copies of the shared parameter 'words' differ: stage 0: float32 \(4, 4\); stage 1: float32 \(5, 5\)",
        ),
    ],
)
def test_a_pipeline_that_cant_work_is_refused_when_it_is_made(
    build: Callable[[], None], ranks: int, match: str
) -> None:
    messages = assert_same_error(ranks, build, PlanError, match)
    assert len(set(messages)) == 1


def runs(kind: str) -> str:
    """What a rank says of a run that can't work, after a second run that can."""
    rank, last = get_rank(), get_world_size() - 1
    pipeline = Schedule1F1B(PipelineStage(layer(), rank, last + 1), 4, mse, timeout=20)
    x, target = torch.ones(8, 4), torch.zeros(8, 4)
    inputs: tuple[Any, ...] = (x,)
    options: dict[str, Any] = {"target": target}
    if kind == "too few rows":
        inputs, options = (x[:3],), {"target": target[:3]}
    elif kind == "rows differ":
        options = {"target": target[:6]}
    elif kind == "no target":
        options = {"loss_fn": lambda output: output}
    elif kind == "unknown keyword":
        options["unknown"] = 3
    elif kind == "no inputs":
        inputs = ()
    elif kind == "a scalar is missing":
        options["loss_fn"] = lambda output, target: output - target
    said = ""
    try:
        pipeline.run(*inputs, **options)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    assert pipeline.run(x, target=target) or rank < last
    return said


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("too few rows", "3 rows in dim 0, too few for 4 micro-batches"),
        ("rows differ", r"rank 2 was given 6 rows and the rank of the first stage 8"),
        ("no target", "no tensor of one element"),
        ("unknown keyword", r"no stage of the pipeline takes \['unknown'\]"),
        ("no inputs", "missing 1 required positional argument"),
        ("a scalar is missing", "no tensor of one element"),
    ],
)
def test_a_run_that_cant_work_ends_on_every_rank(kind: str, match: str) -> None:
    import re

    for said in run_ranks(3, runs, kind):
        assert re.search(match, said), said


def killed(victim: int, step_type: str) -> tuple[str, float]:
    rank, ranks = get_rank(), get_world_size()
    pipeline = Schedule1F1B(PipelineStage(layer(), rank, ranks), 4, mse, timeout=20)

    def end(step: Any, context: Any) -> None:
        if rank == victim and step.micro_batch == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        context.default(step)

    pipeline.register_custom_function(MetaStepType[step_type], end)
    started = time.monotonic()
    with pytest.raises((ProcessGroupError, PeerFailed)) as caught:
        pipeline.run(torch.ones(8, 4), target=torch.zeros(8, 4))
    raise type(caught.value)(f"after {time.monotonic() - started:.1f} s: {caught.value}")


@pytest.mark.parametrize(("victim", "step_type"), [(1, "F"), (2, "B")])
def test_a_killed_rank_ends_the_others_who_say_whom_they_waited_for(victim: int, step_type: str) -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(3, killed, victim, step_type, timeout=40)
    text = str(caught.value)
    assert "SIGKILL" in text or "signal 9" in text
    assert "CommTimeoutError" not in text, "nobody waits for the timeout"
    for rank in {0, 1, 2} - {victim}:
        assert f"rank {rank} still waiting" not in text
    neighbours = {0, 1, 2} & {victim - 1, victim + 1}
    for rank in neighbours:
        assert f"rank {rank} waited in step " in text, text
    assert f"on rank {victim}, which has ended" in text
    assert len(caught.value.outcomes) == 3


def stalls() -> str:
    rank = get_rank()
    pipeline = Schedule1F1B(PipelineStage(layer(), rank, 2), 4, mse, timeout=1)

    def sleep(step: Any, context: Any) -> None:
        if rank == 1 and step.micro_batch == 1:
            time.sleep(2.5)
        context.default(step)

    pipeline.register_custom_function(MetaStepType.F, sleep)
    try:
        pipeline.run(torch.ones(8, 4), target=torch.zeros(8, 4))
    except (CommTimeoutError, ProcessGroupError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_rank_that_stalls_is_named() -> None:
    first, second = run_ranks(2, stalls)
    close_ranks()  # gloo closes a connection on which a timeout has passed; the tests after this one need one
    assert first.startswith("CommTimeoutError: rank 0 waited in step RECV_B0.")
    assert "for step SEND_B1." in first
    assert "of stage 1 on rank 1 until the timeout" in first
    assert second
