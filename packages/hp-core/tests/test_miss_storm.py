"""The warning about calls that never hit a cache: once, late enough, naming what differs."""

from __future__ import annotations

import logging

import pytest

from hp_core.miss_storm import MissStorm, difference


@pytest.fixture
def storm() -> MissStorm:
    return MissStorm("plans", "Pass a tensor.", threshold=4)


def test_warns_once_and_says_what_differs(storm: MissStorm, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hp_core"):
        for step in range(3):
            storm.missed("view", "view", ("view", (8, 4), (int, step)))
            storm.missed("cat", "cat", ("cat", step))
        assert not caplog.records
        for step in range(3, 20):
            storm.missed("view", "view", ("view", (8, 4), (int, step)))
    [record] = caplog.records
    assert record.getMessage() == (
        "view has missed the cache of plans 4 times: its calls differ, last by 2 before, 3 now. Pass a tensor."
    )


def test_a_cleared_cache_counts_anew(storm: MissStorm, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hp_core"):
        for _ in range(2):
            storm.clear()
            for step in range(4):
                storm.missed("view", "view", step)
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ((1, (2, 3)), (1, (2, 4)), "3 before, 4 now"),
        ((1, 2), (1, 2, 3), "(1, 2) before, (1, 2, 3) now"),
        ("a", "b", "'a' before, 'b' now"),
        ((1, 2), (1, 2), "(1, 2) before, (1, 2) now"),
    ],
)
def test_the_first_difference_is_told(before: object, after: object, text: str) -> None:
    assert difference(before, after) == text
