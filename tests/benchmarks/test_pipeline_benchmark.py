"""The benchmark of hp-pipeline runs, its contenders compute the same, and what can be counted is what the design promises.

Small models, one round: nothing here is about time.
"""

from __future__ import annotations

import math

import pytest
from benchmarks.core.sampling import count_calls
from benchmarks.pipeline import building, counts, predicted, speed
from benchmarks.pipeline.contenders import OURS, SHARED, TABLED, TORCH, Size

from hp_core.testing import run_ranks
from hp_pipeline import ORDERS, Schedule, build_order, overlap_communication, validate

SMALL = Size(width=8, rows=2, micro_batches=4)


def test_times_are_finite_and_told_of_all_contenders() -> None:
    for found in run_ranks(2, speed.measure, 1, SMALL):
        assert set(found) == set(SHARED)
        for samples in found.values():
            assert set(samples.rounds) == {OURS, TORCH, "compute"}
            assert all(0 < took < math.inf for rounds in samples.rounds.values() for took in rounds)
    assert speed.stretch(build_order("1f1b", 2, 8)) == pytest.approx(9 / 8)


def test_counts_are_those_of_the_schedule_and_gradients_are_torchs() -> None:
    found = run_ranks(2, counts.measure, SMALL)
    for order in SHARED:
        sends = [text for text in _texts(order, SMALL.micro_batches) if text.startswith("SEND")]
        ways = {text.partition(".")[0] for text in sends if text.startswith("SEND_F")}
        ours, theirs = ([of_rank[order][name] for of_rank in found] for name in (OURS, TORCH))
        # As many as torch, each with its header; the first of a run on each way forward comes after its header.
        assert sum(one["messages"] for one in ours) == len(sends) + len(ways)
        assert sum(one["messages"] for one in theirs) == len(sends)
        assert all(of_rank[order]["difference"] < 1e-12 for of_rank in found)
        assert max(one["python"] for one in ours) < max(one["python"] for one in theirs)


def test_bubbles_are_those_of_the_formulas_and_no_larger_than_torchs() -> None:
    for order in predicted.FORMULAS:
        for ranks, micro_batches in ((2, 8), (4, 16)):
            as_told, ours, theirs = predicted.compared(order, ranks, micro_batches)
            assert as_told, order
            assert (theirs is not None) == (order in TABLED)
            assert theirs is None or ours <= theirs


@pytest.mark.parametrize("order", ORDERS)
def test_large_schedules_are_built_and_proven_with_few_calls_per_step(order: str) -> None:
    found: list[Schedule] = []

    def prove() -> None:
        found.append(overlap_communication(build_order(order, 8, 64)))
        validate(found[-1])

    calls = count_calls(prove, warm=0)
    steps = sum(map(len, found[-1].steps))
    # A second is 2 microseconds for each of the half million steps of 64 ranks and 512 micro-batches.
    assert calls.python < 3 * steps
    assert calls.native < 13 * steps


def test_building_is_told_by_parts() -> None:
    steps, times = building.built("zbv", 4, 8)
    assert steps == len(_texts("zbv", 8, 4))
    assert len(times) == len(building.PARTS)
    assert all(0 <= took < math.inf for took in times)


def _texts(order: str, micro_batches: int, ranks: int = 2) -> list[str]:
    schedule = overlap_communication(build_order(order, ranks, micro_batches))
    return [str(step) for steps in schedule.steps for step in steps]
