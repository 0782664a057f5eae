"""Runs a pipeline schedule, predicts the run from what its stages cost, and shows both in one picture and one trace.

    python examples/pipeline_timeline.py --schedule zbv                                       starts its 4 ranks itself
    torchrun --nproc-per-node 4 examples/pipeline_timeline.py --schedule zbv --sleep 20       stages that sleep for 20 ms

Reads top-down: the flags, the runs on all ranks, then what rank 0 makes of them.
"""

from __future__ import annotations

import os
from pathlib import Path

import click
import torch
from lm.config import ModelSizes
from rich.console import Console
from rich.table import Table
from timeline.stages import Work

from hp_core import destroy_process_group, init_process_group
from hp_core.errors import HyperParallelError
from hp_core.process_group import get_rank, get_world_size
from hp_core.testing import run_ranks
from hp_pipeline import (
    Costs,
    PipelineSchedule,
    PipelineStage,
    Recorder,
    Schedule,
    Simulation,
    Timeline,
    build_order,
    measured_costs,
    overlap_communication,
    plot,
    simulate,
    write_trace,
)

MILLI = 1e-3


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--schedule", "name", default="1f1b", help="An order, or the file of a schedule in text form.")
@click.option("--ranks", type=click.IntRange(min=1), default=4, help="Ranks to start, without a launcher.")
@click.option("--micro-batches", type=click.IntRange(min=1), default=8, help="Parts of a batch.")
@click.option("--sleep", type=click.FloatRange(min=0), default=0.0, help="Milliseconds a stage sleeps; 0: it computes.")
@click.option("--layers", type=click.IntRange(min=1), default=8, help="Blocks of the model that is computed.")
@click.option("--d-model", type=click.IntRange(min=8), default=256, help="Its width.")
@click.option("--rows", type=click.IntRange(min=1), default=2, help="Sequences in a micro-batch.")
@click.option("--runs", type=click.IntRange(min=1), default=3, help="Runs to measure costs in, and as many to predict.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("runs/pipeline_timeline"),
    help="Path of the files, without suffix.",
)
def main(
    name: str,
    ranks: int,
    micro_batches: int,
    sleep: float,
    layers: int,
    d_model: int,
    rows: int,
    runs: int,
    out: Path,
) -> None:
    """Run a pipeline and draw it beside its prediction: OUT.png, and OUT.json for ui.perfetto.dev."""
    launched = os.environ.get("WORLD_SIZE")
    ranks = int(launched) if launched else ranks
    try:
        schedule = read_schedule(name, ranks, micro_batches)
    except HyperParallelError as error:
        raise click.UsageError(str(error)) from error
    if not sleep and layers < schedule.stages:
        raise click.UsageError(f"--layers {layers}: {schedule.stages} stages need at least a layer each")
    sizes = ModelSizes(d_model=d_model, layers=layers, d_hidden=3 * d_model)
    work = Work(sizes, sleep * MILLI, rows * schedule.micro_batches)
    if launched:
        init_process_group("gloo")
        try:
            recorded = record(schedule, work, runs)
            first = get_rank() == 0
        finally:
            destroy_process_group()
    else:
        recorded, first = run_ranks(ranks, record, schedule, work, runs, timeout=600)[0], True
    if first:
        report(schedule, [Timeline.from_json(text).scaled(1 / MILLI) for text in recorded], out)


def read_schedule(name: str, ranks: int, micro_batches: int) -> Schedule:
    """The schedule with its messages.

    Raises:
        HyperParallelError: There is no such order, or the file holds no schedule, or one for other ranks.
    """
    if Path(name).is_file():
        schedule = Schedule.from_text(Path(name).read_text(encoding="utf-8"))
        if schedule.ranks != ranks:
            raise click.UsageError(f"the schedule in {name} is for {schedule.ranks} ranks, not {ranks}")
        return overlap_communication(schedule)
    return overlap_communication(build_order(name, ranks, micro_batches))


def record(schedule: Schedule, work: Work, runs: int) -> list[str]:
    """On each rank: runs to measure and to predict, after one to warm up; the timelines of all ranks, as text."""
    torch.set_num_threads(1)
    rank, ranks = get_rank(), get_world_size()
    own = work.stages(schedule.stages_of(rank), schedule.stages)
    recorder = Recorder(rank, ranks)
    pipeline = PipelineSchedule(
        [PipelineStage(module, stage, schedule.stages) for stage, module in own.items()],
        schedule,
        loss_fn=work.loss,
        recorder=recorder,
    )
    inputs, targets = work.batch()
    merged = []
    for _ in range(1 + 2 * runs):
        for module in own.values():
            module.zero_grad()
        recorder.clear()
        torch.distributed.barrier()
        pipeline.run(inputs, target=targets)
        of_ranks: list[str] = [""] * ranks
        torch.distributed.all_gather_object(of_ranks, recorder.timeline().to_json())
        merged.append(Timeline.merged(map(Timeline.from_json, of_ranks)).to_json())
    return merged[1:]


def report(schedule: Schedule, timelines: list[Timeline], out: Path) -> None:
    """Predict the later runs from the earlier ones, and show the median one of them beside it. Times are in milliseconds."""
    half = len(timelines) // 2
    measured, later = timelines[:half], sorted(timelines[half:], key=lambda timeline: timeline.end)
    real = later[len(later) // 2]
    chunks = schedule.stages / schedule.ranks
    costs = measured_costs(schedule, measured, Costs(activation=1 / chunks))
    predicted = simulate(schedule, costs)
    console = Console(highlight=False)
    cores = os.cpu_count() or 1
    if cores < schedule.ranks:
        console.print(
            f"{schedule.ranks} ranks share {cores} cores: stages that compute hold each other up, which no prediction knows of; "
            f"with --sleep they don't",
            soft_wrap=True,
        )
    console.print(stages_table(costs, schedule))
    console.print(comparison(predicted, real))
    out.parent.mkdir(parents=True, exist_ok=True)
    title = (
        f"{schedule.name}, {schedule.ranks} ranks, {schedule.micro_batches} micro-batches: predicted {predicted.step_time:.1f} ms, "
        f"real {real.end:.1f} ms ({real.end / predicted.step_time - 1:+.1%})"
    )
    picture, trace = out.with_name(out.name + ".png"), out.with_name(out.name + ".json")
    plot(predicted, real, path=picture, title=title, unit="ms", dpi=140)
    write_trace(trace, predicted, real.scaled(MILLI), unit=MILLI)
    console.print(f"written     {picture}, and {trace} for ui.perfetto.dev", soft_wrap=True)


def stages_table(costs: Costs, schedule: Schedule) -> Table:
    """What was measured."""
    table = Table(
        "stage", "rank", "forward", "backward, inputs", "backward, weights", "to the next", title="measured, ms"
    )
    rows = zip(
        *(costs.of(name, schedule.stages) for name in ("forward", "input_gradient", "weight_gradient")),
        (*costs.of("latency", schedule.stages), None),
        strict=True,
    )
    for stage, (*times, latency) in enumerate(rows):
        numbers = [f"{value:.2f}" for value in times]
        table.add_row(str(stage), str(schedule.placement[stage]), *numbers, "" if latency is None else f"{latency:.2f}")
    return table


def comparison(predicted: Simulation, real: Timeline) -> Table:
    """Prediction and reality, by rank."""
    table = Table("", "predicted", "real", title="step")
    table.add_row("time, ms", f"{predicted.step_time:.1f}", f"{real.end:.1f}")
    for rank, (expected, found) in enumerate(zip(predicted.timeline.busy, real.busy, strict=True)):
        idle = [f"{1 - busy / end:.1%}" for busy, end in ((expected, predicted.step_time), (found, real.end))]
        table.add_row(f"rank {rank}, idle", *idle)
    return table


if __name__ == "__main__":
    main()
