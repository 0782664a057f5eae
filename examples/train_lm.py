"""Trains a small byte-level language model on the sources of Python's standard library, on any mesh of processes.

    python examples/train_lm.py                                                         one process
    torchrun --nproc-per-node 4 examples/train_lm.py --mesh dp=2,tp=2 --check           four, and the check against one
    torchrun --nproc-per-node 4 examples/train_lm.py --mesh pp=2,dp=2 --fsdp --schedule zbv      a pipeline of sharded stages

Reads top-down: the flags, the run, then the check. Each part lives in its own file under `lm/`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import torch
from lm.check import trace_run
from lm.checkpoint import Checkpoint, find_start, load_checkpoint, save_checkpoint
from lm.compare import compare_runs, say_difference
from lm.config import ConfigError, RunConfig
from lm.flags import config_of_flags, run_options, validate_check
from lm.job import launched_world_size, machinery, mesh_of_this_job, require_device
from lm.pipelined import make_trainer
from lm.report import Report, SilentReport
from lm.text import Text, load_standard_library

if TYPE_CHECKING:
    from hp_core import DeviceMesh


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@run_options
@click.option("--name", default="train_lm", help="The run's files go to RUNS/NAME.")
@click.option("--runs", type=click.Path(path_type=Path), default=Path("runs"), help="Folder of all runs.")
@click.option("--save-every", type=click.IntRange(min=0), default=0, help="Steps between checkpoints; 0: none.")
@click.option("--resume", is_flag=True, help="Go on from the run's last checkpoint (any mesh).")
@click.option(
    "--check", is_flag=False, flag_value="3", type=int, help="Compare the first N (3) steps with one process."
)
def main(name: str, runs: Path, save_every: int, resume: bool, check: int | None, **flags: object) -> None:
    """Train a byte-level transformer on the standard library's sources."""
    try:
        if Path(name).name != name or name == "..":
            raise ConfigError(f"--name {name!r} must be the plain name of a folder in --runs")
        config = config_of_flags(launched_world_size(), **flags)
        require_device(config.device)
        validate_check(config, check)
        text = load_standard_library(config.max_bytes, config.sizes.sequence)
        start = find_start(runs / name, config, resume) if config.steps else None
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    with mesh_of_this_job(config) as mesh:
        if config.steps:
            train(config, text, mesh, runs / name, save_every, start)
        agrees = check is None or check_against_one_process(config, text, mesh, check)
    if not agrees:
        sys.exit(1)


def train(
    config: RunConfig,
    text: Text,
    mesh: DeviceMesh | None,
    folder: Path,
    save_every: int = 0,
    start: Checkpoint | None = None,
) -> None:
    """Runs the steps of a run, afresh or from a checkpoint, and writes its files to `folder`."""
    trainer = make_trainer(config, text, mesh)
    done = 0
    if start is not None:
        load_checkpoint(start, trainer)
        done = start.step
    about = (folder, config, text, trainer.parameter_count, machinery(config.device), done)
    with Report(*about) if is_first_rank(mesh) else SilentReport() as report:
        for step in range(done + 1, config.steps + 1):
            report.step(step, trainer.train_step(step))
            last = step == config.steps
            if last or (config.eval_every and step % config.eval_every == 0):
                report.validation(step, trainer.validate())
            if save_every and (last or step % save_every == 0):
                save_checkpoint(folder, trainer, step)


def check_against_one_process(config: RunConfig, text: Text, mesh: DeviceMesh | None, steps: int) -> bool:
    """Compares the first steps on the mesh with the same on one dense process; rank 0 does that and says the result."""
    first = is_first_rank(mesh)
    if first:
        click.echo(
            f"check       {steps} steps on {config.mesh_text} against one process, largest relative differences:"
        )
    run = trace_run(config, text, steps, mesh)
    if not first:
        return True
    return say_difference(compare_runs(run, trace_run(config, text, steps)), config.dtype, click.echo)


def is_first_rank(mesh: DeviceMesh | None) -> bool:
    """Whether this process reports."""
    return mesh is None or torch.distributed.get_rank() == 0


if __name__ == "__main__":
    main()
