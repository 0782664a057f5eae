"""Trains a small byte-level language model on the sources of Python's standard library, on any mesh of processes.

    python examples/train_lm.py                                                         one process
    torchrun --nproc-per-node 4 examples/train_lm.py --mesh dp=2,tp=2 --check           four, and the check against one

Reads top-down: the flags, the run, then the check. Each part lives in its own file under `lm/`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import torch
from lm.check import TOLERANCES, compare_runs, trace_run
from lm.checkpoint import Checkpoint, find_start, load_checkpoint, save_checkpoint
from lm.config import DTYPES, ConfigError, ModelSizes, RunConfig, parse_mesh
from lm.parallel import launched_world_size, mesh_of_this_job, require_device
from lm.report import Report, SilentReport
from lm.text import Text, load_standard_library
from lm.trainer import Trainer

if TYPE_CHECKING:
    from hp_core import DeviceMesh

DEFAULTS, SIZES = RunConfig(), ModelSizes()


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--mesh", help="Axes and sizes, e.g. dp=2,tp=2. [default: dp over all processes]")
@click.option("--sequence-parallel", is_flag=True, help="Shard norms and residuals along the sequence over tp.")
@click.option("--d-model", default=SIZES.d_model, help="Width of the model.")
@click.option("--layers", default=SIZES.layers, help="Number of blocks.")
@click.option("--heads", default=SIZES.heads, help="Attention heads.")
@click.option("--d-hidden", default=SIZES.d_hidden, help="Inner width of the feed-forward part.")
@click.option("--sequence", default=SIZES.sequence, help="Bytes in a sequence.")
@click.option("--dtype", type=click.Choice(DTYPES), default=DEFAULTS.dtype, help="Of parameters and activations.")
@click.option("--device", type=click.Choice(["cpu", "cuda", "npu"]), default=DEFAULTS.device, help="Where to run.")
@click.option("--steps", default=DEFAULTS.steps, help="Last step; 0 with --check only checks.")
@click.option("--batch", default=DEFAULTS.batch, help="Sequences in the global batch.")
@click.option("--seed", default=DEFAULTS.seed, help="Decides weights and batches.")
@click.option("--lr", default=DEFAULTS.lr, help="Highest learning rate.")
@click.option("--warmup", default=DEFAULTS.warmup, help="Steps of linear warm-up.")
@click.option("--weight-decay", default=DEFAULTS.weight_decay, help="Of the matrices.")
@click.option("--clip", default=DEFAULTS.clip, help="Largest gradient norm; 0 turns clipping off.")
@click.option("--max-bytes", default=DEFAULTS.max_bytes, help="How much text to read.")
@click.option("--eval-every", default=DEFAULTS.eval_every, help="Steps between validations; 0: at the end only.")
@click.option("--eval-batches", default=DEFAULTS.eval_batches, help="Batches of a validation.")
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
        config = config_of_flags(**flags)
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


def config_of_flags(**flags: object) -> RunConfig:
    """The validated run that the command line describes.

    Raises:
        ConfigError: A flag is wrong or contradicts another, or the number of processes.
    """
    sizes = {key: flags.pop(key) for key in ("d_model", "layers", "heads", "d_hidden", "sequence")}
    processes = launched_world_size()
    mesh_text = flags.pop("mesh") or (f"dp={processes}" if processes else None)
    mesh = parse_mesh(str(mesh_text)) if mesh_text else ()
    config = RunConfig(sizes=ModelSizes(**sizes), mesh=mesh, **flags)  # type: ignore[arg-type]
    config.validate(processes or 1)
    require_device(config.device)
    return config


def validate_check(config: RunConfig, steps: int | None) -> None:
    """Refuses a check that can't be made.

    Raises:
        ConfigError: No steps to check, or a dtype in which rounding hides faults.
    """
    if steps is not None and steps < 1:
        raise ConfigError(f"--check {steps} must be at least 1")
    if steps is not None and config.dtype not in TOLERANCES:
        raise ConfigError(f"--check needs --dtype {' or '.join(TOLERANCES)}: {config.dtype} rounds too much")


def train(
    config: RunConfig,
    text: Text,
    mesh: DeviceMesh | None,
    folder: Path,
    save_every: int = 0,
    start: Checkpoint | None = None,
) -> None:
    """Runs the steps of a run, afresh or from a checkpoint, and writes its files to `folder`."""
    trainer = Trainer(config, text, mesh)
    done = 0
    if start is not None:
        load_checkpoint(start, trainer)
        done = start.step
    first = is_first_rank(mesh)
    with Report(folder, config, text, trainer.parameter_count, done) if first else SilentReport() as report:
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
    difference = compare_runs(run, trace_run(config, text, steps))
    tolerance = TOLERANCES[config.dtype]
    agrees = difference.largest <= tolerance
    click.echo(f"            loss {difference.loss:.1e}")
    click.echo(f"            gradient of the first step {difference.gradient:.1e} ({difference.gradient_of})")
    click.echo(f"            parameter {difference.parameter:.1e} ({difference.parameter_of})")
    click.echo(f"            {'agrees' if agrees else 'DOES NOT AGREE'} to {tolerance:.0e} ({config.dtype})")
    return agrees


def is_first_rank(mesh: DeviceMesh | None) -> bool:
    """Whether this process reports."""
    return mesh is None or torch.distributed.get_rank() == 0


if __name__ == "__main__":
    main()
