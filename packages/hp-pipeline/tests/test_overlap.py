"""Pairs of a backward and a forward on one rank: the same bits as one after the other, whatever their numbers of exchanges."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hp_core import DTensor, Shard, init_device_mesh, record_collectives
from hp_core.errors import PlanError
from hp_core.platform import get_platform
from hp_core.platform.torch.storages import StorageTracker
from hp_core.process_group import get_rank, group_of_ranks
from hp_core.random import get_rng_state, manual_seed, next_offset
from hp_core.testing import assert_same_error, run_ranks
from hp_pipeline.named import ScheduleDualPipeV
from hp_pipeline.overlap.comm_compute import CommComputeOverlap
from hp_pipeline.run import PipelineSchedule
from hp_pipeline.schedule import Schedule
from hp_pipeline.stage import PipelineStage
from hp_pipeline.steps import MetaStep

WIDTH = 6
Hook = Callable[[str], None]


class Layer(nn.Module):
    """Computes, exchanges, computes with dropout, exchanges back: what a mixture of experts does to a pair.

    `told` is called in every exchange and computation, forward and backward.
    """

    def __init__(self, overlap: CommComputeOverlap | None, told: Hook, parts: bool = False) -> None:
        super().__init__()
        self.before, self.inside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.told = told
        exchange = _mirror(told)
        begin, end = _tell(told, "begins", "ends"), _tell(told, "ends", "begins")
        self.dispatch: Callable[[Any], Any] = exchange
        self.combine: Callable[[Any], Any] = exchange
        if parts and overlap is None:
            self.dispatch = self.combine = lambda x: end(begin(x))
        elif parts:
            self.dispatch = overlap.wrap_dispatch(begin, settle=end)
            self.combine = overlap.wrap_combine(begin, settle=end)
        elif overlap is not None:
            self.dispatch, self.combine = overlap.wrap_dispatch(exchange), overlap.wrap_combine(exchange)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _tell(self.told, "computes", "computes")(self.before(x))
        x = self.dispatch(torch.dropout(x, 0.3, True))
        x = nn.functional.dropout(torch.tanh(self.inside(x)), 0.4)
        next_offset()  # a draw of the library's own generator
        return self.combine(x) + x  # type: ignore[no-any-return]


class _Tell(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, told: Hook, forward: str, backward: str) -> torch.Tensor:
        ctx.told, ctx.word = told, backward
        told(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        ctx.told(ctx.word)
        return gradient.clone(), None, None, None


def _tell(told: Hook, forward: str, backward: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: _Tell.apply(x, told, forward, backward)  # type: ignore[no-any-return, no-untyped-call]


def _mirror(told: Hook) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: _tell(told, "exchanges", "exchanges")(x.flip(0))


class Stages:
    """Two chunks, one whose backward is due and one whose forward is."""

    def __init__(
        self,
        backward: int,
        forward: int,
        overlap: CommComputeOverlap | None,
        recompute: bool = False,
        parts: bool = False,
        told: Hook = lambda word: None,
    ) -> None:
        torch.manual_seed(0)
        manual_seed(3)
        self.told: Hook = told
        self.log: list[str] = []
        self.overlap, self.recompute = overlap, recompute

        def side(word: str) -> None:
            self.log.append(f"{self.side()} {word}")
            self.told(self.log[-1])

        self.first = [Layer(overlap, side, parts) for _ in range(backward)]
        self.second = [Layer(overlap, side, parts) for _ in range(forward)]
        self.ends = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.due = self.chunk(self.first, 0).square().sum()
        self.log.clear()

    def side(self) -> str:
        return "B" if torch._C._current_graph_task_id() != -1 else "F"

    def chunk(self, layers: list[Layer], end: int) -> torch.Tensor:
        x = self.ends[end](torch.randn(5, WIDTH))
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return torch.dropout(x, 0.2, True)

    def backward(self) -> None:
        self.due.backward()  # type: ignore[no-untyped-call]

    def forward(self) -> torch.Tensor:
        return self.chunk(self.second, 1).square().sum()

    def run(self) -> list[torch.Tensor]:
        """All that is to be the same in the end; the forward's own backward included."""
        if self.overlap is None:
            self.backward()
            loss = self.forward()
        else:
            _, loss = self.overlap.run(self.backward, self.forward)
        drawn = [torch.rand(3), torch.tensor(get_rng_state())]
        loss.backward()  # type: ignore[no-untyped-call]
        parameters = [one for part in (*self.first, *self.second, self.ends) for one in part.parameters()]
        return [loss.detach(), *drawn, *(one.grad for one in parameters if one.grad is not None)]


def assert_same(mine: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(mine) == len(other)
    assert all(torch.equal(one, two) for one, two in zip(mine, other, strict=True))


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("parts", [False, True], ids=["whole", "in parts"])
@pytest.mark.parametrize("counts", [(0, 0), (0, 2), (2, 0), (1, 1), (3, 1), (1, 3), (2, 2)], ids=str)
def test_the_same_bits_as_one_after_the_other(counts: tuple[int, int], parts: bool, recompute: bool) -> None:
    """Dropout in both chunks, and draws of both generators, with recomputation too, whose draws put the state back."""
    assert_same(
        Stages(*counts, CommComputeOverlap(20), recompute, parts).run(), Stages(*counts, None, recompute, parts).run()
    )


def test_exchanges_alternate_and_the_other_side_computes_meanwhile() -> None:
    """While the backward is in its first exchange the forward computes up to its own, and so on."""
    stages = Stages(2, 2, CommComputeOverlap(20))
    met = threading.Event()

    def told(word: str) -> None:
        if word == "F computes":
            met.set()
        if word == "B exchanges":
            assert met.wait(5)

    stages.told = told
    assert stages.overlap is not None
    stages.overlap.run(stages.backward, stages.forward)
    assert [word for word in stages.log if "exchanges" in word] == ["B exchanges", "F exchanges"] * 4


def test_in_parts_an_exchange_ends_after_the_other_side_has_begun_its_own() -> None:
    stages = Stages(1, 1, CommComputeOverlap(20), parts=True)
    assert stages.overlap is not None
    stages.overlap.run(stages.backward, stages.forward)
    assert [word for word in stages.log if "computes" not in word] == [
        "B begins",
        "F begins",
        "B ends",
        "B begins",
        "F ends",
        "F begins",
        "B ends",
        "F ends",
    ]


def test_in_parts_nothing_runs_beside_anything() -> None:
    """So the order of all that is called is one and the same, whatever the threads' speed."""
    logs = []
    for seed in range(3):
        pauses = torch.rand(100, generator=torch.Generator().manual_seed(seed)).mul(1e-3).tolist()
        stages = Stages(3, 2, CommComputeOverlap(20), parts=True, told=lambda word, left=pauses: time.sleep(left.pop()))
        assert stages.overlap is not None
        stages.overlap.run(stages.backward, stages.forward)
        logs.append(stages.log)
    assert logs[0] == logs[1] == logs[2]


class Sleeps:
    """Chunks of known length: each of `count` layers computes, then exchanges; then the chunk computes once more."""

    def __init__(self, overlap: CommComputeOverlap, count: int, exchange: float, compute: float, parts: bool) -> None:
        self.count, self.compute = count, compute
        if parts:
            self.exchange: Callable[[], Any] = overlap.wrap_dispatch(
                lambda: time.perf_counter() + exchange,
                settle=lambda end: time.sleep(max(0.0, end - time.perf_counter())),
            )
        else:
            self.exchange = overlap.wrap_dispatch(lambda: time.sleep(exchange))

    def __call__(self) -> None:
        for _ in range(self.count):
            time.sleep(self.compute)
            self.exchange()
        time.sleep(self.compute)


@pytest.mark.parametrize(("backward", "forward", "parts"), [(3, 3, False), (2, 3, True)])
def test_exchanges_hide_behind_computation(backward: int, forward: int, parts: bool) -> None:
    """Sleeps of known length stand for both. At least 80 % of the exchanges that have a partner are hidden."""
    exchange, compute = 0.1, 0.12
    overlap = CommComputeOverlap(20)
    chunks = [Sleeps(overlap, count, exchange, compute, parts) for count in (backward, forward)]
    one_after_the_other = (backward + forward) * exchange + (backward + forward + 2) * compute
    hidden = 0.0
    for _ in range(3):  # a busy machine may oversleep
        start = time.perf_counter()
        overlap.run(*chunks)
        hidden = max(hidden, one_after_the_other - (time.perf_counter() - start))
        if hidden >= 0.8 * 2 * min(backward, forward) * exchange:
            return
    raise AssertionError(f"of {2 * min(backward, forward) * exchange} s only {hidden:.3f} s were hidden")


# -- the second thread -------------------------------------------------------------------------------------------------

mark: ContextVar[str] = ContextVar("mark", default="")


def test_the_second_thread_has_the_settings_of_the_first() -> None:
    overlap = CommComputeOverlap(20)
    seen: dict[str, Any] = {}
    packed: list[int] = []

    def look() -> None:
        leaf = torch.ones(3, requires_grad=True)
        seen.update(
            thread=threading.get_ident(),
            grad=torch.is_grad_enabled(),
            autocast=(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
            mark=mark.get(),
            device=torch.empty(1).device.type,
        )
        with torch.enable_grad():
            seen["kept"] = (leaf.exp(), torch.empty(100_000, device="cpu"))

    tracker = StorageTracker()
    mark.set("here")
    with (
        torch.autocast("cpu", torch.float16),
        torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x.numel()) or x, lambda x: x),
        torch.device("meta"),
        tracker,
        torch.no_grad(),
    ):
        overlap.run(look, lambda: None)
    assert seen.pop("thread") != threading.get_ident()
    kept = seen.pop("kept")
    assert seen == {"grad": False, "autocast": (True, torch.float16), "mark": "here", "device": "meta"}
    assert packed == [3]
    assert tracker.peak >= kept[1].nbytes
    overlap.run(look, lambda: None)  # and nothing of it stays
    assert seen["grad"]
    assert seen["autocast"][0] is False
    assert seen["device"] == "cpu"
    assert packed == [3]


def test_a_backward_that_draws_is_refused() -> None:
    overlap = CommComputeOverlap(20)
    with pytest.raises(PlanError, match=r"B1\.0 drew random numbers of its own"):
        overlap.run(lambda: torch.rand(1), lambda: None, names=("B1.0", "F0.1"))
    with pytest.raises(PlanError, match="drew random numbers"):
        overlap.run(next_offset, lambda: None)
    assert overlap.run(lambda: 1, lambda: torch.rand(1).shape) == (1, (1,))


def test_gradients_that_stop_at_an_exchange() -> None:
    """An exchange whose input needs no gradient has no backward; one with weights of its own has half of one."""
    overlap = CommComputeOverlap(20)
    for make in (lambda x: x * 2, nn.Linear(WIDTH, WIDTH)):
        layer = overlap.wrap_dispatch(make)
        weight = torch.ones(WIDTH, requires_grad=True)
        later = overlap.wrap_combine(lambda x: x * 3)
        due = later(layer(torch.ones(2, WIDTH)) * weight).sum()
        overlap.run(due.backward, lambda layer=layer, later=later: later(layer(torch.ones(2, WIDTH))))
        assert weight.grad is not None


def test_a_recomputation_that_is_stopped_inside_an_exchange_waits_for_its_turn() -> None:
    """A checkpoint recomputes no further than it must, and leaves by an exception."""
    overlap = CommComputeOverlap(20)
    log: list[str] = []
    dispatch = overlap.wrap_dispatch(torch.exp)  # whose result is the last that is kept

    def region(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin(), dispatch(x)

    x = _tell(log.append, "", "B computes")(torch.ones(3, requires_grad=True))
    due = checkpoint(region, x, use_reentrant=False)[0].sum()

    def forward() -> None:
        time.sleep(0.05)
        log.append("F computes")

    log.clear()
    overlap.run(due.backward, forward)
    assert [word for word in log if word] == ["F computes", "B computes"]


def test_results_may_be_written_to_in_place() -> None:
    overlap = CommComputeOverlap(20)
    x = torch.ones(3, requires_grad=True)
    y, number, z = overlap.wrap_dispatch(lambda x: ({"a": x * 2}, 5, x * 3))(x)
    (y["a"].mul_(2) + z.add_(number)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [7, 7, 7]


def test_an_error_inside_the_graph_is_raised() -> None:
    """In the backward of an exchange."""

    def fail(word: str) -> None:
        if word == "B exchanges":
            raise KeyError("lost")

    overlap = CommComputeOverlap(20)
    stages = Stages(2, 2, overlap)
    stages.told = fail
    with pytest.raises(KeyError, match="lost"):
        overlap.run(stages.backward, stages.forward)


# -- on several ranks --------------------------------------------------------------------------------------------------


class AllToAll(torch.autograd.Function):
    """A blocking exchange of equal parts, after a pause, and the same for the gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, pause: Callable[[], None]) -> torch.Tensor:
        ctx.group, ctx.pause = group, pause
        pause()
        received = torch.empty_like(x)
        get_platform().collectives.all_to_all(received.view(-1), x.contiguous().view(-1), (), (), group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return AllToAll.apply(gradient, ctx.group, ctx.pause), None, None  # type: ignore[no-untyped-call]


def blocking(counts: tuple[int, int]) -> bool:
    """Whether pairs, delayed at random, give on this rank what one after the other gives."""
    draws = random.Random(get_rank())
    group = group_of_ranks((0, 1), "experts")

    def pause() -> None:
        time.sleep(draws.choice((0, 0, 1e-3, 3e-3)))

    def run(overlap: CommComputeOverlap | None) -> list[torch.Tensor]:
        stages = Stages(*counts, None, told=lambda word: pause())
        stages.overlap = overlap

        def exchange(x: torch.Tensor) -> torch.Tensor:
            return AllToAll.apply(x, group, pause)  # type: ignore[no-any-return, no-untyped-call]

        for layer in (*stages.first, *stages.second):
            layer.dispatch = exchange if overlap is None else overlap.wrap_dispatch(exchange)
            layer.combine = exchange if overlap is None else overlap.wrap_combine(exchange)
        stages.due = stages.chunk(stages.first, 0).square().sum()
        return stages.run()

    plain = run(None)
    overlap = CommComputeOverlap(20)
    return all(torch.equal(one, two) for _ in range(3) for one, two in zip(run(overlap), plain, strict=True))


@pytest.mark.parametrize("counts", [(2, 2), (1, 3), (3, 1), (0, 2)], ids=str)
def test_blocking_exchanges_of_two_ranks_meet(counts: tuple[int, int]) -> None:
    assert run_ranks(2, blocking, counts) == [True, True]


def distributed() -> list[bool]:
    """Whether gradients of a distributed tensor pass an exchange, in a pair."""
    mesh, overlap = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)), CommComputeOverlap(20)
    found = []
    for settle in (None, lambda tensor: tensor):
        exchange = overlap.wrap_dispatch(lambda x: x.redistribute(mesh, [Shard(1)]), settle=settle)
        local = torch.randn(2, 4, requires_grad=True)
        result = exchange(DTensor.from_local(local, mesh, [Shard(0)]))
        due = (result * result).redistribute(mesh, [Shard(0)]).to_local().sum()
        with record_collectives() as log:
            overlap.run(due.backward, lambda exchange=exchange, result=result: exchange(result))
        assert local.grad is not None
        found += [result.placements == (Shard(1),), torch.allclose(local.grad, 2 * local), len(log) == 2]
    return found


def test_exchanges_of_distributed_tensors() -> None:
    assert run_ranks(2, distributed) == [[True] * 6] * 2


def split_backwards() -> bool:
    """Whether pairs of a forward and the first part of a backward give what one after the other gives."""
    text = """schedule own micro_batches=2 placement=0,0
    0: F0.0 F1.0 OVERLAP_B_F(I1.0,F0.1) OVERLAP_B_F(I0.0,F1.1) W1.0 W0.0 B1.1 B0.1"""
    found = []
    for overlaps in (True, False):
        overlap, log = CommComputeOverlap(20), list[str]()
        torch.manual_seed(0)
        stages = [PipelineStage(Layer(overlap, log.append, parts=True), index, 2) for index in range(2)]
        pipeline = PipelineSchedule(
            stages, Schedule.from_text(text), loss_fn=nn.functional.mse_loss, timeout=20, overlap=overlaps
        )
        losses = pipeline.run(torch.randn(6, WIDTH), target=torch.randn(6, WIDTH))
        found.append([*losses, *(one.grad for stage in stages for one in stage.submodule.parameters())])
    return all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_split_backwards_in_pairs() -> None:
    assert run_ranks(1, split_backwards) == [True]


def failing(fails: int) -> list[str]:
    """Errors of two runs of a pipeline in which the forward or the backward of a pair fails on rank 1 the first time."""
    overlap, rank, errors = CommComputeOverlap(20), get_rank(), []
    broken = [rank == 1]
    steps: list[MetaStep] = []

    def told(word: str) -> None:
        if broken[0] and steps and steps[-1].parts is not None and word == ("B exchanges", "F exchanges")[fails]:
            broken[0] = False
            raise KeyError("lost")

    def side(word: str) -> None:
        told(("B " if torch._C._current_graph_task_id() != -1 else "F ") + word)

    class Steps:
        def begin(self, step: MetaStep) -> None:
            steps.append(step)

        def end(self, step: MetaStep) -> None:
            return None

    stages = [PipelineStage(Layer(overlap, side), index, 4) for index in (rank, 3 - rank)]
    pipeline = ScheduleDualPipeV(stages, 6, nn.functional.mse_loss, timeout=20, recorder=Steps())
    for _ in range(2):
        try:
            pipeline.run(torch.ones(30, WIDTH), target=torch.ones(30, WIDTH))
            errors.append("")
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


@pytest.mark.parametrize("fails", [0, 1], ids=["backward", "forward"])
def test_an_error_in_a_pair_reaches_the_other_rank_and_the_next_run_is_clean(fails: int) -> None:
    (first, first_again), (second, second_again) = run_ranks(2, failing, fails)
    assert second == "KeyError: 'lost'"
    assert first.startswith("PeerFailed: rank 1 failed in step OVERLAP_B_F(")
    assert "KeyError: 'lost'" in first
    assert first_again == second_again == ""


def refused() -> None:
    one, two = CommComputeOverlap(), CommComputeOverlap()
    stages = [PipelineStage(Layer(overlap, lambda word: None), index, 2) for index, overlap in enumerate((one, two))]
    ScheduleDualPipeV(stages, 2, nn.functional.mse_loss)


def test_stages_of_a_rank_share_one_object() -> None:
    assert_same_error(1, refused, PlanError, "several CommComputeOverlap; wrap all of a rank by one")
