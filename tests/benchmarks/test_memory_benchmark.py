"""The benchmark of remedies against running out of memory: it runs, and each remedy lowers what it is meant to lower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.memory.remedies import REMEDIES, Remedy, measure

from hp_core.testing import run_ranks

WIDTH, ROWS = 16, 64
KNOWN = ("parameters", "gradients", "optimizer states", "gathered parameters", "gradient buffers", "batch")
SMALL = {remedy.name: replace(remedy, rows=remedy.rows * ROWS // REMEDIES[0].rows) for remedy in REMEDIES}


def measure_all(remedies: Sequence[Remedy]) -> list[dict[str, int]]:
    return [measure(remedy, WIDTH) for remedy in remedies]


def activations(found: dict[str, int]) -> int:
    return found["all"] - sum(found.get(name, 0) for name in KNOWN)


def test_on_one_rank() -> None:
    whole, parts, recomputed = measure_all([remedy for remedy in SMALL.values() if remedy.ranks == 1])
    assert whole["parameters"] == parts["parameters"] == recomputed["parameters"]
    assert activations(parts) < activations(whole) / 2
    assert activations(recomputed) < activations(whole) / 2


def test_on_four_ranks() -> None:
    names = [
        "`fully_shard`",
        "`fully_shard`, recomputation, 4 micro-batches",
        "pipeline, GPipe, 8 micro-batches",
        "pipeline, 1F1B, 8 micro-batches",
    ]
    ranks = run_ranks(4, measure_all, [SMALL[name] for name in names])
    sharded, all_remedies, *_ = ranks[0]
    whole = 8 * (2 * WIDTH + 8 * WIDTH * WIDTH) * 4
    assert whole / 4 <= sharded["parameters"] < whole / 2  # chunks are padded
    assert all_remedies["all"] < sharded["all"]
    assert activations(all_remedies) < activations(sharded) / 2
    gpipe, one_forward_one_backward = (max(activations(found[index]) for found in ranks) for index in (2, 3))
    assert one_forward_one_backward < gpipe
