"""The language model of the examples on MindSpore: on a mesh as in one process, and with PyTorch's first losses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hp_core.testing import run_ranks

EXAMPLES = Path(__file__).parents[3] / "examples"
sys.path.insert(0, str(EXAMPLES))

from lm.compare import Trace, compare_runs  # noqa: E402
from lm.config import ModelSizes, RunConfig, parse_mesh  # noqa: E402
from lm.text import load_standard_library  # noqa: E402
from lm_mindspore.check import torch_losses, trace_run  # noqa: E402
from lm_mindspore.trainer import Trainer  # noqa: E402
from train_lm_mindspore import main  # noqa: E402

STEPS = 3
# A long warm-up: Adam divides by a gradient's size, so one that is zero but for rounding would move its weight visibly.
TINY = RunConfig(
    sizes=ModelSizes(d_model=32, layers=2, heads=4, d_hidden=64, sequence=32), batch=8, warmup=50, max_bytes=300_000
)


def _trace(mesh: str | None, sequence_parallel: bool) -> Trace:
    import dataclasses

    from lm.parallel import build_mesh

    config = dataclasses.replace(TINY, mesh=parse_mesh(mesh) if mesh else (), sequence_parallel=sequence_parallel)
    text = load_standard_library(config.max_bytes, config.sizes.sequence)
    return trace_run(config, text, STEPS, build_mesh(config) if mesh else None)


@pytest.fixture(scope="module")
def one_process() -> Trace:
    return _trace(None, False)


@pytest.mark.parametrize(
    ("mesh", "sequence_parallel"),
    [("tp=2", False), ("dp=2", False), ("tp=2", True)],
    ids=["tp2", "dp2", "tp2-sequence"],
)
def test_a_mesh_gives_the_losses_and_gradients_of_one_process(
    mesh: str, sequence_parallel: bool, one_process: Trace
) -> None:
    for trace in run_ranks(2, _trace, mesh, sequence_parallel, timeout=150.0):
        difference = compare_runs(trace, one_process)
        assert difference.largest <= 1e-4, difference


def test_both_frameworks_have_the_same_first_losses() -> None:
    trainer = Trainer(TINY, load_standard_library(TINY.max_bytes, TINY.sizes.sequence))
    losses = [trainer.train_step(step).loss for step in range(1, STEPS + 1)]
    assert losses == pytest.approx(torch_losses(TINY, STEPS), rel=1e-5)
    assert losses[0] == pytest.approx(5.545, abs=0.1)  # that of guessing, log(256)


def test_msrun_trains_the_example_and_its_checks_agree(tmp_path: Path) -> None:
    sizes = "--d-model 32 --layers 1 --d-hidden 64 --sequence 32 --batch 8 --max-bytes 300000"
    flags = f"--mesh tp=2 {sizes} --steps 3 --eval-batches 1 --check 1 --against-torch 2 --runs".split()
    folder = Path(sys.executable).parent
    port = 20000 + os.getpid() % 20000
    launcher = [str(folder / "msrun"), "--worker_num=2", "--local_worker_num=2", "--join=True", f"--master_port={port}"]
    done = subprocess.run(
        [*launcher, f"--log_dir={tmp_path}", str(EXAMPLES / "train_lm_mindspore.py"), *flags, str(tmp_path)],
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), PATH=f"{folder}:{os.environ['PATH']}"),
        capture_output=True, text=True, timeout=150, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert not done.returncode, done.stdout + done.stderr
    assert (tmp_path / "worker_0.log").read_text().count("agrees to 1e-04") == 2
    assert not (tmp_path / "worker_1.log").read_text()
    metrics = (tmp_path / "train_lm_mindspore" / "metrics.jsonl").read_text()
    assert len(metrics.splitlines()) == 4
    assert (tmp_path / "train_lm_mindspore" / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        (["--device", "cuda"], "runs on cpu and npu"),
        (["--dtype", "float64"], "single precision"),
        (["--optimizer", "muon"], "only examples/train_lm.py"),
    ],
)
def test_what_mindspore_lacks_is_refused(flag: list[str], told: str) -> None:
    done = CliRunner().invoke(main, ["--max-bytes", "300000", *flag])
    assert done.exit_code == 2
    assert told in " ".join(done.output.split())
