"""Whole backwards into input and weight gradients, and back."""

from __future__ import annotations

from collections.abc import Iterable

from hp_pipeline.schedule import Schedule
from hp_pipeline.steps import MetaStep, MetaStepType

__all__ = ["merge_backward", "split_backward"]

_B, _I, _W, _OVERLAP = MetaStepType.B, MetaStepType.I, MetaStepType.W, MetaStepType.OVERLAP_B_F


def split_backward(schedule: Schedule) -> Schedule:
    """Each B as I and W. The gradient can be sent between the two: W comes after the sends that follow its B."""
    return schedule.with_steps(map(_split, schedule.steps))


def _split(steps: tuple[MetaStep, ...]) -> list[MetaStep]:
    order: list[MetaStep] = []
    waiting: MetaStep | None = None
    for step in steps:
        if waiting and step.type is not MetaStepType.SEND_B and step.type is not MetaStepType.SEND_F:
            order.append(waiting)
            waiting = None
        backward = step.parts[0] if step.parts else step
        if backward.type is not _B:
            order.append(step)
            continue
        inputs = MetaStep(_I, backward.stage, backward.micro_batch)
        waiting = MetaStep(_W, backward.stage, backward.micro_batch)
        order.append(MetaStep.overlapped(inputs, step.parts[1]) if step.parts else inputs)
    return [*order, waiting] if waiting else order


def merge_backward(schedule: Schedule, stages: Iterable[int] | None = None) -> Schedule:
    """Each I and W as a B in the place of the I, since others may wait for its gradient.

    Args:
        schedule: with communication or without.
        stages: only of these stages; None for all.
    """
    chosen = frozenset(range(schedule.stages) if stages is None else stages)
    return schedule.with_steps(_merge(steps, chosen) for steps in schedule.steps)


def _merge(steps: tuple[MetaStep, ...], stages: frozenset[int]) -> list[MetaStep]:
    order = []
    for step in steps:
        backward = step.parts[0] if step.parts else step
        if backward.stage not in stages:
            order.append(step)
        elif backward.type is _I:
            whole = MetaStep(_B, backward.stage, backward.micro_batch)
            order.append(MetaStep.overlapped(whole, step.parts[1]) if step.parts else whole)
        elif step.type is not _W:
            order.append(step)
    return order
