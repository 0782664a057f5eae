"""The timeline example: prediction and reality in one picture and one trace, for orders and schedules from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pipeline_timeline import main

from hp_pipeline import build_order


def run(flags: list[str], out: Path) -> tuple[str, list[dict[str, Any]]]:
    result = CliRunner().invoke(main, [*flags, "--micro-batches", "3", "--runs", "1", "--out", str(out)])
    assert result.exit_code == 0, result.output + str(result.exception)
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG\r\n")
    return result.output, json.loads(out.with_suffix(".json").read_text())["traceEvents"]


def steps_by_process(trace: list[dict[str, Any]]) -> dict[str, list[str]]:
    names = {event["pid"]: event["args"]["name"] for event in trace if event["name"] == "process_name"}
    found: dict[str, list[str]] = {name: [] for name in names.values()}
    for event in sorted((event for event in trace if event["ph"] == "X"), key=lambda event: event["ts"]):
        if event["cat"] in ("F", "B", "I", "W"):
            found[names[event["pid"]]].append(event["name"])
    return found


def test_sleeping_stages_are_predicted_and_recorded(tmp_path: Path) -> None:
    output, trace = run(["--schedule", "zbv", "--sleep", "4"], tmp_path / "zbv")
    assert "predicted" in output
    assert "real" in output
    steps = steps_by_process(trace)
    order = build_order("zbv", 4, 3)
    for rank in range(4):
        assert steps[f"rank {rank} (predicted)"] == steps[f"rank {rank} (real)"] == list(map(str, order.steps[rank]))
    slept = [event["dur"] for event in trace if event["ph"] == "X" and event["cat"] in ("F", "W")]
    assert min(slept) >= 3990, "microseconds that a stage sleeps, predicted and real"


def test_computing_stages_of_a_schedule_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(build_order("gpipe", 2, 3).to_text())
    small = ["--layers", "2", "--d-model", "16", "--rows", "1"]
    _, trace = run(["--schedule", str(file), "--ranks", "2", *small], tmp_path / "mine")
    assert steps_by_process(trace)["rank 1 (real)"] == ["F1.0", "F1.1", "F1.2", "B1.0", "B1.1", "B1.2"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--schedule", "fast"], "there is no schedule 'fast'; there are gpipe, 1f1b"),
        (["--schedule", "zbv", "--layers", "7"], "--layers 7: 8 stages need at least a layer each"),
        (["--ranks", "0"], "0 is not in the range"),
    ],
)
def test_wrong_flags_are_refused(flags: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, [*flags, "--out", str(tmp_path / "none")])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
    assert not list(tmp_path.iterdir())


def test_a_schedule_for_other_ranks_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(build_order("gpipe", 2, 3).to_text())
    result = CliRunner().invoke(main, ["--schedule", str(file)])
    assert result.exit_code == 2
    assert "is for 2 ranks, not 4" in " ".join(result.output.split())
