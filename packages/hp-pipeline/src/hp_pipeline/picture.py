"""Pictures of a pipeline: the timeline of all ranks over their memory; prediction and reality in one. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hp_core.errors import PlatformError
from hp_pipeline.analysis import Simulation
from hp_pipeline.steps import COMPUTE, MetaStep, MetaStepType
from hp_pipeline.timeline import Event, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLORS", "plot"]

_T = MetaStepType
COLORS = {
    _T.F: "#4e79a7",
    _T.B: "#59a14f",
    _T.I: "#76b7b2",
    _T.W: "#a5cf8a",
    _T.UNSHARD: "#f28e2b",
    _T.REDUCE_GRAD: "#e15759",
    _T.SWAP_OUT: "#b07aa1",
    _T.SWAP_IN: "#d4a6c8",
}
"""Of each type of step; waiting receives and sends are grey."""
_NAMES = {_T.F: "forward", _T.B: "backward", _T.I: "input gradient", _T.W: "weight gradient"}
_WAITING = "#bdbdbd"
_IDLE = "#f2f2f2"
_FONT = 7.0


def plot(
    result: Simulation | Timeline,
    real: Timeline | None = None,
    *,
    path: str | Path | None = None,
    title: str | None = None,
    unit: str | None = None,
    width: float = 10.0,
    dpi: float = 100.0,
) -> Figure:
    """Draw a timeline, over the memory of each rank if it is simulated.

    Micro-batches' numbers are in the boxes where they fit; further chunks of a rank are paler; the two halves of a box are an
    overlapped backward (above) and forward. Time without computation is a pale grey. Collectives and copies are a thin line
    below their rank.

    Args:
        result: of the simulator, or a recorded timeline.
        real: a recorded timeline in the same unit of time; each rank's row is drawn below its predicted one.
        path: where to write it, as the suffix says (.png, .svg, .pdf); None: not at all.
        title: instead of name, step time and bubble.
        unit: of time, for the axis ("ms").
        width: of the picture, inches.
        dpi: pixels per inch.

    Raises:
        PlatformError: matplotlib isn't installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise PlatformError("pictures need matplotlib: pip install 'hp-pipeline[plot]'.") from error
    timeline = result.timeline if isinstance(result, Simulation) else result
    rows = timeline.ranks * (1 if real is None else 2)
    height = min(max(0.26 * rows, 1.0), 9.0)
    with_memory = isinstance(result, Simulation)
    memory_height = 1.7 if with_memory else 0.0
    figure = Figure(figsize=(width, height + memory_height + 1.0), dpi=dpi, layout="constrained")
    if with_memory:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[height, memory_height])
    else:
        top, bottom = figure.subplots(), None
    end = max(timeline.end, real.end if real is not None else 0.0) or 1.0
    first_stage = _chunks(timeline)
    row_inches = height / rows
    apart = 0.0 if real is None else 0.3  # the two rows of a rank belong together
    for offset, shown in enumerate([timeline] if real is None else [timeline, real]):
        rows_of = [rank if real is None else (2 + apart) * rank + offset for rank in range(timeline.ranks)]
        top.barh(rows_of, end, height=0.78, left=0, color=_IDLE, zorder=0, align="center")
        _draw(top, shown, rows_of, first_stage, numbers=(width * 0.88 / end, row_inches))
    labels = [f"rank {rank}" for rank in range(timeline.ranks)]
    if real is not None:
        labels = [text for label in labels for text in (f"{label} predicted", "real")]
    places = [row if real is None else row + apart * (row // 2) for row in range(rows)]
    top.set_yticks(places, labels, fontsize=min(8.0, 60 * row_inches))
    top.set_ylim(places[-1] + 0.55, -0.55)
    top.set_xlim(0, end * 1.003)
    top.tick_params(axis="y", length=0)
    top.spines[["top", "right", "left"]].set_visible(False)
    top.set_title(title if title is not None else _title(result, real), fontsize=9, loc="left")
    _legend(figure, timeline if real is None else Timeline(timeline.ranks, timeline.events + real.events))
    if isinstance(result, Simulation) and bottom is not None:
        _draw_memory(bottom, result)
    (bottom or top).set_xlabel("time" if unit is None else f"time, {unit}", fontsize=8)
    for axes in (top, bottom):
        if axes is not None:
            axes.tick_params(axis="x", labelsize=7)
    if path is not None:
        figure.savefig(path)
    return figure


def _title(result: Simulation | Timeline, real: Timeline | None) -> str:
    if isinstance(result, Timeline):
        return f"{result.ranks} ranks, {result.end:.4g}"
    schedule = result.schedule
    said = (
        f"{schedule.name}: {schedule.ranks} ranks, {schedule.stages} stages, {schedule.micro_batches} micro-batches; "
    )
    said += f"step time {result.step_time:.4g}, bubble {result.bubble_fraction:.1%}, peak memory {max(result.peak_memory):.4g}"
    return said if real is None else f"{said}; really {real.end:.4g}"


def _chunks(timeline: Timeline) -> dict[int, float]:
    """For each stage how pale it is drawn: the further chunks of its rank more."""
    stages: dict[int, set[int]] = {}
    for event in timeline.events:
        for part in event.step.computes:
            stages.setdefault(event.rank, set()).add(part.stage)
    return {stage: 0.45 * at / max(1, len(own) - 1) for own in stages.values() for at, stage in enumerate(sorted(own))}


def _draw(
    axes: Axes, timeline: Timeline, rows: list[float], pale: dict[int, float], *, numbers: tuple[float, float]
) -> None:
    """Boxes of one colour are one collection each, so that tens of thousands are drawn in a moment."""
    boxes: dict[tuple[float, float, float, str], list[tuple[float, float]]] = {}
    per_time, row_inches = numbers
    for event in timeline.events:
        row = rows[event.rank]
        for step, low, high in _parts(event):
            color = _color(step, pale)
            if color is None or event.duration <= 0:
                continue
            boxes.setdefault((row, low, high, color), []).append((event.start, event.duration))
            _number(
                axes, event, step, row + (low + high) / 2, per_time * event.duration, row_inches * (high - low), pale
            )
    for (row, low, high, color), spans in boxes.items():
        thin = color == _WAITING or high - low < 0.2 or per_time * min(span[1] for span in spans) < 0.03
        axes.broken_barh(
            spans, (row + low, high - low), facecolors=color, edgecolors="none" if thin else "white", linewidth=0.4
        )


def _parts(event: Event) -> list[tuple[MetaStep, float, float]]:
    """What is drawn for an event, and between which heights of its row."""
    if event.step.parts is not None:
        return [(event.step.parts[0], -0.42, -0.03), (event.step.parts[1], -0.03, 0.36)]
    if event.lane != "steps":
        return [(event.step, 0.38, 0.48)]
    return [(event.step, -0.42, 0.36) if event.step.type in COMPUTE else (event.step, -0.1, 0.04)]


def _color(step: MetaStep, pale: dict[int, float]) -> str | None:
    if step.type is _T.RESHARD:
        return None
    if step.type not in COLORS:
        return _WAITING
    share = pale.get(step.stage, 0.0) if step.type in COMPUTE else 0.0
    values = (int(COLORS[step.type][at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(value + (255 - value) * share):02x}" for value in values)


def _number(
    axes: Axes, event: Event, step: MetaStep, middle: float, width: float, height: float, pale: dict[int, float]
) -> None:
    """The micro-batch's number in the box, if it fits; sizes in inches."""
    text = str(step.micro_batch)
    size = min(_FONT, height * 72 * 0.95)
    if step.type not in COMPUTE or size < 4 or width * 72 < size * (0.6 * len(text) + 0.25):
        return
    dark = step.type in (_T.I, _T.W) or pale.get(step.stage, 0.0) > 0.2
    axes.text(
        (event.start + event.end) / 2,
        middle,
        text,
        ha="center",
        va="center_baseline",
        fontsize=size,
        color="black" if dark else "white",
        clip_on=True,
    )


def _legend(figure: Figure, timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    steps = [part for event in timeline.events if event.duration > 0 for part in event.step.computes or (event.step,)]
    types = {step.type for step in steps}
    patches = [
        Patch(color=color, label=_NAMES.get(kind, kind.value)) for kind, color in COLORS.items() if kind in types
    ]
    if types & {_T.SEND_F, _T.RECV_F, _T.SEND_B, _T.RECV_B}:
        patches.append(Patch(color=_WAITING, label="waiting for a message"))
    if patches:
        figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=7, frameon=False)


def _draw_memory(axes: Axes, result: Simulation) -> None:
    from matplotlib import colormaps

    ranks = result.schedule.ranks
    colors = colormaps["viridis"]
    for rank, curve in enumerate(result.memory):
        # What is freed and taken at the same moment, but for rounding, isn't drawn.
        at_last = {round(when / (result.step_time or 1.0), 9): level for when, level in curve}
        times = [*(share * result.step_time for share in at_last), result.step_time]
        levels = [*at_last.values(), curve[-1][1]]
        axes.step(
            times,
            levels,
            where="post",
            linewidth=1.1,
            color=colors(0.9 * rank / max(1, ranks - 1)),
            label=f"rank {rank}",
        )
    axes.set_ylabel("memory", fontsize=8)
    axes.set_ylim(bottom=0)
    axes.tick_params(axis="y", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    if ranks <= 8:
        axes.legend(fontsize=6.5, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), borderaxespad=0.2)
    else:
        axes.set_title(f"rank 0 (dark) to {ranks - 1} (light)", fontsize=7, loc="right", pad=2)
