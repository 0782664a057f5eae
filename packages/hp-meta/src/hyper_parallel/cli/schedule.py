"""`hyper-parallel schedule`: look at a pipeline schedule before anything runs. Needs hp-pipeline, and no framework.

The schedule is built, its communication inserted and validated, and simulated, by the functions that training uses.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from hp_pipeline import Schedule, Simulation

__all__ = ["schedule"]


class _Numbers(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 only
    """One number, or several with commas between them."""

    name = "number[,number...]"

    def __init__(self, count: int | None = None) -> None:
        self.count = count

    def convert(
        self, value: object, param: click.Parameter | None, context: click.Context | None
    ) -> float | tuple[float, ...]:
        """From the text of the command line."""
        if isinstance(value, (float, tuple)):
            return value
        try:
            numbers = tuple(float(number) for number in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} should be numbers with commas between them, for example 1,1,1.", param, context)
        if self.count is not None and len(numbers) != self.count:
            self.fail(f"{value!r} has {len(numbers)} numbers; {self.count} are needed.", param, context)
        return numbers[0] if len(numbers) == 1 else numbers


_FILE = click.Path(dir_okay=False, path_type=Path)
_EACH = "One number, or one for each"


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--name", help="Which schedule, for example gpipe, 1f1b, interleaved1f1b, zbh1, zbv, dualpipev.")
@click.option(
    "--stages",
    "--ranks",
    "ranks",
    type=click.IntRange(min=1),
    help="Ranks along the pipeline. With --chunks V each rank runs V of the model's V x RANKS pieces.",
)
@click.option("--micro-batches", type=click.IntRange(min=1), help="Micro-batches of a step.")
@click.option(
    "--chunks", type=click.IntRange(min=1), help="Pieces of the model per rank.  [default: the schedule's own]"
)
@click.option(
    "--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Read a schedule's text instead."
)
@click.option("--costs", type=_Numbers(3), default="1,1,1", help="Times of F, I, W; B takes I + W.")
@click.option("--recompute", type=_Numbers(), default="0", help=f"Added to each backward. {_EACH} piece.")
@click.option("--latency", type=_Numbers(), default="0", help=f"Of a message. {_EACH} edge between pieces.")
@click.option("--message-bytes", type=_Numbers(), default="0", help=f"Size of a message. {_EACH} edge.")
@click.option("--bandwidth", type=_Numbers(), default="inf", help=f"Bytes per unit of time. {_EACH} edge.")
@click.option(
    "--activation",
    type=_Numbers(),
    default="1",
    help=f"Memory that a micro-batch takes until its backward. {_EACH} piece.",
)
@click.option("--weight-activation", type=_Numbers(), help="The part of it that W still needs after I.  [default: all]")
@click.option("--static", type=_Numbers(), default="0", help=f"Memory of weights and states. {_EACH} piece.")
@click.option(
    "--overlap",
    type=click.FloatRange(0, 1),
    default=0.0,
    help="How much of the shorter half an overlapped backward and forward hide: 0 takes B + F, 1 takes max(B, F).",
)
@click.option("--communication", is_flag=True, help="Insert sends and receives, and simulate with them.")
@click.option("--rendezvous", is_flag=True, help="Sends wait for their receives. Implies --communication.")
@click.option("--grid/--no-grid", default=True, help="Print the grid.")
@click.option(
    "--width", type=click.IntRange(min=20), help="Columns of the grid.  [default: the terminal's; in a file no limit]"
)
@click.option("--color/--no-color", default=None, help="Colours in the grid.  [default: in a terminal]")
@click.option("--text", is_flag=True, help="Print the schedule's own text, which --file reads back.")
@click.option("--critical-path", is_flag=True, help="Print the steps that make the whole as long as it is.")
@click.option("--plot", type=_FILE, help="Write the timeline and memory as a picture (.png, .svg, .pdf).")
@click.option("--trace", type=_FILE, help="Write a trace for ui.perfetto.dev or chrome://tracing.")
@click.option(
    "--unit", type=click.FloatRange(min=0, min_open=True), default=0.001, help="Seconds per unit of time, for --trace."
)
def schedule(
    *,
    name: str | None,
    ranks: int | None,
    micro_batches: int | None,
    chunks: int | None,
    file: Path | None,
    costs: tuple[float, float, float],
    overlap: float,
    communication: bool,
    rendezvous: bool,
    grid: bool,
    width: int | None,
    color: bool | None,
    text: bool,
    critical_path: bool,
    plot: Path | None,
    trace: Path | None,
    unit: float,
    **other_costs: float | tuple[float, ...] | None,
) -> None:
    """Print a pipeline schedule with its bubble and peak memory; draw or trace it.

    \b
    hyper-parallel schedule --stages 4 --micro-batches 8 --name zbv
    hyper-parallel schedule --stages 4 --micro-batches 8 --name 1f1b --costs 1,1.2,0.9 --plot 1f1b.png
    """
    try:
        from hp_core.errors import PlanError, PlatformError
        from hp_pipeline import Costs, simulate, validate
    except ModuleNotFoundError as error:
        if error.name not in ("hp_pipeline", "hp_core"):
            raise
        raise click.ClickException("this command needs hp-pipeline: pip install hp-pipeline.") from error
    try:
        planned = _schedule(name, ranks, micro_batches, chunks, file)
        if communication or rendezvous:
            planned = _with_communication(planned)
        validate(planned, rendezvous=rendezvous, skips=_skips(planned))
        forward, inputs, weights = costs
        given = Costs(forward, inputs, weights, overlap=overlap, **other_costs)  # type: ignore[arg-type]
        result = simulate(planned, given, rendezvous=rendezvous)
    except PlanError as error:
        raise click.UsageError(str(error)) from error
    if text:
        click.echo(planned.to_text())
    if grid:
        _print_grid(result, width, color)
    click.echo(result.summary())
    if critical_path:
        click.echo("critical path: " + " ".join(str(event.step) for event in result.critical_path))
    try:
        if plot is not None:
            from hp_pipeline import plot as draw

            draw(result, path=plot)
            click.echo(f"picture: {plot}")
        if trace is not None:
            from hp_pipeline import write_trace

            write_trace(trace, result, unit=unit)
            click.echo(f"trace: {trace}")
    except PlatformError as error:
        raise click.ClickException(str(error)) from error
    except (OSError, ValueError) as error:
        raise click.ClickException(f"it can't be written: {error}") from error


def _schedule(
    name: str | None, ranks: int | None, micro_batches: int | None, chunks: int | None, file: Path | None
) -> Schedule:
    """The schedule that was asked for: of a file, or a built-in order."""
    from hp_pipeline import Schedule, build_order

    if file is not None:
        if any(value is not None for value in (name, ranks, micro_batches, chunks)):
            raise click.UsageError("--file says everything; leave --name, --stages, --micro-batches and --chunks away.")
        return Schedule.from_text(file.read_text(encoding="utf-8"))
    if name is None or ranks is None or micro_batches is None:
        missing = {"--name": name, "--stages": ranks, "--micro-batches": micro_batches}
        names = ", ".join(option for option, value in missing.items() if value is None)
        raise click.UsageError(
            f"{names}: missing; say which schedule, for how many ranks and micro-batches (or give --file)."
        )
    return build_order(name, ranks, micro_batches, chunks)


def _with_communication(planned: Schedule) -> Schedule:
    from hp_pipeline import MetaStepType, insert_communication

    there = any(step.type in (MetaStepType.SEND_F, MetaStepType.SEND_B) for steps in planned.steps for step in steps)
    return planned if there else insert_communication(planned)


def _skips(planned: Schedule) -> set[tuple[int, int]]:
    """The skip connections that a schedule's messages tell of."""
    return {
        (step.stage, step.peer)
        for steps in planned.steps
        for step in steps
        if step.type.value == "SEND_F" and step.peer is not None
    }


def _print_grid(result: Simulation, width: int | None, color: bool | None) -> None:
    from hp_pipeline import grid

    terminal = sys.stdout.isatty()
    if width is None and terminal:
        import shutil

        width = shutil.get_terminal_size().columns
    colored = terminal if color is None else color
    click.echo(grid(result, width=width, color=colored) + "\n", color=colored)
