"""The example as a pipeline equals one process, under every schedule and with other axes inside of stages."""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from lm.check import trace_run
from lm.checkpoint import find_start
from lm.compare import TOLERANCES, Trace, compare_runs
from lm.config import ModelSizes, RunConfig, parse_mesh
from lm.parallel import build_mesh
from lm.pipelined import layers_of_stage, make_trainer
from lm.report import read_metrics
from lm.text import load_standard_library
from train_lm import check_against_one_process, main, train

from hp_core.platform.recorder import record_collectives
from hp_core.testing import run_ranks
from hp_pipeline import ORDERS

STEPS = 3
SIZES = ModelSizes(d_model=16, layers=5, heads=2, d_hidden=32, sequence=16)
TINY = RunConfig(
    sizes=SIZES, dtype="float64", steps=STEPS, batch=8, warmup=2, max_bytes=200_000, eval_every=2, eval_batches=1
)
TINY_FLAGS = [
    *("--d-model", "16", "--layers", "5", "--heads", "2", "--d-hidden", "32", "--sequence", "16", "--batch", "8"),
    *("--max-bytes", "200000"),
]


def trace(config: RunConfig) -> Trace:
    """On a rank, or in one dense process: the traced run."""
    text = load_standard_library(config.max_bytes, config.sizes.sequence)
    return trace_run(config, text, STEPS, build_mesh(config) if config.mesh else None)


@lru_cache
def dense_trace(optimizer: str) -> Trace:
    return trace(dataclasses.replace(TINY, optimizer=optimizer))


def check(mesh: str, ranks: int, **changes: Any) -> None:
    config = dataclasses.replace(TINY, mesh=parse_mesh(mesh), **changes)
    config.validate(ranks)
    traces = run_ranks(ranks, trace, config)
    for rank, of_rank in enumerate(traces):
        assert of_rank.losses == traces[0].losses, f"rank {rank} saw other losses than rank 0"
        assert of_rank.parameters.keys() == traces[0].parameters.keys(), f"rank {rank} has another trace than rank 0"
    difference = compare_runs(traces[0], dense_trace(config.optimizer))
    # Newton-Schulz iterates in the elements' own type here, and amplifies rounding
    assert difference.largest <= (1e-6 if config.optimizer == "muon" else TOLERANCES["float64"]), difference


@pytest.mark.parametrize("schedule", ORDERS)
def test_every_schedule_equals_one_process(schedule: str) -> None:
    check("pp=2", 2, schedule=schedule, micro_batches=3)  # of 8 rows: micro-batches of different sizes


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        pytest.param("pp=4", {}, id="pp4"),
        pytest.param("pp=2,dp=2", {"optimizer": "muon"}, id="pp2-dp2-muon"),
        pytest.param("pp=2,tp=2", {"schedule": "zbv"}, id="pp2-tp2-zbv"),
        pytest.param("tp=2,pp=2", {"sequence_parallel": True}, id="tp2-pp2-sequence"),
        pytest.param("pp=2,dp=2", {"fsdp": True, "schedule": "interleaved1f1b"}, id="pp2-dp2-fsdp"),
        pytest.param("dpr=2,pp=2,dps=1", {"fsdp": True, "schedule": "zbv"}, id="hybrid-zbv"),
    ],
)
def test_axes_inside_of_stages_equal_one_process(mesh: str, changes: dict[str, Any]) -> None:
    check(mesh, 4, **changes)


@pytest.mark.parametrize("fsdp", [False, True])
def test_stages_are_cut_over_data_and_tensor_axes_at_once(fsdp: bool) -> None:
    check("pp=1,dp=2,tp=2", 4, fsdp=fsdp, sequence_parallel=True, schedule="zbv")


def test_stages_in_bfloat16_follow_full_precision() -> None:
    config = dataclasses.replace(TINY, mesh=parse_mesh("pp=2,dp=2"), fsdp=True, dtype="float32")
    full, rounded = (run_ranks(4, trace, one)[0] for one in (config, dataclasses.replace(config, precision="bf16")))
    assert rounded.losses != full.losses
    assert rounded.losses == pytest.approx(full.losses, rel=0.02)


def collectives_of_a_step(config: RunConfig) -> dict[str, int]:
    """How many there are over the data axis, in the second step."""
    text = load_standard_library(config.max_bytes, config.sizes.sequence)
    trainer = make_trainer(config, text, build_mesh(config))
    trainer.compute_gradients(1)
    with record_collectives() as log:
        trainer.compute_gradients(2)
    return dict(
        Counter(record.kind for record in log if record.kind not in ("send", "recv") and record.group_size == 2)
    )


def test_weights_and_gradients_travel_once_for_all_micro_batches() -> None:
    config = dataclasses.replace(TINY, mesh=parse_mesh("pp=2,dp=2"), micro_batches=4)
    assert run_ranks(4, collectives_of_a_step, config) == [{"all_reduce": 1}] * 4
    sharded = dataclasses.replace(config, fsdp=True)
    assert run_ranks(4, collectives_of_a_step, sharded) == [{"all_gather": 1, "reduce_scatter": 1}] * 4


def checked(config: RunConfig) -> bool:
    text = load_standard_library(config.max_bytes, config.sizes.sequence)
    return check_against_one_process(config, text, build_mesh(config), 1)


def test_the_check_runs_the_dense_program_on_one_rank_alone() -> None:
    assert run_ranks(2, checked, dataclasses.replace(TINY, mesh=parse_mesh("pp=2"))) == [True, True]


def run(config: RunConfig, folder: Path, save_every: int = 0, resume: bool = False) -> None:
    start = find_start(folder, config, resume)
    text = load_standard_library(config.max_bytes, config.sizes.sequence)
    train(config, text, build_mesh(config) if config.mesh else None, folder, save_every, start)


def metrics(folder: Path) -> list[dict[str, float]]:
    keys = ("step", "loss", "lr", "gradient_norm", "validation_loss")
    return [{key: line[key] for key in keys if key in line} for line in read_metrics(folder / "metrics.jsonl")]


def test_a_pipeline_resumes_the_run_of_a_mesh_and_the_other_way_round(tmp_path: Path) -> None:
    """Checkpoint, validation and clipping in one: each resumed step must be that of the whole run."""
    on_mesh = dataclasses.replace(TINY, steps=5, mesh=parse_mesh("dp=2,tp=2"))
    pipeline = dataclasses.replace(TINY, steps=5, mesh=parse_mesh("pp=2,dp=2"), schedule="zbv")
    sharded = dataclasses.replace(pipeline, fsdp=True)
    run_ranks(4, run, on_mesh, tmp_path / "mesh", 2)
    run_ranks(4, run, pipeline, tmp_path / "pipeline", 2)
    whole = metrics(tmp_path / "mesh")
    assert {"validation_loss", "gradient_norm"} <= {key for line in whole for key in line}
    assert_equal(metrics(tmp_path / "pipeline"), whole)
    for source, config in [("mesh", pipeline), ("pipeline", on_mesh), ("pipeline", sharded)]:
        copy = tmp_path / f"{source}-resumed-{config.mesh_text}-{config.fsdp}"
        shutil.copytree(tmp_path / source, copy)
        for step in (4, 5):
            shutil.rmtree(copy / "checkpoints" / f"step-{step:06d}")
        run_ranks(4, run, config, copy, 0, True)
        assert_equal(metrics(copy), whole)


def assert_equal(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected)
    for line, wanted in zip(found, expected, strict=True):
        assert line == pytest.approx(wanted, rel=1e-9)


def test_layers_are_dealt_out_in_order_and_evenly() -> None:
    for layers in range(1, 12):
        for stages in range(1, layers + 1):
            dealt = [layers_of_stage(layers, stages, stage) for stage in range(stages)]
            assert [layer for part in dealt for layer in part] == list(range(layers))
            assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--mesh", "pp=4", "--layers", "3"],
            "--layers 3 can't be dealt out to 4 stages (pp=4, and 1f1b has one stage",
        ),
        (
            ["--mesh", "pp=4", "--schedule", "zbv"],
            "--layers 5 can't be dealt out to 8 stages (pp=4, and zbv has 2 stages",
        ),
        (["--mesh", "pp=4", "--schedule", "zb-v"], "--schedule zb-v is unknown: did you mean zbv"),
        (["--mesh", "pp=4", "--schedule", "fast"], "it must be one of gpipe, 1f1b, zbh1"),
        (["--mesh", "pp=2,dp=2", "--micro-batches", "5"], "of --batch 8 a rank has 4 rows (--mesh pp=2,dp=2), too few"),
        (["--mesh", "pp=4", "--micro-batches", "0"], "--micro-batches 0 must be at least 1"),
        (["--mesh", "pp=4", "--micro-batches", "-2"], "--micro-batches -2 must be at least 1"),
        (["--mesh", "dp=4", "--micro-batches", "2"], "--micro-batches 2 is for a pipeline: give --mesh with a pp axis"),
        (["--schedule", "zbv"], "--schedule zbv is for a pipeline"),
        (["--mesh", "pp=4", "--fsdp"], "--fsdp shards over dp"),
        (["--mesh", "pp=4", "--sequence-parallel"], "give --mesh with a tp axis"),
    ],
)
def test_flags_that_can_not_work_are_refused_before_communication(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")  # and no address to meet at: communication would fail otherwise
    result = CliRunner().invoke(main, [*TINY_FLAGS, *flags, "--runs", str(tmp_path)])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
