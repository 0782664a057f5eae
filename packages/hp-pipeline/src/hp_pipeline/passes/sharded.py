"""Stages whose parameters are sharded (FSDP): gathered before use, freed in between, gradients reduced once at the end."""

from __future__ import annotations

from collections.abc import Iterable

from hp_core.errors import PlanError
from hp_pipeline.schedule import Schedule
from hp_pipeline.steps import MetaStep, MetaStepType

__all__ = ["insert_fsdp"]

_UNSHARD, _RESHARD, _REDUCE = MetaStepType.UNSHARD, MetaStepType.RESHARD, MetaStepType.REDUCE_GRAD


def insert_fsdp(schedule: Schedule, stages: Iterable[int], ahead: int = 1) -> Schedule:
    """UNSHARD, RESHARD and REDUCE_GRAD around the computations of sharded stages.

    At any time a rank holds the whole parameters of the stage at work and of the `ahead` others that come next, so that gathering
    runs beside computing; any other is freed. The gradients of a stage are reduced after its last backward.

    Args:
        schedule: with communication or without.
        stages: the stages that are sharded.
        ahead: how many stages are gathered in advance, >= 0.

    Raises:
        PlanError: a stage that there isn't, a negative `ahead`, or the schedule has such steps already.
    """
    sharded = frozenset(stages)
    unknown = sorted(stage for stage in sharded if not 0 <= stage < schedule.stages)
    if unknown or ahead < 0:
        raise PlanError(
            f"insert_fsdp: stages {unknown} of {schedule.stages} don't exist."
            if unknown
            else f"insert_fsdp: ahead={ahead} < 0."
        )
    for rank, steps in enumerate(schedule.steps):
        for step in steps:
            if step.type in (_UNSHARD, _RESHARD, _REDUCE):
                raise PlanError(
                    f"schedule {schedule.name} has {step} on rank {rank} already; insert_fsdp is for schedules without."
                )
    return schedule.with_steps([_insert(steps, sharded, ahead) for steps in schedule.steps])


def _insert(steps: tuple[MetaStep, ...], sharded: frozenset[int], ahead: int) -> list[MetaStep]:
    last = {part.stage: position for position, step in enumerate(steps) for part in step.computes}
    wanted = _wanted(steps, ahead)
    order: list[MetaStep] = []
    whole: list[int] = []
    for position, step in enumerate(steps):
        used = list(dict.fromkeys(part.stage for part in reversed(step.computes)))
        if used:
            for stage in [stage for stage in whole if stage not in wanted[position]]:
                whole.remove(stage)
                order.append(MetaStep(_RESHARD, stage))
            for stage in wanted[position]:
                if stage in sharded and stage not in whole:
                    whole.append(stage)
                    order.append(MetaStep(_UNSHARD, stage))
        order.append(step)
        for stage in used:
            if stage in sharded and last[stage] == position:
                whole.remove(stage)
                order += [MetaStep(_REDUCE, stage), MetaStep(_RESHARD, stage)]
    return order


def _wanted(steps: tuple[MetaStep, ...], ahead: int) -> list[list[int]]:
    """For each position the stages used there, then the next `ahead` others, in order of use."""
    wanted: list[list[int]] = [[] for _ in steps]
    coming: list[int] = []  # stages in order of their next use
    for position in range(len(steps) - 1, -1, -1):
        used = [part.stage for part in reversed(steps[position].computes)]
        if used:
            coming = list(dict.fromkeys([*used, *coming]))
        wanted[position] = coming[: len(set(used)) + ahead]
    return wanted
