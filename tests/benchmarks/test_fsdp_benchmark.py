"""The benchmark of hp-fsdp runs, its contenders compute the same, and what can be counted is what the design promises.

Small models, one round: nothing here is about time.
"""

from __future__ import annotations

import math

from benchmarks.fsdp import counts, memory, speed
from benchmarks.fsdp.contenders import IN_TURN, NAMES, OURS, TORCH

from hp_core.testing import run_ranks

WIDTH, LAYERS = 16, 3


def test_times_are_finite_and_told_of_all_contenders() -> None:
    for passes, steps, profiles in run_ranks(2, speed.measure, 1, WIDTH, LAYERS):
        for samples in (passes, steps):
            assert set(samples.rounds) == set(NAMES)
            assert all(0 < took < math.inf for rounds in samples.rounds.values() for took in rounds)
        assert set(profiles) == {OURS, IN_TURN}


def test_counts_are_those_of_the_design_and_all_train_alike() -> None:
    for found in run_ranks(2, counts.measure, WIDTH, LAYERS):
        for name in (OURS, IN_TURN):
            assert found[name]["all_gather"] == 2 * LAYERS - 1
            assert found[name]["reduce_scatter"] == LAYERS
            assert found[name]["copied"] == 0
            assert found[name]["python"] < 300 * LAYERS
        assert found[TORCH]["copied"] > 0  # else nothing was counted
        assert all(found[name]["error"] < 1e-12 for name in NAMES)


def test_memory_is_told_by_what_it_is() -> None:
    for name in (OURS, TORCH):
        for found in run_ranks(2, memory.measure, name, WIDTH, LAYERS):
            assert found["peak"] == sum(found["at_peak"].values())
            assert found["at_peak"]["shards"] > 0
            assert found["at_peak"]["optimizer"] > found["at_peak"]["shards"]
    assert found["at_peak"].get("gathered", 0) == 0  # torch's are not known by name
