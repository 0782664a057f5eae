"""The benchmark of hp-core runs, gives numbers, and its table of transitions holds what the design promises.

One round each: nothing here is about time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.core import mlp, operators, overhead, redistribute, transitions
from benchmarks.core.sampling import Samples, count_calls, take_turns
from benchmarks.imports import run as imports
from benchmarks.report import BY_HAND, Section, at_least, at_most, page, write_page

SMALL = [transitions.Case((2, 2), (16, 16)), transitions.Case((2, 2), (13, 7))]


def numbers(section: Section) -> list[float]:
    """All numbers in the cells of a section's tables."""
    cells = [cell for line in section.lines if line.startswith("|") for cell in line.split("|")]
    parts = [part for cell in cells for part in cell.replace("/", " ").replace("+", " ").split()]
    found = []
    for part in parts:
        try:
            found.append(float(part))
        except ValueError:
            continue
    return found


@pytest.mark.parametrize(
    ("section", "least"),
    [
        (overhead.section, 3 * 6),
        (operators.section, 50 * 8),
        (redistribute.section, 5 * 4 * 3),
        (mlp.section, 3 * 3 * 3),
        (imports.section, 2 * 3),
    ],
    ids=["overhead", "operators", "redistribute", "mlp", "imports"],
)
def test_a_timed_table_runs_and_is_finite(section: Callable[[int], Section], least: int) -> None:
    measured = section(1)
    found = numbers(measured)
    assert len(found) >= least
    assert all(map(math.isfinite, found))


def test_transitions_are_optimal_and_never_above_torch() -> None:
    for case, found in zip(SMALL, transitions.measure(SMALL), strict=True):
        assert len(found) == 16 * 15
        for bytes_first in (False, True):
            assert [one for one in found if one.ours[bytes_first] != one.optimum[bytes_first]] == []
            assert [one for one in found if one.against_torch(bytes_first) > 0] == []
            # torch must lose somewhere, or nothing was compared
            assert any(one.against_torch(bytes_first) < 0 for one in found)
        assert transitions.differing_from_wire(case, found) == 0


def test_contenders_take_turns_and_ratios_are_taken_within_a_round() -> None:
    order: list[str] = []
    samples = take_turns({name: lambda name=name: order.append(name) for name in "abc"}, rounds=3, calls=2)  # type: ignore[misc]
    assert sorted(order) == sorted("abc" * 2 * (3 + 1))
    assert [sorted(order[start : start + 6]) for start in range(0, 24, 6)] == [sorted("aabbcc")] * 4
    assert {len(took) for took in samples.rounds.values()} == {3}

    burst = Samples({"a": [2.0, 20.0, 4.0], "b": [1.0, 10.0, 1.0]})
    assert burst.ratio("a", "b") == 4.0
    assert burst.paired_ratio("a", "b") == 2.0
    other = Samples({"a": [3.0, 1.0, 4.0], "b": [1.0, 1.0, 2.0]})
    assert Samples.slowest([burst, other]).rounds == {"a": [3.0, 20.0, 4.0], "b": [1.0, 10.0, 2.0]}
    assert Samples.pooled([burst, other]).rounds["b"] == [1.0, 10.0, 1.0, 1.0, 1.0, 2.0]


def test_function_calls_are_counted_exactly() -> None:
    def inner() -> int:
        return abs(-1)

    def outer() -> int:
        return inner() + inner()

    assert (count_calls(outer).python, count_calls(outer).native) == (2, 2)


def test_a_page_tells_aims_and_keeps_what_was_written_by_hand(tmp_path: Path) -> None:
    aims = (at_most("cost", 1.5, 1.2), at_least("gain", 3.5, 3.0))
    assert [aim.verdict for aim in aims] == ["**missed** by 25 %", "met"]
    text = page("A page", "`command`", ["no-such-package"], [Section("Part", ("line",), aims)])
    path = tmp_path / "results" / "page.md"
    write_page(path, text)
    assert "| cost | <= 1.2x | 1.50x | **missed** by 25 % |" in path.read_text()
    assert path.read_text().endswith(BY_HAND + "\n")
    path.write_text(path.read_text() + "\nThe machine was cold.\n")
    write_page(path, text.replace("line", "new line"))
    assert "new line" in path.read_text()
    assert path.read_text().endswith("\n\nThe machine was cold.\n")
    assert path.read_text().count("cold") == 1
