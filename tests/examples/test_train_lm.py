"""The example as a person runs it: its files, resuming, the check, and flags that are refused on every rank.

Bad flags are tried on ranks that have no process group, so that nothing could have been communicated.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from lm.checkpoint import find_start
from lm.compare import TOLERANCES
from lm.config import ModelSizes, RunConfig, parse_mesh
from lm.parallel import build_mesh
from lm.report import read_metrics
from lm.text import load_standard_library
from train_lm import main, train

from hp_core.testing import run_ranks

SCRIPT = Path(__file__).parents[2] / "examples" / "train_lm.py"
SIZES = ModelSizes(d_model=32, layers=1, heads=4, d_hidden=64, sequence=32)
TINY = RunConfig(
    sizes=SIZES,
    dtype="float64",
    steps=6,
    batch=8,
    warmup=2,
    max_bytes=300_000,
    eval_every=4,
    eval_batches=1,
)
TINY_FLAGS = [
    *("--d-model", "32", "--layers", "1", "--d-hidden", "64", "--sequence", "32", "--batch", "8"),
    *("--max-bytes", "300000", "--warmup", "2", "--eval-batches", "1"),
]
# What a resumed run must repeat to the bit; the rest of a line are times and memory.
EXACT = ("step", "loss", "lr", "gradient_norm", "validation_loss")


def run(config: RunConfig, folder: Path, save_every: int = 0, resume: bool = False) -> None:
    """One run of the example, on a rank or in one process."""
    start = find_start(folder, config, resume)
    text = load_standard_library(config.max_bytes, config.sizes.sequence)
    train(config, text, build_mesh(config) if config.mesh else None, folder, save_every, start)


def exact_metrics(folder: Path) -> list[dict[str, float]]:
    return [{key: line[key] for key in EXACT if key in line} for line in read_metrics(folder / "metrics.jsonl")]


def interrupted_copy(folder: Path, copy: Path, step: int) -> Path:
    """A run's folder as it was when the run broke off some steps after the checkpoint of `step`."""
    shutil.copytree(folder, copy)
    for path in (copy / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    return copy


def test_a_run_leaves_its_configuration_metrics_and_curve(tmp_path: Path) -> None:
    run_ranks(4, run, dataclasses.replace(TINY, mesh=parse_mesh("dp=2,tp=2")), tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["mesh"] == {"dp": 2, "tp": 2}
    assert config["sizes"]["d_model"] == 32
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in metrics if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in metrics if "validation_loss" in line] == [4, 6]
    assert all(line["tokens_per_second"] > 0 and line["memory_bytes"] > 0 for line in metrics if "loss" in line)
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_one_process_resumes_to_the_bit(tmp_path: Path) -> None:
    run(TINY, tmp_path / "whole", save_every=3)
    copy = interrupted_copy(tmp_path / "whole", tmp_path / "copy", step=3)
    run(TINY, copy, resume=True)
    assert exact_metrics(copy) == exact_metrics(tmp_path / "whole")


def test_a_mesh_resumes_to_the_bit(tmp_path: Path) -> None:
    config = dataclasses.replace(TINY, mesh=parse_mesh("dp=2,tp=2"))
    run_ranks(4, run, config, tmp_path / "whole", 3)
    copy = interrupted_copy(tmp_path / "whole", tmp_path / "copy", step=3)
    run_ranks(4, run, config, copy, 0, True)
    assert exact_metrics(copy) == exact_metrics(tmp_path / "whole")


@pytest.mark.parametrize(("mesh", "fsdp"), [("tp=4", False), ("dp=4", False), ("dp=4", True), ("dpr=2,dps=2", True)])
def test_a_run_resumes_on_another_mesh(tmp_path: Path, mesh: str, fsdp: bool) -> None:
    run_ranks(4, run, dataclasses.replace(TINY, mesh=parse_mesh("dp=2,tp=2")), tmp_path / "whole", 3)
    copy = interrupted_copy(tmp_path / "whole", tmp_path / "copy", step=3)
    run_ranks(4, run, dataclasses.replace(TINY, mesh=parse_mesh(mesh), fsdp=fsdp), copy, 0, True)
    resumed, whole = exact_metrics(copy), exact_metrics(tmp_path / "whole")
    assert len(resumed) == len(whole)
    for line, expected in zip(resumed, whole, strict=True):
        assert line == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mesh", "dp=2"], "needs 2 processes but the job has 4"),
        (["--mesh", "dp=2,cp=2"], "unknown axis 'cp'"),
        (["--mesh", "dp=2,dp=2"], "axis 'dp' is given twice"),
        (["--mesh", "dp=two"], "is not AXIS=SIZE"),
        (["--mesh", "tp=4", "--heads", "2"], "--heads 2 can't be shared by tp=4"),
        (["--mesh", "tp=4", "--d-hidden", "62"], "--d-hidden 62 can't be shared by tp=4"),
        (["--mesh", "dp=4", "--batch", "6"], "--batch 6 can't be cut into 4 equal parts"),
        (["--mesh", "dp=4", "--sequence-parallel"], "give --mesh with a tp axis"),
        (["--mesh", "tp=4", "--sequence-parallel", "--sequence", "30"], "--sequence 30 can't be cut into tp=4"),
        (["--mesh", "tp=4", "--fsdp"], "--fsdp shards over dp, or over dps with replicas over dpr"),
        (["--mesh", "dp=2,dps=2", "--fsdp"], "--fsdp shards over dp, or over dps with replicas over dpr"),
        (["--mesh", "dpr=2,dps=2"], "the axes dpr and dps are for --fsdp"),
        (["--mesh", "dp=4", "--precision", "bf16"], "add --fsdp"),
        (["--mesh", "dp=4", "--fsdp", "--precision", "bf16", "--check"], "--check needs full precision"),
        (["--d-model", "30"], "an even, whole width"),
        (["--layers", "0"], "--layers 0 must be at least 1"),
        (["--max-bytes", "0"], "--max-bytes 0 must be at least 1"),
        (["--lr", "nan"], "--lr nan must be a positive, finite number"),
        (["--clip", "-1"], "--clip -1.0 must be 0 or a positive number"),
        (["--save-every", "-1"], "-1 is not in the range x>=0"),
        (["--name", "../elsewhere"], "must be the plain name of a folder"),
        (["--dtype", "bfloat16", "--check"], "--check needs --dtype float64 or float32"),
        (["--check", "0"], "--check 0 must be at least 1"),
        (["--resume"], "no complete checkpoint"),
    ],
)
def test_flags_that_can_not_work_are_refused_before_communication(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")  # and no address to meet at: communication would fail otherwise
    result = CliRunner().invoke(main, [*TINY_FLAGS, *flags, "--runs", str(tmp_path)])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
    assert not list(tmp_path.iterdir())


def test_a_device_without_its_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)  # what an import of it finds where it isn't installed
    result = CliRunner().invoke(main, [*TINY_FLAGS, "--device", "npu", "--runs", str(tmp_path)])
    assert result.exit_code == 2, result.output
    assert "npu needs the package torch_npu" in " ".join(result.output.split())


def test_every_rank_refuses_alike() -> None:
    def refusal() -> tuple[int, str]:
        result = CliRunner().invoke(main, [*TINY_FLAGS, "--mesh", "dp=3,tp=2"])
        return result.exit_code, result.output

    refusals = run_ranks(4, refusal, init=False)
    assert set(refusals) == {refusals[0]}
    assert refusals[0][0] == 2
    assert "needs 6 processes but the job has 4" in " ".join(refusals[0][1].split())


def test_resuming_another_model_or_starting_over_checkpoints_is_refused(tmp_path: Path) -> None:
    runs = ["--runs", str(tmp_path), "--steps", "2", "--save-every", "2"]
    assert CliRunner().invoke(main, [*TINY_FLAGS, *runs]).exit_code == 0
    for flags, message in [
        ([], "add --resume to go on from there"),
        (["--resume"], "raise --steps"),
        (["--resume", "--steps", "4", "--d-model", "64"], "another model (d_model 32 not 64)"),
    ]:
        result = CliRunner().invoke(main, [*TINY_FLAGS, *runs, *flags])
        assert result.exit_code == 2, result.output
        assert message in " ".join(result.output.split())


def test_the_main_job_as_it_is_launched_trains_and_checks(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    flags = ["--mesh", "dp=2,tp=2", "--check", "--steps", "3", "--dtype", "float64", "--runs", str(tmp_path)]
    result = subprocess.run(
        [*launcher, str(SCRIPT), *TINY_FLAGS, *flags],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "agrees to 1e-09 (float64)" in result.stdout
    assert result.stdout.count("step     3/3  loss") == 1, "only rank 0 reports"


def test_a_check_that_fails_ends_with_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOLERANCES, "float32", -1.0)
    result = CliRunner().invoke(main, [*TINY_FLAGS, "--steps", "0", "--check", "1", "--runs", str(tmp_path)])
    assert result.exit_code == 1
    assert "DOES NOT AGREE" in result.output
