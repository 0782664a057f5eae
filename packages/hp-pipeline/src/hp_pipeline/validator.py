"""The proof, before the first step, that a schedule computes everything once and in a possible order, and can't deadlock.

First each rank's steps are walked alone (`_Walk`): what a step needs must be there by then, computed on the same rank or
received. Then the ranks' messages are laid side by side: each pair of ranks must send and receive the same ones in the
same order, and nobody may wait in a circle.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, NoReturn

from hp_core.errors import PlanError
from hp_pipeline.bulk import in_bulk
from hp_pipeline.flow import Flow, flow_of
from hp_pipeline.progress import cycle_from, unit_times
from hp_pipeline.schedule import Schedule, columns_of
from hp_pipeline.steps import COMMUNICATION, MetaStep, MetaStepType, plain_step

__all__ = ["peak_in_flight", "validate"]

_T = MetaStepType
_F, _B, _I, _W = _T.F, _T.B, _T.I, _T.W
_SEND_F, _RECV_F, _SEND_B, _RECV_B = _T.SEND_F, _T.RECV_F, _T.SEND_B, _T.RECV_B
_UNSHARD, _RESHARD, _REDUCE, _OUT, _IN = _T.UNSHARD, _T.RESHARD, _T.REDUCE_GRAD, _T.SWAP_OUT, _T.SWAP_IN

# How far a stage is with a micro-batch.
_NOTHING, _FORWARDED, _AWAY, _INPUTS, _DONE = range(5)
_END = sys.maxsize  # after the last event of a rank
_FAR = ("hasn't had its forward", "has had its forward", "is swapped out", "has had its input gradient", "is done")


@in_bulk
def validate(
    schedule: Schedule,
    *,
    rendezvous: bool = True,
    memory: int | Sequence[int] | None = None,
    skips: Iterable[tuple[int, int]] = (),
) -> None:
    """Proves that a schedule is right, or raises.

    - Each stage computes each micro-batch once: F, then B or I and W; on its rank; after what it needs.
    - Each output and gradient for a stage on another rank is sent once and received once, and each pair of ranks agrees on
      the order. A schedule without any communication is proven as an order of computations.
    - Nobody waits in a circle.
    - Sharded stages are whole when used, freed at the end, and their gradients reduced once, after the last backward.
      Activations that are swapped out are back before their backward.

    Args:
        schedule: the schedule.
        rendezvous: a send waits for its receive, as unbuffered transports do; if False, sends don't wait.
        memory: the most activations (a stage's of one micro-batch, from its forward to its weight gradient, unless swapped out)
            that a rank may hold, for all ranks or for each; None to not check.
        skips: skip connections (from stage, to stage).

    Raises:
        PlanError: naming the rank, the position and the step; a deadlock is told as the circle of steps that wait for one another.
    """
    flow = flow_of(schedule.stages, skips)
    _check_head(schedule)
    talks = any(step.type in COMMUNICATION for steps in schedule.steps for step in steps)
    walks = [_Walk(schedule, flow, rank, talks) for rank in range(schedule.ranks)]
    for walk in walks:
        walk.run()
    if talks:
        _check_messages(schedule, walks)
        _check_deadlock(schedule, walks, rendezvous)
    else:
        unit_times(schedule, flow)
    if memory is not None:
        _check_memory(schedule, memory)


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """For each rank the most activations it holds at a time: from forward to weight gradient, less those swapped out."""
    peaks = []
    for steps in schedule.steps:
        held = peak = 0
        for step in steps:
            kind = step.type
            if kind is _F or kind is _IN or step.parts:  # of a pair the forward counts before the backward is done
                held += 1
                peak = max(peak, held)
            if kind is _B or kind is _W or kind is _OUT or (step.parts and step.parts[0].type is _B):
                held -= 1
        peaks.append(peak)
    return tuple(peaks)


def _check_head(schedule: Schedule) -> None:
    wrong = [stage for stage, rank in enumerate(schedule.placement) if not 0 <= rank < schedule.ranks]
    if wrong:
        raise PlanError(
            f"schedule {schedule.name}: stage {wrong[0]} is placed on rank {schedule.placement[wrong[0]]}, but there are steps for"
            f" {schedule.ranks} rank(s)."
        )
    if schedule.micro_batches < 1 or not schedule.placement:
        raise PlanError(
            f"schedule {schedule.name}: {schedule.micro_batches} micro-batches in {schedule.stages} stages; both must be >= 1."
        )


def _check_memory(schedule: Schedule, memory: int | Sequence[int]) -> None:
    limits = [memory] * schedule.ranks if isinstance(memory, int) else list(memory)
    if len(limits) != schedule.ranks:
        raise PlanError(f"schedule {schedule.name} has {schedule.ranks} ranks, but memory is given for {len(limits)}.")
    for rank, (peak, limit) in enumerate(zip(peak_in_flight(schedule), limits, strict=True)):
        if peak > limit:
            raise PlanError(
                f"schedule {schedule.name}: rank {rank} holds {peak} activations at a time, more than the {limit} allowed."
            )


class _Way(NamedTuple):
    """What a stage sends or receives, on one side of a connection between ranks.

    Attributes:
        first: number of the message of micro-batch 0; those of others follow.
        other: the rank at the other end; inverted for receives.
        least: how far the stage must be.
        log: the numbers of this direction's messages so far, to or from that rank.
    """

    first: int
    other: int
    least: int
    log: list[int]


class _Walk:
    """One rank's steps, one by one: what is done, what is there, and what it tells others.

    Messages are numbered by (whether it is a gradient, from stage, to stage, micro-batch).
    """

    def __init__(self, schedule: Schedule, flow: Flow, rank: int, talks: bool) -> None:
        self._schedule, self._flow, self._rank = schedule, flow, rank
        self._own = frozenset(schedule.stages_of(rank))
        self._far = {stage: bytearray(schedule.micro_batches) for stage in self._own}
        self._left = dict.fromkeys(self._own, schedule.micro_batches)
        self._seen: set[int] = set()
        self._whole: dict[int, bool] = {}  # sharded stages, and whether they are gathered now
        self._reduced: set[int] = set()
        self._at = 0
        self.events: list[int] = []
        """For each message the rank at the other end; inverted if it is received."""
        self.sent: dict[int, list[int]] = {}
        """To each rank the messages in order."""
        self.received: dict[int, list[int]] = {}
        """From each rank likewise."""
        self._ways = {key: way for stage in self._own for key, way in self._ways_of(stage)}
        # What a forward and a backward need: from stages on this rank, and as numbers of messages.
        self._needs = {
            (stage, backward): (
                [other for other in sources if other in self._own],
                [(other, self._first(backward, other, stage)) for other in sources if talks and other not in self._own],
            )
            for stage in self._own
            for backward, sources in ((False, flow.providers[stage]), (True, flow.takers[stage]))
        }

    def run(self) -> None:
        steps = self._schedule.steps[self._rank]
        self._whole = {step.stage: False for step in steps if step.type is _UNSHARD}
        batches, far_of, ways, seen = self._schedule.micro_batches, self._far, self._ways, self._seen
        event = self.events.append
        for at, (kind, stage, batch, peer, pair) in enumerate(zip(*columns_of(steps), strict=True)):
            self._at = at
            far = far_of.get(stage)
            if far is None:
                self._refuse(stage, "doesn't run here")
            if batch is None:
                self._shard(kind, stage)
                continue
            if not 0 <= batch < batches:
                self._refuse(stage, f"has micro-batches 0 to {batches - 1} only")
            way = ways.get((kind, stage, peer))
            if way is not None:
                first, other, least, log = way
                message = first + batch
                if message in seen:
                    self._refuse(stage, "has had this message already")
                if far[batch] < least:
                    what = (
                        "outputs to send before its forward"
                        if least == _FORWARDED
                        else "gradient to send before its backward"
                    )
                    self._refuse(stage, f"has no {what}")
                seen.add(message)
                log.append(message)
                event(other)
            elif kind is _F:
                self._forward(stage, batch)
                far[batch] = _FORWARDED
            elif kind is _W:
                if far[batch] != _INPUTS or self._whole:
                    self._backward(kind, stage, batch)
                far[batch] = _DONE
                self._left[stage] -= 1
            elif kind is _B or kind is _I:
                self._backward(kind, stage, batch)
                self._mark(kind, stage, batch)
            elif pair is not None:
                self._pair(*pair)
            elif kind in COMMUNICATION:
                self._refuse_message(steps[at])
            else:
                self._swap(kind, stage, batch)
        self._finish()

    def _pair(self, backward: MetaStep, forward: MetaStep) -> None:
        batches = self._schedule.micro_batches
        if forward.stage not in self._own or not 0 <= (forward.micro_batch or 0) < batches:
            self._refuse(forward.stage, f"doesn't run here, or has micro-batches 0 to {batches - 1} only")
        self._backward(backward.type, backward.stage, backward.micro_batch or 0)
        self._forward(forward.stage, forward.micro_batch or 0)
        self._far[forward.stage][forward.micro_batch or 0] = _FORWARDED
        self._mark(backward.type, backward.stage, backward.micro_batch or 0)

    def _forward(self, stage: int, batch: int) -> None:
        far = self._far
        if far[stage][batch] != _NOTHING:
            self._refuse(stage, f"{_FAR[far[stage][batch]]} with micro-batch {batch} already")
        near, distant = self._needs[stage, False]
        for source in near:
            if far[source][batch] == _NOTHING:
                self._refuse(stage, f"needs the outputs of stage {source}, which comes later on this rank")
        for source, first in distant:
            if first + batch not in self._seen:
                self._refuse(stage, f"needs the outputs of stage {source}, which haven't been received yet")
        if self._whole:
            self._need_whole(stage)

    def _backward(self, kind: MetaStepType, stage: int, batch: int) -> None:
        far = self._far[stage][batch]
        if far != (_INPUTS if kind is _W else _FORWARDED):
            self._refuse(stage, f"{_FAR[far]} with micro-batch {batch}" + (" already" if far > _AWAY else ""))
        if self._whole:
            self._need_whole(stage)
        if kind is _W:
            return
        near, distant = self._needs[stage, True]
        for target in near:
            if self._far[target][batch] < _INPUTS:
                self._refuse(stage, f"needs the gradient from stage {target}, which comes later on this rank")
        for target, first in distant:
            if first + batch not in self._seen:
                self._refuse(stage, f"needs the gradient from stage {target}, which hasn't been received yet")

    def _mark(self, kind: MetaStepType, stage: int, batch: int) -> None:
        done = kind is not _I
        self._far[stage][batch] = _DONE if done else _INPUTS
        self._left[stage] -= done

    def _first(self, gradient: bool, source: int, target: int) -> int:
        """The number of micro-batch 0's message."""
        stages = self._schedule.stages
        return ((gradient * stages + source) * stages + target) * self._schedule.micro_batches

    def _ways_of(self, stage: int) -> Iterator[tuple[tuple[MetaStepType, int, int | None], _Way]]:
        """By type, stage and peer as a step has them: the messages of a stage."""
        flow, placement = self._flow, self._schedule.placement
        for kind, others in (
            (_SEND_F, flow.takers[stage]),
            (_RECV_B, flow.takers[stage]),
            (_SEND_B, flow.providers[stage]),
            (_RECV_F, flow.providers[stage]),
        ):
            sends, gradient = kind is _SEND_F or kind is _SEND_B, kind is _SEND_B or kind is _RECV_B
            for peer in others:
                other = placement[peer]
                if other == self._rank:
                    continue
                log = (self.sent if sends else self.received).setdefault(other, [])
                least = (_INPUTS if gradient else _FORWARDED) if sends else _NOTHING
                first = self._first(gradient, *((stage, peer) if sends else (peer, stage)))
                way = _Way(first, other if sends else ~other, least, log)
                yield (kind, stage, peer), way
                if peer == plain_step(kind, stage, 0).peer_stage:
                    yield (kind, stage, None), way

    def _refuse_message(self, step: MetaStep) -> NoReturn:
        stage, peer, flow = step.stage, step.peer_stage, self._flow
        ways = flow.takers if step.type is _SEND_F or step.type is _RECV_B else flow.providers
        if peer not in ways[stage]:
            self._refuse(stage, f"has no connection to stage {peer} this way; name skip connections in `skips`")
        self._refuse(stage, f"is on the same rank as stage {peer}: nothing is sent between them")

    def _swap(self, kind: MetaStepType, stage: int, batch: int) -> None:
        far = self._far[stage][batch]
        if far != (_FORWARDED if kind is _OUT else _AWAY):
            self._refuse(
                stage,
                f"{_FAR[far]} with micro-batch {batch}; activations go out after the forward and come back before the backward",
            )
        self._far[stage][batch] = _AWAY if kind is _OUT else _FORWARDED

    def _shard(self, kind: MetaStepType, stage: int) -> None:
        if kind is _REDUCE:
            if self._left[stage]:
                self._refuse(stage, f"has {self._left[stage]} backward(s) to come")
            if stage in self._reduced:
                self._refuse(stage, "has had its gradients reduced already")
            self._reduced.add(stage)
        elif self._whole.get(stage, False) is (kind is _UNSHARD):
            self._refuse(stage, "is whole already" if kind is _UNSHARD else "isn't whole")
        else:
            self._whole[stage] = kind is _UNSHARD

    def _need_whole(self, stage: int) -> None:
        if not self._whole.get(stage, True):
            self._refuse(stage, "is sharded here; UNSHARD comes first")

    def _finish(self) -> None:
        where = f"schedule {self._schedule.name}, rank {self._rank}: "
        for stage in sorted(self._own):
            for batch, far in enumerate(self._far[stage]):
                if far != _DONE:
                    raise PlanError(
                        f"{where}at the end stage {stage} {_FAR[far]} with micro-batch {batch}: a step is missing."
                    )
            if self._whole.get(stage, False):
                raise PlanError(f"{where}at the end stage {stage} is whole: RESHARD{stage} is missing.")
            if stage in self._whole and stage not in self._reduced:
                raise PlanError(
                    f"{where}the gradients of sharded stage {stage} are never reduced: REDUCE_GRAD{stage} is missing."
                )

    def _refuse(self, stage: int, why: str) -> NoReturn:
        step = self._schedule.steps[self._rank][self._at]
        raise PlanError(
            f"schedule {self._schedule.name}, rank {self._rank}, step {self._at} ({step}): stage {stage} {why}."
        )


def _check_messages(schedule: Schedule, walks: list[_Walk]) -> None:
    """Each pair of ranks: what one sends the other receives, in the same order."""
    for source, walk in enumerate(walks):
        for target, other in enumerate(walks):
            sent, received = walk.sent.get(target, []), other.received.get(source, [])
            if sent == received:
                continue
            pairs = enumerate(zip(sent, received, strict=False))
            index = next((i for i, (a, b) in pairs if a != b), min(len(sent), len(received)))
            ends = [
                f"rank {rank} {does} nothing more"
                if index >= len(each)
                else f"rank {rank} {does} {_told_message(schedule, rank, walks[rank].events, code, index)}"
                for rank, does, each, code in (
                    (source, "sends", sent, target),
                    (target, "receives", received, ~source),
                )
            ]
            raise PlanError(
                f"schedule {schedule.name}, message {index} from rank {source} to rank {target}: {ends[0]}, but {ends[1]}. Both"
                " must name the same messages in the same order."
            )


def _check_deadlock(schedule: Schedule, walks: list[_Walk], rendezvous: bool) -> None:
    """Runs the messages alone: the rest never waits. Order and partners are known to agree."""
    ends = [[*walk.events, _END] for walk in walks]
    next_event = [0] * len(walks)
    under_way = [[0] * len(walks) for _ in walks]  # without rendezvous: sent from one to another and not received
    ready = list(range(len(walks)))
    while ready:
        rank = ready.pop()
        own, at = ends[rank], next_event[rank]
        while (event := own[at]) != _END:
            sends = event >= 0
            other = event if sends else ~event
            if rendezvous:
                across = next_event[other]
                if ends[other][across] != (~rank if sends else rank):
                    break
                next_event[other] = across + 1
                ready.append(other)
            elif sends:
                under_way[rank][other] += 1
                ready.append(other)
            elif under_way[other][rank]:
                under_way[other][rank] -= 1
            else:
                break
            at += 1
        next_event[rank] = at
    waits = {}
    for rank, own in enumerate(ends):
        event = own[next_event[rank]]
        if event != _END:
            told = _told(schedule, rank, _positions(schedule, rank)[next_event[rank]])
            waits[rank] = (f"rank {rank} in {told} waits", event if event >= 0 else ~event)
    if waits:
        how = "if sends wait for their receives" if rendezvous else "even with buffered sends"
        raise PlanError(f"schedule {schedule.name} deadlocks {how}: {cycle_from(waits, 'for')}.")


def _told(schedule: Schedule, rank: int, at: int) -> str:
    return f"step {at} ({schedule.steps[rank][at]})"


def _positions(schedule: Schedule, rank: int) -> list[int]:
    """Where a rank's messages are in its steps."""
    return [at for at, step in enumerate(schedule.steps[rank]) if step.type in COMMUNICATION]


def _told_message(schedule: Schedule, rank: int, events: list[int], event: int, index: int) -> str:
    """The step of one of the messages that are the same event for a rank."""
    same = [at for at, each in zip(_positions(schedule, rank), events, strict=True) if each == event]
    return _told(schedule, rank, same[index])
