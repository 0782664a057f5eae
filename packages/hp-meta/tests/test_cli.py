"""The command: what it prints and writes, how it says what is wrong, and that it loads no framework."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hyper_parallel.cli import main


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(main, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


SMALL = ("schedule", "--stages", "2", "--micro-batches", "3")


def test_version_lists_every_component_and_framework() -> None:
    lines = run("--version").output.splitlines()
    assert [line.split()[0] for line in lines] == [
        *(
            "hyper-parallel",
            "hp-core",
            "hp-cp",
            "hp-fsdp",
            "hp-kernels",
            "hp-pipeline",
            "hp-swap",
            "torch",
            "torch-npu",
            "mindspore",
        )
    ]
    assert all(len(line.split()) >= 2 for line in lines)


def test_version_copes_with_components_that_are_missing_or_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hp_swap-0.1.0.dist-info").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    lines = dict(line.split(" ", 1) for line in run("--version").output.splitlines())
    assert lines["hp-swap"] == "(damaged: its metadata is missing)"
    assert lines["hp-core"] == lines["torch"] == "(not installed)"


def test_schedule_prints_grid_bubble_and_peak_memory() -> None:
    output = run(*SMALL, "--name", "1f1b").output
    assert "rank 0 F0 F1 .  .  B0    F2 B1    .  B2\nrank 1 .  F0 B0    F1 B1    F2 B2    .  .\n" in output
    assert "step time 12, bubble 25.0%" in output
    assert output.splitlines()[-2].split() == "0 9 3 2 1 waiting for rank 1 3".split()
    assert "rank 0" not in run(*SMALL, "--name", "1f1b", "--no-grid").output


def test_costs_change_the_prediction() -> None:
    output = run(*SMALL, "--name", "gpipe", "--costs", "2,1,0.5", "--latency", "0.25", "--activation", "3,1").output
    assert "step time 14.5" in output
    assert output.splitlines()[-2].split()[3] == "9"


def test_a_schedule_is_printed_with_its_communication_and_read_back(tmp_path: Path) -> None:
    output = run(*SMALL, "--name", "zbv", "--rendezvous", "--text", "--critical-path").output
    text = output[: output.index("\n\n")]
    assert text.startswith("schedule ")
    assert "SEND_F0.0" in text
    file = tmp_path / "zbv.txt"
    file.write_text(text, encoding="utf-8")
    again = run("schedule", "--file", str(file), "--rendezvous", "--text", "--critical-path")
    assert again.output == output


def test_picture_and_trace_are_written(tmp_path: Path) -> None:
    picture, trace = tmp_path / "p.svg", tmp_path / "t.json"
    assert run(*SMALL, "--name", "1f1b", "--plot", str(picture), "--trace", str(trace), "--unit", "1").exit_code == 0
    assert "<svg" in picture.read_text(encoding="utf-8")[:2000]
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert max(event["ts"] + event["dur"] for event in events if event["ph"] == "X") == 12e6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*SMALL,), "--name: missing"),
        (("schedule",), "--name, --stages, --micro-batches: missing"),
        ((*SMALL, "--name", "zbx"), "there is no schedule 'zbx'; there are gpipe, 1f1b"),
        ((*SMALL, "--name", "zbv", "--chunks", "3"), "zbv has 2 stage(s) per rank, not 3"),
        ((*SMALL, "--name", "1f1b", "--costs", "1,1"), "'1,1' has 2 numbers; 3 are needed"),
        ((*SMALL, "--name", "1f1b", "--costs", "1,x,1"), "'1,x,1' should be numbers"),
        ((*SMALL, "--name", "1f1b", "--costs", "1,-1,1"), "input_gradient = -1.0 should be finite and >= 0"),
        ((*SMALL, "--name", "1f1b", "--activation", "1,2,3"), "activation has 3 values, but the pipeline has 2 stages"),
        (("schedule", "--stages", "0", "--micro-batches", "3", "--name", "1f1b"), "0 is not in the range x>=1"),
        ((*SMALL, "--file", __file__), "--file says everything"),
        (("schedule", "--file", __file__), "the text of a schedule begins with"),
    ],
)
def test_usage_errors_say_what_is_wrong(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_a_schedule_with_a_skip_connection_is_read(tmp_path: Path) -> None:
    from hp_pipeline import build_order, insert_communication

    file = tmp_path / "skip.txt"
    file.write_text(insert_communication(build_order("1f1b", 3, 2), skips=[(0, 2)]).to_text(), encoding="utf-8")
    result = run("schedule", "--file", str(file), "--rendezvous")
    assert result.exit_code == 0, result.output
    assert "3 ranks, 3 stages, 2 micro-batches" in result.output


def test_a_schedule_that_deadlocks_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "bad.txt"
    file.write_text(
        "schedule bad micro_batches=1 placement=0,1\n0: F0.0 RECV_B0.0 SEND_F0.0 B0.0\n1: RECV_F1.0 F1.0 B1.0 SEND_B1.0\n",
        encoding="utf-8",
    )
    result = run("schedule", "--file", str(file))
    assert result.exit_code == 2
    assert "RECV_B0.0" in result.output


def test_a_place_that_cannot_be_written_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    for option, name in (("--trace", "missing/t.json"), ("--plot", "missing/p.png"), ("--plot", "p.unknown")):
        result = run(*SMALL, "--name", "1f1b", option, str(tmp_path / name))
        assert result.exit_code == 1
        assert "it can't be written" in result.output


def test_without_the_component_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == "hp_pipeline"]:
        monkeypatch.delitem(sys.modules, module)

    class Absent:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "hp_pipeline":
                raise ModuleNotFoundError("No module named 'hp_pipeline'", name=name)

    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    result = run(*SMALL, "--name", "1f1b")
    assert result.exit_code == 1
    assert "pip install hp-pipeline" in result.output
    assert run("--version").exit_code == 0


def test_no_framework_is_loaded() -> None:
    program = (
        "import sys; from click.testing import CliRunner; from hyper_parallel.cli import main\n"
        f"result = CliRunner().invoke(main, {[*SMALL, '--name', 'zbv', '--rendezvous']!r})\n"
        "assert result.exit_code == 0, result.output\n"
        "print(sorted({'torch', 'mindspore', 'matplotlib', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_module_runs_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hyper_parallel.cli", "schedule", "--help"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("Usage: hyper-parallel schedule")
