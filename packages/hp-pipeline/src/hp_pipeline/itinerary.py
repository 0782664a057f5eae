"""`Itinerary`: what one rank walks, and how long what it sends must be kept. Worked out once, when a schedule is made of stages.

Buffers of sends are freed without asking the transport: what a peer sends later tells that earlier messages have arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hp_pipeline.schedule import Schedule
from hp_pipeline.steps import COMMUNICATION, MetaStep, MetaStepType

__all__ = ["Itinerary", "forward_steps", "itinerary_of", "releases", "unaware"]

_T = MetaStepType
_SENDS = frozenset({_T.SEND_F, _T.SEND_B})
_RECEIVES = frozenset({_T.RECV_F, _T.RECV_B})
_FORWARD = frozenset({_T.F, _T.SEND_F, _T.RECV_F, _T.UNSHARD, _T.RESHARD})


@dataclass(frozen=True)
class Itinerary:
    """A rank's steps in a run, with what depends on nothing but them.

    Attributes:
        steps: them.
        releases: for each receive, at which position, the positions of sends that are then known to have arrived.
        last_sends: positions of sends after which the outputs of that stage and micro-batch go nowhere else.
    """

    steps: tuple[MetaStep, ...]
    releases: Mapping[int, Sequence[int]]
    last_sends: frozenset[int]


def itinerary_of(schedule: Schedule, rank: int, train: bool) -> Itinerary:
    """What a rank of a schedule does.

    Args:
        schedule: with sends and receives.
        rank: position along the pipeline axis.
        train: whether there are backwards.
    """
    steps = schedule.steps if train else tuple(map(forward_steps, schedule.steps))
    last = {(step.stage, step.micro_batch): at for at, step in enumerate(steps[rank]) if step.type is _T.SEND_F}
    return Itinerary(steps[rank], releases(steps, schedule.placement, rank), frozenset(last.values()))


def forward_steps(steps: Sequence[MetaStep]) -> tuple[MetaStep, ...]:
    """The steps of a run without backwards."""
    found = (step.parts[1] if step.parts is not None else step for step in steps)
    return tuple(step for step in found if step.type in _FORWARD)


def releases(steps: Sequence[Sequence[MetaStep]], placement: Sequence[int], rank: int) -> dict[int, list[int]]:
    """For each receive of a rank, which of its sends have arrived when that message has.

    A peer takes its steps in order: what it sends after it has received something tells of that.

    Args:
        steps: of all ranks.
        placement: for each stage its rank.
        rank: whose sends.

    Returns:
        Positions of sends by position of the receive.
    """
    found: dict[int, list[int]] = {}
    for peer, (sends, receives) in _messages(steps[rank], placement).items():
        answers, arrivals = _messages(steps[peer], placement).get(rank, ([], []))
        number = 0
        for sent, arrival in zip(sends, arrivals, strict=False):
            while number < len(answers) and answers[number] < arrival:
                number += 1
            if number < min(len(answers), len(receives)):
                found.setdefault(receives[number], []).append(sent)
    return found


def _messages(steps: Sequence[MetaStep], placement: Sequence[int]) -> dict[int, tuple[list[int], list[int]]]:
    """By the rank at the other end, the positions of sends and of receives."""
    found: dict[int, tuple[list[int], list[int]]] = {}
    for at, step in enumerate(steps):
        if step.type in COMMUNICATION:
            found.setdefault(placement[step.peer_stage], ([], []))[step.type in _RECEIVES].append(at)
    return found


def unaware(schedule: Schedule, rank: int, at: int) -> list[int]:
    """The ranks that don't hear of a failure in the same run, because it comes too late.

    A rank that has failed says so in all that it still sends; who computes with that fails in turn.

    Args:
        schedule: with sends and receives.
        rank: which has failed, as a position along the pipeline axis.
        at: at which position of its steps.

    Returns:
        Their positions along the pipeline axis, ascending.
    """
    steps = schedule.steps
    uses = {  # where an output (True) or gradient (False) that is sent to a stage is needed
        (part.stage, part.micro_batch, part.type is _T.F): position
        for own in steps
        for position, step in enumerate(own)
        for part in step.computes
        if part.type is not _T.W
    }
    heard = {rank: at}
    telling = [rank]
    while telling:
        source = telling.pop()
        for step in steps[source][heard[source] :]:
            if step.type not in _SENDS:
                continue
            peer = step.peer_stage
            target, position = schedule.placement[peer], uses[peer, step.micro_batch, step.type is _T.SEND_F]
            if position < heard.get(target, len(steps[target])):
                heard[target] = position
                telling.append(target)
    return [each for each in range(schedule.ranks) if each not in heard]
