"""Costs for the simulator, taken from what ranks recorded: what a step of each stage takes, and a message between two.

The runtime records a step from when its messages are there, so durations hold no waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import median

from hp_core.errors import PlanError
from hp_pipeline.costs import Costs
from hp_pipeline.schedule import Schedule
from hp_pipeline.steps import MetaStep, MetaStepType
from hp_pipeline.timeline import Timeline

__all__ = ["measured_costs"]

_T = MetaStepType


def measured_costs(schedule: Schedule, timelines: Iterable[Timeline], base: Costs | None = None) -> Costs:
    """The costs that make the simulator predict runs like those that were recorded.

    Each is a median: of all F, I, W of a stage; where a stage has whole backwards only, half of B counts as I and half as W. The
    latency between two stages is the time from the end of a computation on one rank to the beginning of the one that uses its
    result on the other, where that one stood idle before; where nobody ever waited, what the other messages take. How much a
    pair hides (`Costs.overlap`) is what its steps gain over the parts' own times.

    Args:
        schedule: what ran.
        timelines: recorded runs of all ranks (`Timeline.merged`), in any unit; the costs are in the same. Let out the first
            runs, which plan and warm up.
        base: where what isn't measured comes from: memory, collectives, copies.

    Raises:
        PlanError: a stage has no forward or no backward that was recorded by itself.
    """
    runs = list(timelines)
    durations: dict[tuple[MetaStepType, int], list[float]] = {}
    for run in runs:
        for event in run.events:
            if event.step.type in (_T.F, _T.B, _T.I, _T.W):
                durations.setdefault((event.step.type, event.step.stage), []).append(event.duration)
    known = {key: median(values) for key, values in durations.items()}
    forward, inputs, weights = [], [], []
    for stage in range(schedule.stages):
        forward.append(_known(known, _T.F, stage))
        if (_T.I, stage) in known and (_T.W, stage) in known:
            inputs.append(known[_T.I, stage])
            weights.append(known[_T.W, stage])
        else:
            inputs.append(_known(known, _T.B, stage) / 2)
            weights.append(inputs[-1])
    latency = _latencies(schedule, runs)
    costs = replace(
        base or Costs(), forward=forward, input_gradient=inputs, weight_gradient=weights, latency=latency, recompute=0.0
    )
    return replace(costs, overlap=_hidden(runs, costs, schedule.stages))


def _known(known: Mapping[tuple[MetaStepType, int], float], kind: MetaStepType, stage: int) -> float:
    if (kind, stage) not in known:
        raise PlanError(
            f"measured_costs: no step {kind.value} of stage {stage} was recorded by itself; record a run of another schedule of "
            f"the same stages, say 1f1b or zbv."
        )
    return known[kind, stage]


def _latencies(schedule: Schedule, runs: list[Timeline]) -> list[float]:
    """For each edge the median of what a waiting rank saw; 0 where both stages are on one rank."""
    found: list[list[float]] = [[] for _ in range(schedule.stages - 1)]
    for run in runs:
        done: dict[MetaStep, float] = {}
        idle: dict[MetaStep, float] = {}  # since when the rank had computed nothing
        begin: dict[MetaStep, float] = {}
        for rank in range(run.ranks):
            free_since = float("-inf")
            for event in run.of(rank):
                if event.step.parts is None and event.step.computes:
                    done[event.step], begin[event.step], idle[event.step] = event.end, event.start, free_since
                if event.step.computes:  # pairs keep the rank busy, but don't say when each part begins and ends
                    free_since = event.end
        for step, start in begin.items():
            for source, edge in _made_by(step, schedule):
                left = done.get(source)
                if left is not None and idle[step] < left <= start:
                    found[edge].append(start - left)
    every = [value for values in found for value in values]
    usual = median(every) if every else 0.0
    owners = schedule.placement
    return [
        0.0 if owners[edge] == owners[edge + 1] else median(values) if values else usual
        for edge, values in enumerate(found)
    ]


def _made_by(step: MetaStep, schedule: Schedule) -> list[tuple[MetaStep, int]]:
    """The computations on another rank whose result a neighbour's computation waits for, and the edge between."""
    forward = step.type is _T.F
    other = step.stage + (-1 if forward else 1)
    if step.type is _T.W or not 0 <= other < schedule.stages:
        return []
    if schedule.placement[other] == schedule.placement[step.stage]:
        return []
    kinds = (_T.F,) if forward else (_T.B, _T.I)
    return [(MetaStep(kind, other, step.micro_batch), min(other, step.stage)) for kind in kinds]


def _hidden(runs: list[Timeline], costs: Costs, stages: int) -> float:
    """The share of the shorter part that pairs hide, over all that were recorded."""
    forward, inputs, weights = (costs.of(name, stages) for name in ("forward", "input_gradient", "weight_gradient"))
    shares = []
    for run in runs:
        for event in run.events:
            if event.step.parts is not None:
                back, ahead = event.step.parts
                parts = (
                    inputs[back.stage] + (weights[back.stage] if back.type is _T.B else 0.0),
                    forward[ahead.stage],
                )
                if min(parts) > 0:
                    shares.append((sum(parts) - event.duration) / min(parts))
    return min(max(median(shares), 0.0), 1.0) if shares else 0.0
