"""Orders for any number of micro-batches: build for a number that the order likes, then leave out those that don't exist."""

from __future__ import annotations

from hp_pipeline.schedule import Schedule
from hp_pipeline.steps import MetaStep

__all__ = ["only_existing"]


def only_existing(schedule: Schedule, built_for: int) -> Schedule:
    """Without the steps of micro-batches beyond `schedule.micro_batches`. Micro-batches don't depend on one another.

    Args:
        schedule: for more micro-batches than it says, perhaps.
        built_for: how many it was built for.
    """
    count = schedule.micro_batches
    if built_for <= count:
        return schedule
    return schedule.with_steps([[left for step in steps for left in _left(step, count)] for steps in schedule.steps])


def _left(step: MetaStep, count: int) -> tuple[MetaStep, ...]:
    if step.parts is None:
        return (step,) if step.micro_batch is None or step.micro_batch < count else ()
    left = tuple(part for part in step.parts if part.micro_batch is not None and part.micro_batch < count)
    return (step,) if len(left) == 2 else left
