"""The flags that describe a run, whatever the framework, and the run that they describe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from hp_pipeline import ORDERS

from .compare import TOLERANCES
from .config import DTYPES, OPTIMIZERS, ConfigError, ModelSizes, RunConfig, parse_mesh

DEFAULTS, SIZES = RunConfig(), ModelSizes()

_OPTIONS = (
    click.option("--mesh", help="Axes and sizes, e.g. pp=2,tp=2. [default: dp over all processes]"),
    click.option("--sequence-parallel", is_flag=True, help="Shard norms and residuals along the sequence over tp."),
    click.option("--fsdp", is_flag=True, help="Shard parameters over dp, or over dps with replicas over dpr."),
    click.option("--schedule", help=f"With pp: {', '.join(ORDERS)}. [default: 1f1b]"),
    click.option("--micro-batches", type=int, help="With pp: parts of a rank's rows. [default: 2 for each rank of pp]"),
    click.option(
        "--optimizer",
        type=click.Choice(OPTIMIZERS),
        default=DEFAULTS.optimizer,
        help="Muon takes the blocks' matrices.",
    ),
    click.option(
        "--precision", type=click.Choice(["bf16"]), help="With --fsdp: compute in bfloat16, reduce in float32."
    ),
    click.option("--d-model", default=SIZES.d_model, help="Width of the model."),
    click.option("--layers", default=SIZES.layers, help="Number of blocks."),
    click.option("--heads", default=SIZES.heads, help="Attention heads."),
    click.option("--d-hidden", default=SIZES.d_hidden, help="Inner width of the feed-forward part."),
    click.option("--sequence", default=SIZES.sequence, help="Bytes in a sequence."),
    click.option("--dtype", type=click.Choice(DTYPES), default=DEFAULTS.dtype, help="Of parameters and activations."),
    click.option("--device", type=click.Choice(["cpu", "cuda", "npu"]), default=DEFAULTS.device, help="Where to run."),
    click.option("--steps", default=DEFAULTS.steps, help="Last step; 0 with --check only checks."),
    click.option("--batch", default=DEFAULTS.batch, help="Sequences in the global batch."),
    click.option("--seed", default=DEFAULTS.seed, help="Decides weights and batches."),
    click.option("--lr", default=DEFAULTS.lr, help="Highest learning rate."),
    click.option("--warmup", default=DEFAULTS.warmup, help="Steps of linear warm-up."),
    click.option("--weight-decay", default=DEFAULTS.weight_decay, help="Of the matrices."),
    click.option("--clip", default=DEFAULTS.clip, help="Largest gradient norm; 0 turns clipping off."),
    click.option("--max-bytes", default=DEFAULTS.max_bytes, help="How much text to read."),
    click.option("--eval-every", default=DEFAULTS.eval_every, help="Steps between validations; 0: at the end only."),
    click.option("--eval-batches", default=DEFAULTS.eval_batches, help="Batches of a validation."),
)


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the command takes the flags of a run."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def config_of_flags(processes: int | None, **flags: object) -> RunConfig:
    """The validated run that the command line describes.

    Args:
        processes: How many the launcher started; None for a plain process.
        flags: As `run_options` names them.

    Raises:
        ConfigError: A flag is wrong or contradicts another, or the number of processes.
    """
    sizes = {key: flags.pop(key) for key in ("d_model", "layers", "heads", "d_hidden", "sequence")}
    mesh_text = flags.pop("mesh") or (f"dp={processes}" if processes else None)
    mesh = parse_mesh(str(mesh_text)) if mesh_text else ()
    flags["precision"] = flags.get("precision") or ""
    for flag in ("schedule", "micro_batches"):
        if flags[flag] is None:
            flags.pop(flag)
        elif not any(axis == "pp" for axis, _ in mesh):
            raise ConfigError(
                f"--{flag.replace('_', '-')} {flags[flag]} is for a pipeline: give --mesh with a pp axis, e.g. pp={processes or 2}"
            )
    if flags.get("micro_batches", 1) == 0:
        raise ConfigError("--micro-batches 0 must be at least 1")
    config = RunConfig(sizes=ModelSizes(**sizes), mesh=mesh, **flags)  # type: ignore[arg-type]
    config.validate(processes or 1)
    return config


def validate_check(config: RunConfig, steps: int | None) -> None:
    """Refuses a check that can't be made.

    Raises:
        ConfigError: No steps to check, or a dtype in which rounding hides faults.
    """
    if steps is not None and steps < 1:
        raise ConfigError(f"--check {steps} must be at least 1")
    if steps is not None and config.precision:
        raise ConfigError(f"--check needs full precision: --precision {config.precision} rounds too much")
    if steps is not None and config.dtype not in TOLERANCES:
        raise ConfigError(f"--check needs --dtype {' or '.join(TOLERANCES)}: {config.dtype} rounds too much")
