"""Time of a step, ours beside torch's, schedule by schedule, and beside what the stages compute."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from benchmarks.core.sampling import Samples, take_turns
from benchmarks.pipeline.contenders import OURS, SHARED, TORCH, Size, contender
from benchmarks.report import Section, at_most, table
from hp_core.testing import run_ranks
from hp_pipeline import Schedule, build_order, simulate

__all__ = ["RANKS", "SIZE", "section"]

RANKS = (2, 4)
SIZE = Size()
COMPUTE = "compute"
IDEAL = 1.05


def section(rounds: int) -> Section:
    """Measure, and tell of it."""
    rows, aims = [], []
    for ranks in RANKS:
        found = run_ranks(ranks, measure, rounds, timeout=1200.0)
        for order in SHARED:
            samples = Samples.slowest([of_rank[order] for of_rank in found])
            schedule = build_order(order, ranks, SIZE.micro_batches)
            ideal = samples.median(COMPUTE) * stretch(schedule)
            ratio = samples.paired_ratio(OURS, TORCH)
            over_ideal = samples.paired_ratio(OURS, COMPUTE) / stretch(schedule)
            rows.append(
                (
                    f"{ranks}",
                    order,
                    *(f"{1e3 * samples.median(name):.1f}" for name in (OURS, TORCH)),
                    samples.both_ratios(OURS, TORCH),
                    f"{1e3 * ideal:.1f}",
                    f"{over_ideal:.2f}",
                    f"{samples.paired_ratio(TORCH, COMPUTE) / stretch(schedule):.2f}",
                )
            )
            aims.append(at_most(f"step, {order}, {ranks} ranks, over torch", ratio, 1.0))
            if order == "1f1b" and ranks == 2:
                aims.append(at_most("step, 1f1b, 2 ranks, over ideal", over_ideal, IDEAL))
    lines = [
        f"{SIZE.blocks} blocks (LayerNorm, Linear({SIZE.width}, {4 * SIZE.width}), SiLU, Linear({4 * SIZE.width}, {SIZE.width})), "
        f"{SIZE.micro_batches} micro-batches of {SIZE.rows} rows; forward and backward, milliseconds of the slowest rank of each "
        "round. Ratios: of medians / median over rounds. Ideal: what the slowest rank's stages compute by themselves, all ranks "
        "doing so at a time, stretched by the schedule's bubble (forward : backward = 1 : 2); for GPipe and 1F1B that is "
        "(M + P - 1) / M. Where there are more ranks than cores, a rank that waits gives its core to others, so that steps take "
        "less than ideal.",
        "",
        *table(
            ("ranks", "schedule", OURS, TORCH, "x torch", "ideal", f"{OURS} x ideal", "torch x ideal"), rows, left=2
        ),
    ]
    return Section("Time", tuple(lines), tuple(aims))


def stretch(schedule: Schedule) -> float:
    """Length of a step over what a rank computes in it, for unit costs."""
    simulated = simulate(schedule)
    return simulated.step_time / max(simulated.busy)


def measure(rounds: int, size: Size = SIZE) -> dict[str, Samples]:
    """On a rank: for each schedule both contenders and the bare computation in turns."""
    torch.set_num_threads(1)
    found: dict[str, Samples] = {}
    for order in SHARED:
        ours, theirs = contender(OURS, order, size), contender(TORCH, order, size)
        turns: dict[str, Any] = {
            OURS: ours.step,
            TORCH: theirs.step,
            COMPUTE: lambda one=ours: one.compute(size.micro_batches),
        }
        found[order] = take_turns(turns, rounds, 1, meet=dist.barrier)
    return found
