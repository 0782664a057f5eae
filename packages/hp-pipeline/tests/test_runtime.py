"""Losses and gradients of every schedule equal those of the dense model, whatever the stages, micro-batches and chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hp_core.process_group import get_rank, get_world_size
from hp_core.testing import run_ranks
from hp_pipeline.named import Schedule1F1B, ScheduleGPipe, ScheduleZBV
from hp_pipeline.orders.registry import ORDERS, build_order
from hp_pipeline.run import PipelineSchedule
from hp_pipeline.stage import PipelineStage
from hp_pipeline.steps import MetaStepType
from hp_pipeline.timeline import Recorder

NAMES = [(name, chunks) for name, order in ORDERS.items() for chunks in ((order.chunks,) if order.fixed else (1, 2))]


def blocks_of(count: int, width: int = 6) -> list[nn.Module]:
    """Blocks of uneven sizes."""
    torch.manual_seed(1)
    return [
        nn.Sequential(
            nn.Linear(width, width + at), nn.Tanh(), nn.LayerNorm(width + at), nn.Linear(width + at, width)
        ).double()
        for at in range(count)
    ]


def whole_batch(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    both = torch.randn(2, rows, 6, dtype=torch.float64, generator=generator)
    return both[0], both[1]


def dense_run(blocks: list[nn.Module], x: torch.Tensor, target: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Losses of the micro-batches; gradients as the pipeline adds them up."""
    losses = []
    for rows, wanted in zip(torch.tensor_split(x, parts), torch.tensor_split(target, parts), strict=True):
        hidden = rows
        for block in blocks:
            hidden = block(hidden)
        loss = nn.functional.mse_loss(hidden, wanted)
        (loss * (1 / parts if len(x) % parts == 0 else len(rows) / len(x))).backward()
        losses.append(loss.detach())
    return losses


def check_gradients(blocks: dict[int, nn.Module], dense: list[nn.Module], exact: bool = False) -> None:
    """Gradients equal the dense ones."""
    tolerance = 0.0 if exact else 1e-12
    for index, block in blocks.items():
        for (name, own), other in zip(block.named_parameters(), dense[index].parameters(), strict=True):
            torch.testing.assert_close(
                own.grad, other.grad, rtol=tolerance, atol=tolerance, msg=lambda text, at=(index, name): f"{at}: {text}"
            )


def equals_dense(cases: list[tuple[str, int, int]], rows: int | None = None) -> None:
    """Run schedules one after the other, each twice."""
    rank, ranks = get_rank(), get_world_size()
    for name, chunks, parts in cases:
        placed = build_order(name, ranks, parts, chunks)
        own = {stage: blocks_of(placed.stages)[stage] for stage in placed.stages_of(rank)}
        dense = blocks_of(placed.stages)
        stages = [PipelineStage(block, stage, placed.stages) for stage, block in own.items()]
        pipeline = PipelineSchedule(stages, name, parts, nn.functional.mse_loss, timeout=20)
        for seed in range(2):
            x, target = whole_batch(rows or 2 * parts, seed)
            expected = dense_run(dense, x, target, parts)
            losses = pipeline.run(x, target=target)
            if placed.stages - 1 in own:
                torch.testing.assert_close(losses, expected, rtol=0, atol=0, msg=f"losses of {name}, {parts}, {chunks}")
            else:
                assert losses == []
            check_gradients(own, dense)
            assert all(stage.in_flight == 0 for stage in stages)


@pytest.mark.parametrize(("name", "chunks"), NAMES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_equals_dense(ranks: int, name: str, chunks: int) -> None:
    few = (1, 2, 5) if ranks in (1, 3) else (1, 3, 4, 9)  # fewer micro-batches than stages, one among them: case 44
    run_ranks(ranks, equals_dense, [(name, chunks, parts) for parts in few])


@pytest.mark.parametrize("parts", [2, 6, 7, 8])
def test_other_numbers_of_micro_batches(parts: int) -> None:
    run_ranks(
        2, equals_dense, [("gpipe", 1, parts), ("1f1b", 1, parts), ("interleaved1f1b", 2, parts), ("zbv", 2, parts)]
    )


@pytest.mark.parametrize("rows", [4, 5, 7, 9, 11])
def test_uneven_micro_batches_weigh_by_rows(rows: int) -> None:
    """Micro-batches of different sizes; the mean over rows is the dense one."""
    run_ranks(2, equals_dense, [("1f1b", 1, 4), ("zbv", 2, 4)], rows=rows)


def dense_mean(rows: int) -> None:
    blocks, dense = blocks_of(2), blocks_of(2)
    rank = get_rank()
    x, target = whole_batch(rows)
    nn.functional.mse_loss(dense[1](dense[0](x)), target).backward()
    Schedule1F1B(PipelineStage(blocks[rank], rank, 2), 4, nn.functional.mse_loss).run(x, target=target)
    check_gradients({rank: blocks[rank]}, dense)


@pytest.mark.parametrize("rows", [8, 10, 11])
def test_gradients_are_of_the_mean_over_rows(rows: int) -> None:
    run_ranks(2, dense_mean, rows)


def bitwise() -> None:
    blocks, dense = blocks_of(2), blocks_of(2)
    rank = get_rank()
    x, target = whole_batch(8)
    dense_run(dense, x, target, 4)
    Schedule1F1B(PipelineStage(blocks[rank], rank, 2), 4, nn.functional.mse_loss).run(x, target=target)
    check_gradients({rank: blocks[rank]}, dense, exact=True)


def test_gradients_are_bit_equal_where_the_order_is_the_same() -> None:
    run_ranks(2, bitwise)


def split_calls(reduction: str) -> None:
    rank = get_rank()
    blocks, other = blocks_of(2), blocks_of(2)
    x, target = whole_batch(16)
    options = {"loss_fn": nn.functional.mse_loss, "reduction": reduction}
    Schedule1F1B(PipelineStage(blocks[rank], rank, 2), 8, **options).run(x, target=target)
    half = Schedule1F1B(PipelineStage(other[rank], rank, 2), 4, **options)
    share = 0.5 if reduction == "mean" else 1.0
    for rows, wanted in zip(x.chunk(2), target.chunk(2), strict=True):
        half.run(rows, target=wanted, share=share)
    check_gradients({rank: blocks[rank]}, other)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_are_the_same_however_calls_are_split(reduction: str) -> None:
    """Case 46."""
    run_ranks(2, split_calls, reduction)


def shared_losses() -> list[float]:
    rank = get_rank()
    pipeline = ScheduleGPipe(PipelineStage(blocks_of(2)[rank], rank, 2), 3, nn.functional.mse_loss, share_losses=True)
    x, target = whole_batch(6)
    return [float(loss) for loss in pipeline.run(x, target=target)]


def test_losses_are_shared_if_asked() -> None:
    first, last = run_ranks(2, shared_losses)
    x, target = whole_batch(6)
    expected = [float(loss) for loss in dense_run(blocks_of(2), x, target, 3)]
    assert first == last == expected


def evaluated() -> None:
    rank = get_rank()
    blocks = blocks_of(4)
    x, target = whole_batch(8)
    own = {stage: blocks[stage] for stage in ((0, 3), (1, 2))[rank]}
    pipeline = ScheduleZBV([PipelineStage(block, stage, 4) for stage, block in own.items()], 4, nn.functional.mse_loss)
    expected = nn.Sequential(*blocks_of(4))(x)
    outputs = pipeline.evaluate(x)
    losses = pipeline.evaluate(x, target=target)
    if rank == 0:
        assert not outputs[0].requires_grad
        torch.testing.assert_close(torch.cat(outputs), expected.detach(), rtol=0, atol=0)
        assert len(losses) == 4
    else:
        assert outputs == losses == []
    assert all(parameter.grad is None for block in own.values() for parameter in block.parameters())
    pipeline.run(x, target=target)
    dense = blocks_of(4)
    dense_run(dense, x, target, 4)
    check_gradients(own, dense)


def test_evaluation_takes_the_same_way_without_gradients() -> None:
    run_ranks(2, evaluated)


class Faulty(nn.Module):
    """A block that fails when told."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.left, self.where = block, 0, ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0 and self.where == "forward":
            raise ArithmeticError("no luck")
        y = self.block(x)
        if self.left == 0 and self.where == "backward":
            y.register_hook(self.refuse)
        return y  # type: ignore[no-any-return]

    @staticmethod
    def refuse(gradient: torch.Tensor) -> None:
        raise ArithmeticError("no luck")


def survives(name: str, chunks: int, bad_stage: int, where: str, at: int) -> str:
    rank, ranks, parts = get_rank(), get_world_size(), 4
    placed = build_order(name, ranks, parts, chunks)
    own = {stage: Faulty(blocks_of(placed.stages)[stage]) for stage in placed.stages_of(rank)}
    stages = [PipelineStage(block, stage, placed.stages) for stage, block in own.items()]
    pipeline = PipelineSchedule(stages, name, parts, nn.functional.mse_loss, timeout=20)
    x, target = whole_batch(8)
    if bad_stage in own:
        own[bad_stage].left, own[bad_stage].where = at, where
    said = "nothing"
    try:
        pipeline.run(x, target=target)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    for block in own.values():
        block.zero_grad()
        block.where = ""
    dense = blocks_of(placed.stages)
    for _ in range(2):
        dense_run(dense, x, target, parts)
        pipeline.run(x, target=target)
    check_gradients({stage: block.block for stage, block in own.items()}, dense)
    return said


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("gpipe", 1), ("zbv", 2), ("interleaved1f1b", 2)])
@pytest.mark.parametrize(("bad_stage", "where", "at"), [(0, "forward", 1), (1, "forward", 3), (1, "backward", 2)])
def test_an_exception_reaches_all_ranks_and_the_next_run_is_right(
    name: str, chunks: int, bad_stage: int, where: str, at: int
) -> None:
    said = run_ranks(2, survives, name, chunks, bad_stage, where, at)
    assert said[bad_stage] == "ArithmeticError: no luck"
    assert said[1 - bad_stage].startswith(f"PeerFailed: rank {bad_stage} failed in step ")
    assert said[1 - bad_stage].endswith("ArithmeticError: no luck")


def recorded() -> tuple[list[str], list[str]]:
    rank = get_rank()
    recorder = Recorder(rank, 2)
    pipeline = Schedule1F1B(PipelineStage(blocks_of(2)[rank], rank, 2), 3, nn.functional.mse_loss, recorder=recorder)
    seen: list[str] = []

    def custom(step: Any, context: Any) -> None:
        seen.append(str(step))
        context.default(step)

    pipeline.register_custom_function(MetaStepType.B, custom)
    x, target = whole_batch(6)
    pipeline.run(x, target=target)
    assert [str(event.step) for event in recorder.timeline().events] == [
        str(step) for step in pipeline.schedule.steps[rank]
    ]
    return seen, [str(step) for step in pipeline.schedule.steps[rank] if step.type is MetaStepType.B]


def test_steps_are_recorded_and_custom_functions_stand_in() -> None:
    for seen, expected in run_ranks(2, recorded):
        assert seen == expected
        assert len(seen) == 3


def overlapped() -> list[str]:
    """A custom function for pairs sees both parts."""
    rank = get_rank()
    placed = build_order("dualpipev", 2, 6)
    blocks, dense = blocks_of(4), blocks_of(4)
    own = {stage: blocks[stage] for stage in placed.stages_of(rank)}
    pipeline = PipelineSchedule(
        [PipelineStage(block, stage, 4) for stage, block in own.items()], placed, loss_fn=nn.functional.mse_loss
    )
    seen = []

    def both(step: Any, context: Any) -> None:
        seen.append(str(step))
        for part in reversed(step.parts):
            context.execute(part)

    pipeline.register_custom_function(MetaStepType.OVERLAP_B_F, both)
    x, target = whole_batch(12)
    dense_run(dense, x, target, 6)
    pipeline.run(x, target=target)
    check_gradients(own, dense)
    return seen


def test_pairs_can_be_executed_in_another_way() -> None:
    assert all(run_ranks(2, overlapped))


def messages(most: int) -> tuple[int, int]:
    """Bytes are not sent between stages of one rank."""
    from unittest.mock import patch

    from hp_core.platform.recorder import record_collectives

    rank = get_rank()
    blocks = blocks_of(4)
    own = ((0, 3), (1, 2))[rank]
    pipeline = ScheduleZBV([PipelineStage(blocks[stage], stage, 4) for stage in own], 2, nn.functional.mse_loss)
    x, target = whole_batch(4)
    with patch("hp_pipeline.messages._IN_ONE_PIECE", most):
        pipeline.run(x, target=target)
        with record_collectives() as log:
            pipeline.run(x, target=target)
    sends = [record for record in log if record.kind == "send"]
    return len(sends), sum(record.bytes_sent if hasattr(record, "bytes_sent") else record.nbytes for record in sends)


@pytest.mark.parametrize(("most", "count"), [(96, 5), (95, 8)], ids=["in one piece", "in two"])
def test_neighbours_on_one_rank_hand_tensors_over(most: int, count: int) -> None:
    found = run_ranks(2, messages, most)
    # Two micro-batches cross twice forwards and twice backwards, each as a header of 512 bytes and 2 rows of 6 doubles: one
    # after the other, or side by side, but for the first message of a run, which tells how many rows there are.
    assert [number for number, _ in found] == [count, count]
    assert [size for _, size in found] == [4 * (512 + 96)] * 2


def named() -> list[str]:
    """Each class runs the order of its name."""
    import hp_pipeline

    rank, seen = get_rank(), []
    for kind, order in NAMED.items():
        schedule = build_order(order, 2, 3)
        stages = [PipelineStage(blocks_of(schedule.stages)[at], at, schedule.stages) for at in schedule.stages_of(rank)]
        pipeline = getattr(hp_pipeline, kind)(stages, 3, nn.functional.mse_loss)
        x, target = whole_batch(6)
        pipeline.run(x, target=target)
        seen.append(pipeline.schedule.name)
    return seen


NAMED = {
    "ScheduleGPipe": "gpipe",
    "Schedule1F1B": "1f1b",
    "ScheduleInterleaved1F1B": "interleaved1f1b",
    "ScheduleLoopedBFS": "loopedbfs",
    "ScheduleZBH1": "zbh1",
    "ScheduleInterleavedZeroBubble": "interleavedzb",
    "ScheduleZBV": "zbv",
    "ScheduleDualPipeV": "dualpipev",
}


def test_each_public_schedule_runs_its_order() -> None:
    assert set(NAMED.values()) == set(ORDERS)
    assert run_ranks(2, named) == [list(NAMED.values())] * 2
