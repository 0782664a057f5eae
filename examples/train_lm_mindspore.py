"""Trains the language model of `train_lm.py` on MindSpore: the same text, the same mesh words, the same initial weights.

    python examples/train_lm_mindspore.py                                                          one process
    msrun --worker_num=2 --local_worker_num=2 --join=True examples/train_lm_mindspore.py --mesh tp=2 --check --against-torch
    torchrun --nproc-per-node 2 examples/train_lm_mindspore.py --mesh dp=2 --check --against-torch

Reads top-down: the flags, the run, then the checks. What belongs to no framework is in `lm/`, the rest in `lm_mindspore/`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("HYPER_PARALLEL_PLATFORM", "mindspore")
os.environ.setdefault("GLOG_v", "3")  # MindSpore tells of every op that it places; only errors matter here

import click
from lm.compare import TOLERANCES, compare_runs, say_difference
from lm.config import ConfigError, RunConfig
from lm.flags import config_of_flags, run_options, validate_check
from lm.report import Report, SilentReport, watched
from lm.text import Text, load_standard_library
from lm_mindspore.check import torch_losses, trace_run
from lm_mindspore.job import launched_world_size, machinery, mesh_of_this_job, require_device
from lm_mindspore.trainer import Trainer

from hp_core.process_group import get_rank

if TYPE_CHECKING:
    from hp_core import DeviceMesh


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@run_options
@click.option("--name", default="train_lm_mindspore", help="The run's files go to RUNS/NAME.")
@click.option("--runs", type=click.Path(path_type=Path), default=Path("runs"), help="Folder of all runs.")
@click.option(
    "--check", is_flag=False, flag_value="3", type=int, help="Compare the first N (3) steps with one process."
)
@click.option(
    "--against-torch", is_flag=False, flag_value="5", type=int, help="Compare the first N (5) losses with PyTorch's."
)
def main(name: str, runs: Path, check: int | None, against_torch: int | None, **flags: object) -> None:
    """Train a byte-level transformer on the standard library's sources, on MindSpore."""
    try:
        if Path(name).name != name or name == "..":
            raise ConfigError(f"--name {name!r} must be the plain name of a folder in --runs")
        config = config_of_flags(launched_world_size(), **flags)
        validate_check(config, check)
        validate_check(config, against_torch)
        require_device(config)
        text = load_standard_library(config.max_bytes, config.sizes.sequence)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    with mesh_of_this_job(config) as mesh:
        losses = train(config, text, mesh, runs / name) if config.steps else []
        agrees = check is None or check_against_one_process(config, text, mesh, check)
        agrees &= against_torch is None or check_against_torch(config, text, mesh, against_torch, losses)
    if not agrees:
        sys.exit(1)


def train(config: RunConfig, text: Text, mesh: DeviceMesh | None, folder: Path) -> list[float]:
    """Runs the steps of a run and writes its files to `folder`; returns the losses."""
    trainer, losses = Trainer(config, text, mesh), []
    about = (folder, config, text, trainer.parameter_count, machinery(config.device))
    with Report(*about) if get_rank() == 0 else SilentReport() as report:
        for step in range(1, config.steps + 1):
            result = trainer.train_step(step)
            losses.append(result.loss)
            report.step(step, result)
            if step == config.steps or (config.eval_every and step % config.eval_every == 0):
                report.validation(step, trainer.validate())
    return losses


def check_against_one_process(config: RunConfig, text: Text, mesh: DeviceMesh | None, steps: int) -> bool:
    """Compares the first steps on the mesh with the same on one dense process; rank 0 does that and says the result."""
    say(f"check       {steps} steps on {config.mesh_text} against one process, largest relative differences:")
    run = trace_run(config, text, steps, mesh)
    if get_rank():
        return True
    return say_difference(compare_runs(run, trace_run(config, text, steps)), config.dtype, say)


def check_against_torch(
    config: RunConfig, text: Text, mesh: DeviceMesh | None, steps: int, losses: list[float]
) -> bool:
    """Compares the first losses with those of the same run on PyTorch; rank 0 does that and says the result.

    Args:
        config: The run.
        text: What it learns from.
        mesh: Where it ran; None for one process.
        steps: How many losses.
        losses: Those that the run gave; if they are fewer, the steps are run for this.
    """
    if len(losses) < steps:
        trainer = Trainer(config, text, mesh)
        losses = [trainer.train_step(step).loss for step in watched(range(1, steps + 1), "steps", get_rank() == 0)]
    if get_rank():
        return True
    losses = losses[:steps]
    say(f"check       {steps} losses on {config.mesh_text} against one process on PyTorch:")
    wanted = torch_losses(config, steps)
    say(f"{'':20}{'MindSpore':>11}{'PyTorch':>11}")
    for step, (ours, theirs) in enumerate(zip(losses, wanted, strict=True), 1):
        say(f"            step {step:>3}{ours:>11.6f}{theirs:>11.6f}")
    difference = max(abs(ours - theirs) / theirs for ours, theirs in zip(losses, wanted, strict=True))
    agrees = difference <= TOLERANCES["float32"]
    say(f"            {'agrees' if agrees else 'DOES NOT AGREE'} to {TOLERANCES['float32']:.0e}: {difference:.1e}")
    return agrees


def say(line: str) -> None:
    """Tells a person, once for all ranks."""
    if get_rank() == 0:
        click.echo(line)


if __name__ == "__main__":
    main()
