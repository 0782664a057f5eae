"""Stages whose parameters are sharded (FSDP): gathered before use, freed in between, gradients reduced once at the end."""

from __future__ import annotations

from collections.abc import Iterable

from hp_core.errors import PlanError
from hp_pipeline.passes.backward import merge_backward
from hp_pipeline.schedule import Schedule
from hp_pipeline.steps import COMPUTE, MetaStep, MetaStepType

__all__ = ["insert_fsdp"]

_UNSHARD, _RESHARD, _REDUCE = MetaStepType.UNSHARD, MetaStepType.RESHARD, MetaStepType.REDUCE_GRAD


def insert_fsdp(schedule: Schedule, stages: Iterable[int], ahead: int = 1) -> Schedule:
    """UNSHARD, RESHARD and REDUCE_GRAD around the computations of sharded stages.

    The backwards of sharded stages are merged (`merge_backward`): FSDP reduces gradients and frees the weights as a backward goes
    through its units, so nothing is left for W. A schedule that lives from W in its gaps has larger ones then; simulate what comes
    out.

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
    whole = merge_backward(schedule, sharded)
    return schedule.with_steps([_insert(steps, sharded, ahead) for steps in whole.steps])


def _insert(steps: tuple[MetaStep, ...], sharded: frozenset[int], ahead: int) -> list[MetaStep]:
    used = [_used(step) for step in steps]
    last = {stage: position for position, stages in enumerate(used) for stage in stages}
    order: list[MetaStep] = []
    whole: list[int] = []
    before: list[int] = []
    for position, (step, stages, wanted) in enumerate(zip(steps, used, _wanted(used, ahead), strict=True)):
        if stages and wanted is not before:
            before = wanted
            for stage in [stage for stage in whole if stage not in wanted]:
                whole.remove(stage)
                order.append(MetaStep(_RESHARD, stage))
            for stage in wanted:
                if stage in sharded and stage not in whole:
                    whole.append(stage)
                    order.append(MetaStep(_UNSHARD, stage))
        order.append(step)
        for stage in stages:
            if stage in sharded and last[stage] == position:
                whole.remove(stage)
                order += [MetaStep(_REDUCE, stage), MetaStep(_RESHARD, stage)]
    return order


def _used(step: MetaStep) -> tuple[int, ...]:
    """The stages that a step computes, each once, the forward's first."""
    parts = step.parts
    if parts is None:
        return (step.stage,) if step.type in COMPUTE else ()
    return tuple(dict.fromkeys((parts[1].stage, parts[0].stage)))


def _wanted(used: list[tuple[int, ...]], ahead: int) -> list[list[int]]:
    """For each position the stages used there and the next `ahead` others, in order of use; one list while nothing changes."""
    wanted: list[list[int]] = []
    coming: list[int] = []  # stages in order of their next use
    now: list[int] = []
    for stages in reversed(used):
        if stages and (tuple(coming[: len(stages)]) != stages or len(now) != min(len(coming), len(stages) + ahead)):
            coming = list(dict.fromkeys([*stages, *coming]))
            now = coming[: len(stages) + ahead]
        wanted.append(now)
    wanted.reverse()
    return wanted
