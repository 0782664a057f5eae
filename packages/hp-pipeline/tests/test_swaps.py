"""Swapped activations: equal to the bit, moved once by storage, and gone from the device in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hp_core.errors import PlanError
from hp_core.platform.torch.storages import StorageTracker
from hp_core.process_group import get_rank, get_world_size
from hp_core.testing import run_ranks
from hp_pipeline import MetaStep, PeerFailed, PipelineSchedule, PipelineStage, Schedule, build_order, insert_swaps
from hp_pipeline.platform.torch.saved import TorchSaved
from hp_pipeline.steps import MetaStepType

_OUT, _IN = MetaStepType.SWAP_OUT, MetaStepType.SWAP_IN
mse = nn.functional.mse_loss
WIDTH, ROWS = 16, 16


class Block(nn.Module):
    """Views, dropout and a buffer among what the graph keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x)).view(len(x), 4, WIDTH).transpose(1, 2).flatten(1)
        return x + nn.functional.dropout(self.down(hidden), 0.25) * self.scale


def stages_of(schedule: Schedule, own: tuple[int, ...]) -> dict[int, nn.Module]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(Block(), Block()) for _ in range(schedule.stages)]
    return {stage: blocks[stage] for stage in own}


def one_run(schedule: Schedule) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """Losses, gradients, and how many swaps there were."""
    rank = get_rank()
    own = stages_of(schedule, schedule.stages_of(rank))
    stages = [PipelineStage(block, stage, schedule.stages) for stage, block in own.items()]
    pipeline = PipelineSchedule(stages, schedule, loss_fn=mse, timeout=20)
    torch.manual_seed(rank + 7)
    batch = torch.linspace(-1, 1, schedule.micro_batches * ROWS * WIDTH).view(-1, WIDTH)
    losses = pipeline.run(batch, target=batch.cos())
    gradients = [parameter.grad for block in own.values() for parameter in block.parameters()]
    moved = sum(step.type is _OUT for step in schedule.steps[rank])
    assert all(stage.bytes_on_host == 0 and stage.in_flight == 0 for stage in stages)
    return losses, gradients, moved  # type: ignore[return-value]


def compared(name: str, micro_batches: int) -> int:
    bare = build_order(name, get_world_size(), micro_batches)
    (losses, gradients, _), (others, other_gradients, moved) = one_run(bare), one_run(insert_swaps(bare, 1))
    assert all(map(torch.equal, losses, others))
    assert len(gradients) == len(other_gradients) > 0
    assert all(map(torch.equal, gradients, other_gradients))
    return moved


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved1f1b", "zbv", "dualpipev"])
def test_swapped_runs_are_equal_to_the_bit(name: str) -> None:
    assert sum(run_ranks(2, compared, name, 5)) > 0


class Watch:
    """Told by the runtime of each step: counts the bytes of activations on the device after it."""

    def __init__(self, stage: PipelineStage, tracker: StorageTracker) -> None:
        self.stage, self.tracker = stage, tracker
        self.steps: list[MetaStepType] = []
        self.on_device: list[int] = []
        self.on_host: list[int] = []

    def begin(self, step: MetaStep) -> None:
        pass

    def end(self, step: MetaStep) -> None:
        alive = self.tracker.bytes_now.get("activations and temporaries", 0)
        self.on_device.append(alive - self.stage.bytes_on_host)
        self.steps.append(step.type)
        if step.type is _OUT:
            self.on_host.append(self.stage.bytes_on_host)


def watched_run(schedule: Schedule, module: nn.Module, batch: torch.Tensor) -> Watch:
    """A run of this rank's only stage."""
    rank = get_rank()
    stage = PipelineStage(module, rank, schedule.stages)
    weights = list(module.parameters())
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    named: dict[str, Any] = {
        "weights": [*weights, *module.buffers(), *(weight.grad for weight in weights)],
        "batch": [batch],
    }
    with StorageTracker(named) as tracker:
        watch = Watch(stage, tracker)
        PipelineSchedule(stage, schedule, loss_fn=lambda y: y.square().mean(), recorder=watch).run(batch)
    return watch


def held() -> list[tuple[list[int], list[int]]]:
    """On one rank, all forwards first: without and with swaps."""
    bare = build_order("gpipe", 1, 6)
    watches = [
        watched_run(schedule, stages_of(schedule, (0,))[0], torch.ones(6 * ROWS, WIDTH))
        for schedule in (bare, insert_swaps(bare, 1))
    ]
    return [(watch.on_device, watch.on_host) for watch in watches]


def test_what_is_swapped_out_is_gone_from_the_device() -> None:
    """Of six micro-batches one stays, one is being made, and one comes back early; all the rest is on the host."""
    (bare, _), (swapped, on_host) = run_ranks(1, held)[0]
    one = bare[0]
    assert max(bare) >= 5.5 * one
    assert max(swapped) <= 3 * one
    assert on_host[0] >= 0.9 * one
    assert on_host == [on_host[0] * (at + 1) for at in range(len(on_host))]


def held_inputs() -> list[int]:
    """Where a stage keeps nothing but what it received, until the first backward."""
    schedule = insert_swaps(build_order("gpipe", 2, 8), 1)
    last = get_rank() == 1
    watch = watched_run(schedule, nn.Linear(WIDTH, 1 if last else WIDTH), torch.ones(8 * 256, WIDTH))
    return watch.on_device[: watch.steps.index(MetaStepType.B)]


def test_received_inputs_leave_the_device_as_well() -> None:
    one = 256 * WIDTH * 4
    assert one < max(run_ranks(2, held_inputs)[1]) < 4 * one


def what_others_hold() -> tuple[list[int], list[int]]:
    """Bytes on the host of two stages on one rank: of the batch, of what one hands to the other, and of an output."""
    schedule = insert_swaps(build_order("loopedbfs", 1, 3, 2), 1)
    modules = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, WIDTH)]
    stages = [PipelineStage(module, index, 2) for index, module in enumerate(modules)]
    seen: tuple[list[int], list[int]] = ([], [])
    pipeline = PipelineSchedule(stages, schedule, loss_fn=lambda y: y.sum())

    class Told:
        """Told of each step."""

        def begin(self, step: MetaStep) -> None:
            pass

        def end(self, step: MetaStep) -> None:
            if step.type is _OUT:
                seen[step.stage].append(stages[step.stage].bytes_on_host)

    pipeline.recorder = Told()
    pipeline.run(torch.ones(3 * ROWS, WIDTH))
    return seen


def test_what_others_hold_as_well_is_not_copied() -> None:
    first, second = run_ranks(1, what_others_hold)[0]
    assert first + second
    assert not any(first + second)


def fails() -> tuple[str, int]:
    """A stage fails while activations are on the host."""
    rank = get_rank()
    schedule = insert_swaps(build_order("gpipe", 2, 4), 1)
    own = stages_of(schedule, (rank,))[rank]
    stage = PipelineStage(own, rank, 2)
    pipeline = PipelineSchedule(stage, schedule, loss_fn=mse, timeout=20)
    batch = torch.ones(4 * ROWS, WIDTH)
    count = 0

    def breaks(module: nn.Module, args: Any) -> None:
        nonlocal count
        count += 1
        if count == 4 and rank == 1:
            raise ValueError("the fourth")

    handle = own.register_forward_pre_hook(breaks)
    with pytest.raises(ValueError if rank else PeerFailed, match="the fourth"):
        pipeline.run(batch, target=batch)
    left = stage.bytes_on_host
    handle.remove()
    losses = pipeline.run(batch, target=batch)
    return ("" if rank == 0 else str(len(losses))), left


def test_after_a_failure_nothing_is_left_on_the_host_and_the_next_run_works() -> None:
    assert run_ranks(2, fails) == [("", 0), ("4", 0)]


def half_registered() -> None:
    schedule = insert_swaps(build_order("gpipe", 1, 3), 1)
    pipeline = PipelineSchedule(PipelineStage(stages_of(schedule, (0,))[0], 0, 1), schedule, loss_fn=lambda y: y.sum())
    seen: list[str] = []
    pipeline.register_custom_function(_OUT, lambda step, walk: seen.append(str(step)))
    with pytest.raises(PlanError, match="give SWAP_IN one as well"):
        pipeline.run(torch.ones(3, WIDTH))
    pipeline.register_custom_function(_IN, lambda step, walk: seen.append(str(step)))
    seen.clear()
    pipeline.run(torch.ones(3, WIDTH))
    assert seen == ["SWAP_OUT0.1", "SWAP_OUT0.2", "SWAP_IN0.1", "SWAP_IN0.2"]


def test_functions_of_the_users_stand_in_for_both_directions() -> None:
    run_ranks(1, half_registered)


def graph(saved: TorchSaved | None, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    def compute() -> torch.Tensor:
        hidden = x @ weight
        return ((hidden * hidden.t()).sin()[1:, ::2] * hidden[1:, ::2].exp()).sum()

    if saved is None:
        return compute()
    with saved.recording():
        return compute()


def leaves() -> tuple[torch.Tensor, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    return x, nn.Parameter(torch.randn(6, 6, generator=generator, dtype=torch.float64))


def test_storages_move_once_with_all_their_views() -> None:
    """Cases 85, 87 and 88: a matrix and its transpose, views whose base isn't saved, strides and offsets."""
    x, weight = leaves()
    plain = torch.autograd.grad(graph(None, x, weight), [x, weight])
    saved = TorchSaved()
    loss = graph(saved, x, weight)
    assert saved.on_host == 0
    saved.move_out()
    # x, hidden (with its transpose and its slice), the product before sin, and of the slices' product both factors, of which
    # the first is a view of the whole sine
    matrix, part = 36 * 8, 5 * 3 * 8
    assert saved.on_host == 4 * matrix + part
    saved.move_in()
    assert saved.on_host == 0
    for found, expected in zip(torch.autograd.grad(loss, [x, weight]), plain, strict=True):
        assert torch.equal(found, expected)


def test_restored_views_share_memory_again() -> None:
    x, weight = leaves()
    saved, found = TorchSaved(), []
    with saved.recording():
        hidden = x @ weight
        loss = (hidden * hidden.t()).sum()
    del hidden
    saved.move_out()
    saved.move_in()
    node = loss.grad_fn.next_functions[0][0]
    found = [node._saved_self, node._saved_other]
    assert found[0].untyped_storage().data_ptr() == found[1].untyped_storage().data_ptr()
    assert found[0].stride() == (6, 1)
    assert found[1].stride() == (1, 6)


def test_weights_and_what_stays_do_not_move() -> None:
    x, weight = leaves()
    saved = TorchSaved()
    saved.stay([x])
    with saved.recording():
        (x @ weight).sum()
    assert saved.on_host == 0
    with saved.recording():
        loss = (x @ weight.t()).sum()  # a view of a weight
    saved.move_out()
    assert saved.on_host == 0
    loss.backward()


@pytest.mark.parametrize("move", [False, True])
def test_a_change_in_place_is_still_refused(move: bool) -> None:
    """Case 91: with hooks autograd doesn't look."""
    x, weight = leaves()
    saved = TorchSaved()
    with saved.recording():
        y = (x @ weight).sigmoid()
        loss = y.sum()
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        (saved.move_out if move else loss.backward)()


def test_a_change_in_place_while_away_changes_nothing() -> None:
    x, weight = leaves()
    plain = torch.autograd.grad((x @ weight).sigmoid().sum(), [x])[0]
    saved = TorchSaved()
    with saved.recording():
        y = (x @ weight).sigmoid()
        loss = y.sum()
    saved.move_out()
    y.detach().zero_()
    saved.move_in()
    assert torch.equal(torch.autograd.grad(loss, [x])[0], plain)


def test_a_backward_without_a_swap_in_says_so() -> None:
    x, weight = leaves()
    saved = TorchSaved()
    loss = graph(saved, x, weight)
    saved.move_out()
    with pytest.raises(PlanError, match="a SWAP_IN step brings them back"):
        loss.backward()


def test_the_graph_frees_what_it_has_passed() -> None:
    x, weight = leaves()
    saved = TorchSaved()
    loss = graph(saved, x, weight)
    loss.backward()
    saved.move_out()
    assert saved.on_host == 0
