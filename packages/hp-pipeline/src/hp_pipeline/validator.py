"""The proof, before the first step, that a schedule computes everything once and in a possible order, and can't deadlock.

First each rank's steps are walked alone (`_Walk`): what a step needs must be there by then, computed on the same rank or
received. Then the ranks' messages are laid side by side: each pair of ranks must send and receive the same ones in the
same order, and nobody may wait in a circle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

from hp_core.errors import PlanError
from hp_pipeline.flow import Flow, flow_of
from hp_pipeline.progress import cycle_from, unit_times
from hp_pipeline.schedule import Schedule
from hp_pipeline.steps import COMMUNICATION, MetaStep, MetaStepType

__all__ = ["peak_in_flight", "validate"]

_T = MetaStepType
_F, _B, _I, _W = _T.F, _T.B, _T.I, _T.W
_SEND_F, _RECV_F, _SEND_B, _RECV_B = _T.SEND_F, _T.RECV_F, _T.SEND_B, _T.RECV_B
_UNSHARD, _RESHARD, _REDUCE, _OUT, _IN = _T.UNSHARD, _T.RESHARD, _T.REDUCE_GRAD, _T.SWAP_OUT, _T.SWAP_IN

# How far a stage is with a micro-batch.
_NOTHING, _FORWARDED, _AWAY, _INPUTS, _DONE = range(5)
_FAR = ("hasn't had its forward", "has had its forward", "is swapped out", "has had its input gradient", "is done")


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


_Message = tuple[int, int, int, bool]
"""From stage, to stage, micro-batch, whether it is a gradient."""


class _Walk:
    """One rank's steps, one by one: what is done, what is there, and what it tells others."""

    def __init__(self, schedule: Schedule, flow: Flow, rank: int, talks: bool) -> None:
        self._schedule, self._flow, self._rank, self._talks = schedule, flow, rank, talks
        self._own = frozenset(schedule.stages_of(rank))
        self._far: dict[int, list[int]] = {stage: [_NOTHING] * schedule.micro_batches for stage in self._own}
        self._left = dict.fromkeys(self._own, schedule.micro_batches)
        self._received: set[_Message] = set()
        self._sent: set[_Message] = set()
        self._whole: dict[int, bool] = {}  # sharded stages, and whether they are gathered now
        self._reduced: set[int] = set()
        self._at = 0
        self.events: list[tuple[int, int]] = []
        """For each message (position, the rank at the other end)."""
        self.sent: dict[int, list[tuple[_Message, int]]] = {}
        """To each rank the messages in order, with the positions of their steps."""
        self.received: dict[int, list[tuple[_Message, int]]] = {}
        """From each rank likewise."""

    def run(self) -> None:
        steps = self._schedule.steps[self._rank]
        self._whole = {step.stage: False for step in steps if step.type is _UNSHARD}
        batches = self._schedule.micro_batches
        for self._at, step in enumerate(steps):
            if step.stage not in self._own:
                self._refuse(step.stage, "doesn't run here")
            if step.micro_batch is not None and not 0 <= step.micro_batch < batches:
                self._refuse(step.stage, f"has micro-batches 0 to {batches - 1} only")
            kind = step.type
            if kind is _F:
                self._forward(step, step.stage, step.micro_batch or 0)
                self._far[step.stage][step.micro_batch or 0] = _FORWARDED
            elif kind is _B or kind is _I or kind is _W:
                self._backward(step, step.stage, step.micro_batch or 0)
                self._mark(step)
            elif step.parts is not None:
                backward, forward = step.parts
                if forward.stage not in self._own or not 0 <= (forward.micro_batch or 0) < batches:
                    self._refuse(forward.stage, f"doesn't run here, or has micro-batches 0 to {batches - 1} only")
                self._backward(backward, backward.stage, backward.micro_batch or 0)
                self._forward(forward, forward.stage, forward.micro_batch or 0)
                self._far[forward.stage][forward.micro_batch or 0] = _FORWARDED
                self._mark(backward)
            elif kind in COMMUNICATION:
                self._message(step)
            elif kind is _OUT or kind is _IN:
                self._swap(step, step.stage, step.micro_batch or 0)
            else:
                self._shard(step)
        self._finish()

    def _forward(self, step: MetaStep, stage: int, batch: int) -> None:
        if self._far[stage][batch] != _NOTHING:
            self._refuse(stage, f"{_FAR[self._far[stage][batch]]} with micro-batch {batch} already")
        for source in self._flow.providers[stage]:
            if source in self._own:
                if self._far[source][batch] == _NOTHING:
                    self._refuse(stage, f"needs the outputs of stage {source}, which comes later on this rank")
            elif self._talks and (source, stage, batch, False) not in self._received:
                self._refuse(stage, f"needs the outputs of stage {source}, which haven't been received yet")
        self._need_whole(stage)

    def _backward(self, step: MetaStep, stage: int, batch: int) -> None:
        far = self._far[stage][batch]
        if far != (_INPUTS if step.type is _W else _FORWARDED):
            self._refuse(stage, f"{_FAR[far]} with micro-batch {batch}" + (" already" if far > _AWAY else ""))
        self._need_whole(stage)
        if step.type is _W:
            return
        for target in self._flow.takers[stage]:
            if target in self._own:
                if self._far[target][batch] < _INPUTS:
                    self._refuse(stage, f"needs the gradient from stage {target}, which comes later on this rank")
            elif self._talks and (target, stage, batch, True) not in self._received:
                self._refuse(stage, f"needs the gradient from stage {target}, which hasn't been received yet")

    def _mark(self, step: MetaStep) -> None:
        done = step.type is not _I
        self._far[step.stage][step.micro_batch or 0] = _DONE if done else _INPUTS
        self._left[step.stage] -= done

    def _message(self, step: MetaStep) -> None:
        stage, batch, kind, peer = step.stage, step.micro_batch or 0, step.type, step.peer_stage
        flow = self._flow
        ways = flow.takers if kind is _SEND_F or kind is _RECV_B else flow.providers
        if peer not in ways[stage]:
            self._refuse(stage, f"has no connection to stage {peer} this way; name skip connections in `skips`")
        other = self._schedule.placement[peer]
        if other == self._rank:
            self._refuse(stage, f"is on the same rank as stage {peer}: nothing is sent between them")
        far = self._far[stage][batch]
        sends = kind is _SEND_F or kind is _SEND_B
        message = (stage, peer, batch, kind is _SEND_B) if sends else (peer, stage, batch, kind is _RECV_B)
        if message in self._sent or message in self._received:
            self._refuse(stage, "has had this message already")
        if kind is _SEND_F and far == _NOTHING:
            self._refuse(stage, "has no outputs to send before its forward")
        if kind is _SEND_B and far < _INPUTS:
            self._refuse(stage, "has no gradient to send before its backward")
        (self._sent if sends else self._received).add(message)
        (self.sent if sends else self.received).setdefault(other, []).append((message, self._at))
        self.events.append((self._at, other))

    def _swap(self, step: MetaStep, stage: int, batch: int) -> None:
        far = self._far[stage][batch]
        if far != (_FORWARDED if step.type is _OUT else _AWAY):
            self._refuse(
                stage,
                f"{_FAR[far]} with micro-batch {batch}; activations go out after the forward and come back before the backward",
            )
        self._far[stage][batch] = _AWAY if step.type is _OUT else _FORWARDED

    def _shard(self, step: MetaStep) -> None:
        stage = step.stage
        if step.type is _REDUCE:
            if self._left[stage]:
                self._refuse(stage, f"has {self._left[stage]} backward(s) to come")
            if stage in self._reduced:
                self._refuse(stage, "has had its gradients reduced already")
            self._reduced.add(stage)
        elif self._whole.get(stage, False) is (step.type is _UNSHARD):
            self._refuse(stage, "is whole already" if step.type is _UNSHARD else "isn't whole")
        else:
            self._whole[stage] = step.type is _UNSHARD

    def _need_whole(self, stage: int) -> None:
        if self._whole and not self._whole.get(stage, True):
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
            if [message for message, _ in sent] == [message for message, _ in received]:
                continue
            pairs = enumerate(zip(sent, received, strict=False))
            index = next((i for i, (a, b) in pairs if a[0] != b[0]), min(len(sent), len(received)))
            ends = [
                f"rank {rank} {does} nothing more"
                if index >= len(each)
                else f"rank {rank} {does} {_told(schedule, rank, each[index][1])}"
                for rank, does, each in ((source, "sends", sent), (target, "receives", received))
            ]
            raise PlanError(
                f"schedule {schedule.name}, message {index} from rank {source} to rank {target}: {ends[0]}, but {ends[1]}. Both"
                " must name the same messages in the same order."
            )


def _check_deadlock(schedule: Schedule, walks: list[_Walk], rendezvous: bool) -> None:
    """Runs the messages alone: the rest never waits. Order and partners are known to agree."""
    events = [walk.events for walk in walks]
    sends = [[schedule.steps[rank][at].type in (_SEND_F, _SEND_B) for at, _ in own] for rank, own in enumerate(events)]
    next_event = [0] * len(walks)
    under_way = [[0] * len(walks) for _ in walks]  # without rendezvous: sent from one to another and not received
    ready = list(range(len(walks)))
    while ready:
        rank = ready.pop()
        own = events[rank]
        while next_event[rank] < len(own):
            at = next_event[rank]
            other = own[at][1]
            if not rendezvous:
                if sends[rank][at]:
                    under_way[rank][other] += 1
                    ready.append(other)
                elif under_way[other][rank]:
                    under_way[other][rank] -= 1
                else:
                    break
            else:
                across = next_event[other]
                if (
                    across >= len(events[other])
                    or events[other][across][1] != rank
                    or sends[other][across] == sends[rank][at]
                ):
                    break
                next_event[other] += 1
                ready.append(other)
            next_event[rank] += 1
    waits = {}
    for rank, own in enumerate(events):
        if next_event[rank] < len(own):
            at, other = own[next_event[rank]]
            waits[rank] = (f"rank {rank} in {_told(schedule, rank, at)} waits", other)
    if waits:
        how = "if sends wait for their receives" if rendezvous else "even with buffered sends"
        raise PlanError(f"schedule {schedule.name} deadlocks {how}: {cycle_from(waits, 'for')}.")


def _told(schedule: Schedule, rank: int, at: int) -> str:
    return f"step {at} ({schedule.steps[rank][at]})"
