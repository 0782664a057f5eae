"""How long it takes to build, connect and prove large schedules, and to simulate them."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.report import Section, at_most, table
from hp_pipeline import ORDERS, Costs, Schedule, build_order, overlap_communication, simulate, validate

__all__ = ["MICRO_BATCHES", "PARTS", "RANKS", "built", "section"]

RANKS, MICRO_BATCHES = 64, 512
PARTS = ("compute order", "sends and receives", "validation", "simulation")
COSTS = Costs(latency=0.05, message_bytes=1.0, bandwidth=20.0)
REPEATS = 3


def section(rounds: int) -> Section:
    """Measure, and tell of it."""
    rows, aims = [], []
    for order in ORDERS:
        taken = [built(order, RANKS, MICRO_BATCHES) for _ in range(min(rounds, REPEATS))]
        parts = [median(each) for each in zip(*(times for _, times in taken), strict=True)]
        proven = median(sum(times[:3]) for _, times in taken)
        rows.append(
            (order, f"{taken[0][0]}", *(f"{part:.2f}" for part in parts[:3]), f"{proven:.2f}", f"{parts[3]:.2f}")
        )
        aims.append(at_most(f"build and prove {order}, P = {RANKS}, M = {MICRO_BATCHES}", proven, 1.0, " s"))
        aims.append(at_most(f"simulate {order}, P = {RANKS}, M = {MICRO_BATCHES}", parts[3], 2.0, " s"))
    lines = [
        f"P = {RANKS}, M = {MICRO_BATCHES}; seconds of processor time of one process, medians. Simulated with sends and receives, "
        "latency and bandwidth.",
        "",
        *table(("schedule", "steps", *PARTS[:3], "built and proven", PARTS[3]), rows),
    ]
    return Section("Building", tuple(lines), tuple(aims))


def built(order: str, ranks: int, micro_batches: int) -> tuple[int, list[float]]:
    """The number of steps, and the processor time of each of `PARTS`."""
    found: list[Any] = []
    times = []
    parts: tuple[Callable[[], Any], ...] = (
        lambda: build_order(order, ranks, micro_batches),
        lambda: overlap_communication(found[-1]),
        lambda: validate(found[1]),
        lambda: simulate(found[1], COSTS),
    )
    for part in parts:
        start = time.process_time()
        found.append(part())
        times.append(time.process_time() - start)
    schedule: Schedule = found[1]
    return sum(map(len, schedule.steps)), times
