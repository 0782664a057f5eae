"""Sends and receives, in an order in which nobody waits in a circle even if a send waits for its receive.

The computations are put on a clock (`unit_times`). A message leaves when its computation ends, so messages and computations
have one order in time, for all ranks alike; each rank's steps are its part of that order. Whatever comes first in it can always
proceed, both ends of a message being next for their ranks: there is no deadlock, whatever is buffered.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from hp_core.errors import PlanError
from hp_pipeline.bulk import in_bulk
from hp_pipeline.flow import Flow, flow_of
from hp_pipeline.progress import LENGTH, unit_times
from hp_pipeline.schedule import Columns, Schedule, columns_of
from hp_pipeline.steps import COMMUNICATION, MetaStep, MetaStepType

__all__ = ["insert_communication", "overlap_communication"]

_F, _W = MetaStepType.F, MetaStepType.W
_SEND_F, _RECV_F, _SEND_B, _RECV_B = MetaStepType.SEND_F, MetaStepType.RECV_F, MetaStepType.SEND_B, MetaStepType.RECV_B


@in_bulk
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


@in_bulk
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
    columns = [columns_of(steps) for steps in schedule.steps]
    _check_numbers(schedule, columns)
    ends = unit_times(schedule, flow, columns)
    placement, ranks = schedule.placement, schedule.ranks
    many = 2 * (1 + sum(map(len, schedule.steps))) * schedule.stages  # more than there are messages, twice
    half = many // 2
    keys: list[list[int]] = [[] for _ in schedule.steps]
    orders: list[list[MetaStep]] = [[] for _ in schedule.steps]
    backwards, forwards = (
        [_ways(stage, flow, placement, forward) for stage in range(schedule.stages)] for forward in (False, True)
    )
    number = 0  # of a message, the same for both ends
    new = tuple.__new__
    for rank, steps in enumerate(schedule.steps):
        own_keys, own_steps = keys[rank], orders[rank]
        for position, (step, kind, stage, batch, _, pair, end) in enumerate(
            zip(steps, *columns[rank], ends[rank], strict=True)
        ):
            length = LENGTH.get(kind, 0)
            slot = 2 * (end * ranks + rank) if ahead else 2 * (end - length) + 1
            if not ahead:
                own_keys.append(slot * many + half + position)
            else:
                own_keys.append(slot * many if length else (slot + 1) * many + half + position)
            own_steps.append(step)
            if kind is _W or not length:
                continue
            if pair is None:
                ways = forwards[stage] if kind is _F else backwards[stage]
            else:
                ways = [*backwards[pair[0].stage], *forwards[pair[1].stage]]
            key = (slot + 1 if ahead else 2 * end) * many + number
            number += len(ways)
            for send, receive, source, target, far_source, far_target, to in ways:
                if pair is not None:
                    batch = pair[send is _SEND_F].micro_batch
                own_keys.append(key)
                own_steps.append(new(MetaStep, (send, source, batch, far_target, None)))
                keys[to].append(key)
                orders[to].append(new(MetaStep, (receive, target, batch, far_source, None)))
                key += 1
    return schedule.with_steps(
        map(own.__getitem__, sorted(range(len(own)), key=of_own.__getitem__))
        for own, of_own in zip(orders, keys, strict=True)
    )


def _check_numbers(schedule: Schedule, columns: list[Columns]) -> None:
    stages, batches = schedule.stages, schedule.micro_batches
    for rank, (_, of_stages, of_batches, _, pairs) in enumerate(columns):
        numbers = {batch or 0 for batch in set(of_batches)}
        if of_stages and (
            min(of_stages) < 0 or max(of_stages) >= stages or min(numbers) < 0 or max(numbers) >= batches
        ):
            _refuse_numbers(schedule, rank)
        for pair in filter(None, pairs):
            if not 0 <= pair[1].stage < stages or not 0 <= (pair[1].micro_batch or 0) < batches:
                _refuse_numbers(schedule, rank)
    if not all(0 <= rank < schedule.ranks for rank in schedule.placement):
        raise PlanError(
            f"schedule {schedule.name}: stages are placed on ranks {schedule.placement}, but there are steps for"
            f" {schedule.ranks} rank(s)."
        )


def _refuse_numbers(schedule: Schedule, rank: int) -> NoReturn:
    """Says which step of the rank is the first with a number that there isn't."""
    stages, batches = schedule.stages, schedule.micro_batches
    wrong = next(
        step
        for step in schedule.steps[rank]
        for part in step.parts or (step,)
        if not 0 <= part.stage < stages or not 0 <= (part.micro_batch or 0) < batches
    )
    raise PlanError(
        f"schedule {schedule.name}, rank {rank}, {wrong}: there are stages 0 to {stages - 1} and micro-batches 0 to {batches - 1}."
    )


_Way = tuple[MetaStepType, MetaStepType, int, int, "int | None", "int | None", int]


def _ways(stage: int, flow: Flow, placement: tuple[int, ...], forward: bool) -> list[_Way]:
    """Where a stage's outputs, or its gradients, are sent.

    Each as (send, receive, stage, other stage, the two again if they are no neighbours and None otherwise, rank of the other).
    """
    kinds = (_SEND_F, _RECV_F) if forward else (_SEND_B, _RECV_B)
    others = flow.takers[stage] if forward else flow.providers[stage]
    return [
        (*kinds, stage, other, *((stage, other) if abs(other - stage) > 1 else (None, None)), placement[other])
        for other in others
        if placement[other] != placement[stage]
    ]
