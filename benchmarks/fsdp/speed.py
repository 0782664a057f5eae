"""Time of forward and backward, and of a whole step with AdamW, and where it goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.core.sampling import Samples, take_turns
from benchmarks.fsdp.contenders import IN_TURN, NAMES, OURS, TORCH, Contender, contender
from benchmarks.report import Section, at_most, table
from hp_core.platform import get_platform
from hp_core.testing import run_ranks

__all__ = ["BATCH", "LAYERS", "RANKS", "WIDTH", "section"]

RANKS = (2, 4)
WIDTH, LAYERS, BATCH = 512, 6, 64


def section(rounds: int) -> Section:
    """Measure, and tell of it."""
    rows, aims, profile = [], [], []
    for ranks in RANKS:
        results = run_ranks(ranks, measure, rounds, timeout=1200.0)
        passes, steps = (Samples.slowest([result[part] for result in results]) for part in (0, 1))
        for name in NAMES:
            rows.append(
                (
                    f"{ranks}",
                    name,
                    f"{1e3 * passes.median(name):.1f}",
                    passes.both_ratios(name, TORCH),
                    f"{1e3 * steps.median(name):.1f}",
                    steps.both_ratios(name, TORCH),
                )
            )
        aims.append(at_most(f"forward + backward, {ranks} ranks, over FSDP2", passes.paired_ratio(OURS, TORCH), 0.6))
        aims.append(at_most(f"step with AdamW, {ranks} ranks, over FSDP2", steps.paired_ratio(OURS, TORCH), 0.6))
        for name in (OURS, IN_TURN):
            profile += [(f"{ranks}", name, *cells) for cells in results[0][2][name]]
    lines = [
        f"{LAYERS} blocks (LayerNorm, Linear({WIDTH}, {4 * WIDTH}), SiLU, Linear({4 * WIDTH}, {WIDTH})), batch {BATCH} per rank, "
        "milliseconds of the slowest rank of each round. Ratios: of medians / median over rounds.",
        "",
        *table(("ranks", "", "forward + backward", "x FSDP2", "step", "x FSDP2"), rows, left=2),
        "",
        "Where rank 0's main thread spends the forward and backward: medians in milliseconds. Waiting: inside waits for gathers "
        "and reductions (the additions of a reduce-scatter included); the rest is computation, hooks, and what the transport's "
        "threads take from the cores.",
        "",
        *table(("ranks", "", "total", "waiting", "calls that start communication", "rest"), profile, left=2),
    ]
    return Section("Time", tuple(lines), tuple(aims))


def measure(rounds: int, width: int = WIDTH, layers: int = LAYERS) -> tuple[Samples, Samples, dict[str, list[Any]]]:
    """On a rank: all contenders in turns, each on weights of its own."""
    torch.set_num_threads(1)
    contenders = {name: contender(name, width, layers) for name in NAMES}
    x = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(dist.get_rank()))

    def passes(one: Contender) -> Callable[[], object]:
        def run() -> None:
            one.differentiate(x)
            one.optimizer.zero_grad()

        return run

    whole = take_turns(
        {name: lambda one=one: one.step(x) for name, one in contenders.items()}, rounds, 1, meet=dist.barrier
    )
    part = take_turns({name: passes(one) for name, one in contenders.items()}, rounds, 1, meet=dist.barrier)
    profiles = {name: _profile(passes(one)) for name, one in contenders.items() if name != TORCH}
    return part, whole, profiles


def _profile(run: Callable[[], object], repeats: int = 9) -> list[tuple[str, ...]]:
    """Median times of a few runs, by what the main thread does."""
    collectives = get_platform().collectives
    clock, samples = time.perf_counter, []
    spent = {"wait": 0.0, "start": 0.0}

    def timed(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = clock()
            result = function(*args, **kwargs)
            spent[kind] += clock() - begin
            return _TimedWork(result, spent) if kind == "start" and result is not None else result

        return call

    replaced: list[tuple[Any, str, Any]] = []
    for attribute in ("all_gather", "reduce_scatter"):
        replaced.append((collectives, attribute, getattr(collectives, attribute)))
        setattr(collectives, attribute, timed("start", getattr(collectives, attribute)))
    try:
        for _ in range(repeats):
            dist.barrier()
            spent.update(wait=0.0, start=0.0)
            begin = clock()
            run()
            samples.append((clock() - begin, spent["wait"], spent["start"]))
    finally:
        for owner, attribute, original in replaced:
            setattr(owner, attribute, original)
    total, wait, start = (sorted(column)[repeats // 2] for column in zip(*samples, strict=True))
    return [tuple(f"{1e3 * value:.1f}" for value in (total, wait, start, total - wait - start))]


class _TimedWork:
    """A handle whose waits are timed."""

    def __init__(self, work: Any, spent: dict[str, float]) -> None:
        self._work, self._spent = work, spent

    def wait(self) -> None:
        begin = time.perf_counter()
        self._work.wait()
        self._spent["wait"] += time.perf_counter() - begin
