"""Sends and receives, in an order in which nobody waits in a circle even if a send waits for its receive.

The computations are put on a clock (`unit_times`). A message leaves when its computation ends, so messages and computations
have one order in time, for all ranks alike; each rank's steps are its part of that order. Whatever comes first in it can always
proceed, both ends of a message being next for their ranks: there is no deadlock, whatever is buffered.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter

from hp_core.errors import PlanError
from hp_pipeline.flow import Flow, flow_of
from hp_pipeline.progress import unit_times
from hp_pipeline.schedule import Schedule
from hp_pipeline.steps import COMMUNICATION, MetaStep, MetaStepType

__all__ = ["insert_communication", "overlap_communication"]

_F, _W = MetaStepType.F, MetaStepType.W
_SEND_F, _RECV_F, _SEND_B, _RECV_B = MetaStepType.SEND_F, MetaStepType.RECV_F, MetaStepType.SEND_B, MetaStepType.RECV_B


def insert_communication(schedule: Schedule, skips: Iterable[tuple[int, int]] = ()) -> Schedule:
    """Each output and each gradient sent right after the computation that makes it, and received as soon as it can be there.

    Nothing is sent between stages on the same rank. Receives come before the computations that begin after the message has left.

    Args:
        schedule: without communication.
        skips: skip connections (from stage, to stage): the outputs go there as well, and the gradients back.

    Raises:
        PlanError: it communicates already, its computations wait for one another, or a skip connection is none.
    """
    for rank, steps in enumerate(schedule.steps):
        for step in steps:
            if step.type in COMMUNICATION:
                raise PlanError(f"schedule {schedule.name} communicates already (rank {rank}: {step}); insert it once.")
    flow = flow_of(schedule.stages, skips)
    return _in_time(schedule, flow, ahead=False)


def overlap_communication(schedule: Schedule, skips: Iterable[tuple[int, int]] = ()) -> Schedule:
    """Receives before the computation that runs while the message is being made, so that they are posted when it leaves.

    That is at most one computation ahead of `insert_communication`'s place: one more message lies ready per connection. For
    runtimes that post a receive at its step and wait for it where it is used. One that waited at the step itself would be held
    up, but not for ever: computations and messages have one order again, by when they end. Of two computations that end
    together the one on the lower rank counts as earlier; its message is received ahead, that of the other can't be.

    Args:
        schedule: with communication or without; where it has some, it is placed anew.
        skips: as for `insert_communication`.

    Raises:
        PlanError: its computations wait for one another, or a skip connection is none.
    """
    bare = schedule.with_steps([[step for step in steps if step.type not in COMMUNICATION] for steps in schedule.steps])
    flow = flow_of(schedule.stages, skips)
    return _in_time(bare, flow, ahead=True)


def _in_time(schedule: Schedule, flow: Flow, *, ahead: bool) -> Schedule:
    """Steps and messages in one order of time: computations by when they begin, or `ahead` by when they end.

    A message leaves as its computation ends. By beginnings, messages come before all that begins then; by ends, a message comes
    right after its own computation, and ranks in turn.
    """
    _check_numbers(schedule)
    times = unit_times(schedule, flow)
    placement, ranks = schedule.placement, schedule.ranks
    many = 2 * (1 + sum(map(len, schedule.steps))) * schedule.stages  # more than there are messages, twice
    orders: list[list[tuple[int, MetaStep]]] = [[] for _ in schedule.steps]
    ways = [[_ways(stage, flow, placement, forward) for stage in range(schedule.stages)] for forward in (False, True)]
    number = 0  # of a message, the same for both ends
    for rank, steps in enumerate(schedule.steps):
        add = orders[rank].append
        for position, (step, (start, end)) in enumerate(zip(steps, times[rank], strict=True)):
            slot = 2 * (end * ranks + rank) if ahead else 2 * start + 1
            if end == start:
                add(((slot + ahead) * many + many // 2 + position, step))
                continue
            add((slot * many + (many // 2 + position) * (not ahead), step))
            if step.type is _W:
                continue
            slot = slot + 1 if ahead else 2 * end
            for part in step.parts or (step,):
                for send, receive, other, to, far in ways[part.type is _F][part.stage]:
                    key = slot * many + number
                    number += 1
                    add((key, MetaStep(send, part.stage, part.micro_batch, other if far else None)))
                    orders[to].append((key, MetaStep(receive, other, part.micro_batch, part.stage if far else None)))
    for own in orders:
        own.sort(key=itemgetter(0))
    return schedule.with_steps([[step for _, step in own] for own in orders])


def _check_numbers(schedule: Schedule) -> None:
    stages, batches = schedule.stages, schedule.micro_batches
    for rank, steps in enumerate(schedule.steps):
        for step in steps:
            for part in step.parts or (step,):
                if not 0 <= part.stage < stages or not 0 <= (part.micro_batch or 0) < batches:
                    raise PlanError(
                        f"schedule {schedule.name}, rank {rank}, {step}: there are stages 0 to {stages - 1} and micro-batches 0 to"
                        f" {batches - 1}."
                    )
    if not all(0 <= rank < schedule.ranks for rank in schedule.placement):
        raise PlanError(
            f"schedule {schedule.name}: stages are placed on ranks {schedule.placement}, but there are steps for"
            f" {schedule.ranks} rank(s)."
        )


_Way = tuple[MetaStepType, MetaStepType, int, int, bool]


def _ways(stage: int, flow: Flow, placement: tuple[int, ...], forward: bool) -> list[_Way]:
    """Where a stage's outputs, or its gradients, are sent: (send, receive, stage, its rank, whether it is no neighbour)."""
    kinds = (_SEND_F, _RECV_F) if forward else (_SEND_B, _RECV_B)
    others = flow.takers[stage] if forward else flow.providers[stage]
    return [
        (*kinds, other, placement[other], abs(other - stage) > 1)
        for other in others
        if placement[other] != placement[stage]
    ]
