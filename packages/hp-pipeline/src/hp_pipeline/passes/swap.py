"""Activations to the host and back, so that a rank keeps only some of those that wait for their backward."""

from __future__ import annotations

from hp_core.errors import PlanError
from hp_pipeline.schedule import Schedule
from hp_pipeline.steps import MetaStep, MetaStepType

__all__ = ["insert_swaps"]

_SEND_F, _SEND_B, _W = MetaStepType.SEND_F, MetaStepType.SEND_B, MetaStepType.W
_OUT, _IN = MetaStepType.SWAP_OUT, MetaStepType.SWAP_IN
_Key = tuple[int, int]


def insert_swaps(schedule: Schedule, keep: int) -> Schedule:
    """After each computation, at most `keep` activations that wait for their backward stay on the device.

    Those go whose backward is furthest away, right after the forward (and its sends) that makes them too many. Each comes
    back one computation before its backward, to travel beside it; so `keep` = 1 is possible. What waits for a weight gradient
    alone isn't moved.

    Args:
        schedule: with communication or without.
        keep: activations (a stage's of one micro-batch) that may stay, >= 1.

    Raises:
        PlanError: `keep` is below 1, or the schedule swaps already.
    """
    if keep < 1:
        raise PlanError(
            f"insert_swaps: keep={keep}; the activation whose backward is next must stay, so 1 is the least."
        )
    for rank, steps in enumerate(schedule.steps):
        for step in steps:
            if step.type in (_OUT, _IN):
                raise PlanError(
                    f"schedule {schedule.name} swaps already (rank {rank}: {step}); insert_swaps is for schedules without."
                )
    return schedule.with_steps([_insert(steps, keep) for steps in schedule.steps])


def _insert(steps: tuple[MetaStep, ...], keep: int) -> list[MetaStep]:
    computing = [position for position, step in enumerate(steps) if step.computes]
    back: dict[_Key, int] = {}  # when, counted in computations, the backward of an activation begins
    for index, position in enumerate(computing):
        for part in steps[position].computes:
            if part.type is not MetaStepType.F and part.type is not _W:
                back[_key(part)] = index
    due = {index: key for key, index in back.items()}
    order: list[MetaStep] = []
    resident: set[_Key] = set()
    away: set[_Key] = set()
    leaving: list[MetaStep] = []  # let the sends pass first
    index = -1
    for step in steps:
        if leaving and step.type is not _SEND_F and step.type is not _SEND_B:
            order += leaving
            leaving = []
        if not step.computes:
            order.append(step)
            continue
        index += 1
        coming = due.get(index + 1)
        if coming in away:
            order.append(MetaStep(_IN, *coming))
            away.remove(coming)
            resident.add(coming)
        order.append(step)
        for part in step.computes:
            if part.type is MetaStepType.F:
                resident.add(_key(part))
            else:
                resident.discard(_key(part))
        while len(resident) > keep:
            furthest = max(resident, key=lambda key: (back[key], key))
            resident.remove(furthest)
            away.add(furthest)
            leaving.append(MetaStep(_OUT, *furthest))
    return order + leaving


def _key(step: MetaStep) -> _Key:
    return step.stage, step.micro_batch or 0
