"""A timeline as a trace for chrome://tracing and ui.perfetto.dev: one process per rank, its lanes as threads, memory as a counter.

The format is Google's "Trace Event Format": complete events (X), metadata (M), counters (C), flows (s, f).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hp_pipeline.analysis import Simulation
from hp_pipeline.steps import MetaStepType
from hp_pipeline.timeline import Timeline

__all__ = ["to_trace", "write_trace"]

_RECEIVES = (MetaStepType.RECV_F, MetaStepType.RECV_B)


def to_trace(
    result: Simulation | Timeline, real: Timeline | None = None, *, unit: float = 1.0
) -> dict[str, list[dict[str, Any]] | str]:
    """A trace of what was predicted, recorded, or both.

    Args:
        result: of the simulator, or a recorded timeline.
        real: a recorded timeline to be shown below it, as further processes.
        unit: seconds that one unit of `result`'s time stands for; `real` is in seconds.

    Returns:
        The trace as it is written to JSON.
    """
    timeline = result.timeline if isinstance(result, Simulation) else result
    events = list(_of_timeline(timeline, 0, " (predicted)" if real is not None else "", unit))
    if isinstance(result, Simulation):
        events += _flows(result, events)
        events += [
            {
                "ph": "C",
                "name": "memory",
                "pid": rank,
                "tid": 0,
                "ts": _microseconds(when, unit),
                "args": {"memory": level},
            }
            for rank, curve in enumerate(result.memory)
            for when, level in curve
        ]
    if real is not None:
        events += _of_timeline(real, timeline.ranks, " (real)", 1.0)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(
    path: str | Path, result: Simulation | Timeline, real: Timeline | None = None, *, unit: float = 1.0
) -> None:
    """Write the trace of `to_trace` to a file."""
    Path(path).write_text(json.dumps(to_trace(result, real, unit=unit)), encoding="utf-8")


def _microseconds(when: float, unit: float) -> float:
    """A moment as the format wants it; to the nanosecond, which is all that viewers keep."""
    return round(when * unit * 1e6, 3)


def _of_timeline(timeline: Timeline, first_process: int, suffix: str, unit: float) -> Iterator[dict[str, Any]]:
    """All events of a timeline in its own order, after the names of processes and threads.

    Events of one thread must not overlap, so that a lane is as many threads as it has events at the same time.
    """
    threads: list[dict[str, list[tuple[int, float]]]] = [{} for _ in range(timeline.ranks)]
    names: list[dict[int, str]] = [{} for _ in range(timeline.ranks)]
    slices = []
    for event in timeline.events:
        rows = threads[event.rank].setdefault(event.lane, [])
        row = next((at for at, (_, until) in enumerate(rows) if until <= event.start), len(rows))
        if row == len(rows):
            thread = len(names[event.rank])
            names[event.rank][thread] = event.lane if row == 0 else f"{event.lane} ({row + 1})"
            rows.append((thread, event.end))
        rows[row] = (rows[row][0], event.end)
        step = event.step
        arguments: dict[str, Any] = {"stage": step.stage}
        if step.micro_batch is not None:
            arguments["micro_batch"] = step.micro_batch
        slices.append(
            {
                "ph": "X",
                "name": str(step),
                "cat": step.type.value,
                "pid": first_process + event.rank,
                "tid": rows[row][0],
                "ts": _microseconds(event.start, unit),
                "dur": round(_microseconds(event.end, unit) - _microseconds(event.start, unit), 3),
                "args": arguments,
            }
        )
    for rank in range(timeline.ranks):
        process = first_process + rank
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": f"rank {rank}{suffix}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}}
        for thread, name in names[rank].items():
            yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}
    yield from slices


def _flows(result: Simulation, events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """An arrow to each step that started as late as it did because of another rank."""
    slices = [event for event in events if event["ph"] == "X"]
    for index, cause in enumerate(result.because):
        source, target = slices[cause], slices[index]
        if cause < 0 or source["pid"] == target["pid"]:
            continue
        leaves = round(source["ts"] + source["dur"], 3)
        receives = result.timeline.events[index].step.type in _RECEIVES
        arrives = max(leaves, target["ts"]) if receives else target["ts"]
        shared = {"name": "message", "cat": "message", "id": index}
        yield {"ph": "s", "pid": source["pid"], "tid": source["tid"], "ts": leaves, **shared}
        yield {"ph": "f", "bp": "e", "pid": target["pid"], "tid": target["tid"], "ts": arrives, **shared}
