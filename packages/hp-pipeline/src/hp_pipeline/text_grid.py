"""A schedule in the terminal: one row per rank, columns are time, each computation as wide as it lasts."""

from __future__ import annotations

from hp_pipeline.analysis import Simulation
from hp_pipeline.schedule import Schedule
from hp_pipeline.simulator import simulate
from hp_pipeline.steps import MetaStepType
from hp_pipeline.timeline import Event, Timeline

__all__ = ["grid"]

_T = MetaStepType
_COLORS = {_T.F: "44;97", _T.B: "42;30", _T.I: "46;30", _T.W: "102;30", _T.OVERLAP_B_F: "45;97"}
_MOST_COLUMNS = 4000


def grid(
    result: Schedule | Simulation | Timeline,
    *,
    width: int | None = None,
    color: bool = False,
    unit: float | None = None,
) -> str:
    """Draw computations in text.

    `F2` is the forward of micro-batch 2; where a rank has several stages it is `F5.2`, of stage 5. A dot is a unit of time without
    computation.

    Args:
        result: a schedule (drawn under unit costs), a simulation, or a recorded timeline.
        width: columns of the terminal; a longer grid continues below. None: as long as it is.
        color: with ANSI colours.
        unit: time of one column; None: the shortest computation's.
    """
    if isinstance(result, Schedule):
        result = simulate(result)
    timeline = result.timeline if isinstance(result, Simulation) else result
    events = [event for event in timeline.events if event.step.computes]
    if not events:
        return "\n".join(f"rank {rank}" for rank in range(timeline.ranks))
    chunked = len({part.stage for event in events for part in event.step.computes}) > timeline.ranks
    shortest = min((event.duration for event in events if event.duration > 0), default=1.0)
    unit = max(unit or shortest, timeline.end / _MOST_COLUMNS)

    cells = [_cells(timeline.of(rank), unit, chunked) for rank in range(timeline.ranks)]
    columns = max(len(of_rank) for of_rank in cells)
    # A column is as wide as the widest label needs, shared by the columns that the label spans.
    wide = max(-(-(len(label) + 1) // span) for of_rank in cells for label, span, _ in _runs(of_rank))
    head = [f"rank {rank} " for rank in range(timeline.ranks)]
    margin = max(map(len, head))
    per_block = columns if width is None else max(1, (width - margin) // wide)
    blocks = []
    for first in range(0, columns, per_block):
        rows = []
        if columns > per_block:
            rows.append(f"{'':{margin}}from {first * unit:g}")
        for rank, of_rank in enumerate(cells):
            row = of_rank[first : first + per_block]
            row += [("", None)] * (min(per_block, columns - first) - len(row))
            drawn = (_draw(label, span * wide, kind, color) for label, span, kind in _runs(row))
            rows.append((f"{head[rank]:<{margin}}" + "".join(drawn)).rstrip())
        blocks.append("\n".join(rows))
    return "\n\n".join(blocks)


_Cell = tuple[str, "MetaStepType | None"]


def _cells(events: tuple[Event, ...], unit: float, chunked: bool) -> list[_Cell]:
    """For each column what is computed then; a computation has at least one column of its own."""
    cells: list[_Cell] = []
    for event in events:
        parts = event.step.computes
        if not parts:
            continue
        label = "+".join(
            f"{p.type.value}{p.stage}.{p.micro_batch}" if chunked else f"{p.type.value}{p.micro_batch}" for p in parts
        )
        cells += [("", None)] * (round(event.start / unit) - len(cells))
        cells += [(label, event.step.type)] * max(1, round(event.end / unit) - len(cells))
    return cells


def _runs(cells: list[_Cell]) -> list[tuple[str, int, MetaStepType | None]]:
    """Neighbouring columns of one computation joined; columns without one stay single."""
    runs: list[tuple[str, int, MetaStepType | None]] = []
    for label, kind in cells:
        if kind is not None and runs and runs[-1][0] == label:
            runs[-1] = (label, runs[-1][1] + 1, kind)
        else:
            runs.append((label, 1, kind))
    return runs


def _draw(label: str, width: int, kind: MetaStepType | None, color: bool) -> str:
    """One computation, or one column without."""
    if kind is None:
        return f"{'.':<{width}}"
    text = f"{label[: width - 1]:<{width - 1}}"
    return f"\x1b[{_COLORS[kind]}m{text}\x1b[0m " if color else f"{text} "
