"""Predicts a schedule: when every step starts and ends, under given costs.

Event-driven: each rank walks its steps in order as far as it gets; a message that arrives wakes the rank that waits for it.
What comes out of it (bubbles and their causes, memory, critical path) is in `analysis.py`.
"""

from __future__ import annotations

from collections import deque
from typing import NoReturn

from hp_core.errors import PlanError
from hp_pipeline.analysis import Simulation, Wait
from hp_pipeline.bulk import in_bulk
from hp_pipeline.costs import Costs
from hp_pipeline.schedule import Schedule, columns_of
from hp_pipeline.steps import COMMUNICATION, MetaStep, MetaStepType
from hp_pipeline.timeline import Event, Timeline

__all__ = ["simulate"]

_T = MetaStepType
_SENDS, _RECEIVES = frozenset({_T.SEND_F, _T.SEND_B}), frozenset({_T.RECV_F, _T.RECV_B})
_BACKWARD = frozenset({_T.SEND_B, _T.RECV_B})


@in_bulk
def simulate(
    schedule: Schedule, costs: Costs | None = None, *, rendezvous: bool = False, posted_receives: bool = True
) -> Simulation:
    """Predict a schedule's timeline.

    A schedule without sends and receives is simulated as if each result left for the next stage's rank when its step ends.

    Args:
        schedule: what the ranks do, with or without communication steps.
        costs: of its steps; the unit costs by default.
        rendezvous: a send holds its rank until the receiver has got to the receive and the message has arrived. By default it
            doesn't hold it at all. Needs communication steps.
        posted_receives: a receive is only posted when its rank gets to it, and the first computation that needs the message waits
            for it, as in the runtime. If False, the receive itself waits: the strictest model.

    Raises:
        PlanError: the schedule can't end: its ranks wait for each other, or for what never comes. The message names the step at
            which each rank is stuck. Or the costs don't fit the number of stages.
    """
    return _Run(schedule, costs or Costs(), rendezvous, posted_receives).result()


class _Run:
    """One walk through a schedule: clocks of the ranks, and what is there already.

    Facts that steps wait for are numbered: results on the rank itself, messages by direction, stages and micro-batch. `there`
    holds for each fact the time from which it is, the event that brought it, the rank that it came from, and when it left there.
    """

    def __init__(self, schedule: Schedule, costs: Costs, rendezvous: bool, posted_receives: bool) -> None:
        costs.check(schedule.stages)
        self.schedule, self.costs = schedule, costs
        self.rendezvous, self.posted = rendezvous, posted_receives
        stages, ranks = schedule.stages, schedule.ranks
        self.stages, self.batches, self.last = stages, schedule.micro_batches, stages - 1
        self.forward = costs.of("forward", stages)
        recompute, inputs, weights = (
            costs.of(name, stages) for name in ("recompute", "input_gradient", "weight_gradient")
        )
        self.inputs = tuple(map(sum, zip(inputs, recompute, strict=True)))
        self.whole = tuple(map(sum, zip(self.inputs, weights, strict=True)))
        self.weights = weights
        self.times = {_T.F: self.forward, _T.B: self.whole, _T.I: self.inputs, _T.W: self.weights}
        self.beside = {
            _T.UNSHARD: costs.of("unshard", stages),
            _T.RESHARD: (0.0,) * stages,
            _T.REDUCE_GRAD: costs.of("reduce", stages),
            _T.SWAP_OUT: costs.of("swap", stages),
            _T.SWAP_IN: costs.of("swap", stages),
        }
        self.edges = costs.message_times(stages)
        self.explicit = self.swaps = self.shards = False
        self.needed_messages: dict[int, list[int]] = {}  # by the number of the computation's result
        self.messages: list[
            list[tuple[int, int]]
        ] = []  # for each rank and step its message, and the stage at the other end
        self._check_and_read()

        self.clock = [0.0] * ranks
        self.position = [0] * ranks
        self.last_event = [-1] * ranks
        self.lane_free: dict[tuple[int, str], tuple[float, int]] = {}
        self.link_free: dict[tuple[int, int], float] = {}
        self.there: dict[int, tuple[float, int, int, float]] = {}
        self.meeting: dict[int, tuple[float, int, int]] = {}
        self.waiting: dict[int, list[int]] = {}
        self.asleep_for: dict[int, list[int]] = {}
        self.awake: deque[int] = deque(range(ranks))
        self.events: list[Event] = []
        self.because: list[int] = []
        self.waits: list[Wait] = []

    def _check_and_read(self) -> None:
        """What must hold for the numbers of facts to be distinct; and which messages each computation needs."""
        stages, batches, steps = self.stages, self.batches, self.schedule.steps
        alone = (-1, -1)
        for rank in range(self.schedule.ranks):
            own = frozenset(self.schedule.stages_of(rank))
            ways: dict[
                tuple[MetaStepType, int, int | None], tuple[int, int]
            ] = {}  # first message, stage at the other end
            messages: list[tuple[int, int]] = []
            self.messages.append(messages)
            for position, (kind, stage, batch, peer, pair) in enumerate(zip(*columns_of(steps[rank]), strict=True)):
                number = batch or 0
                if stage not in own or not 0 <= number < batches:
                    self._refuse(rank, position, stage, number)
                if kind not in COMMUNICATION:
                    messages.append(alone)
                    if pair is not None and (pair[1].stage not in own or not 0 <= (pair[1].micro_batch or 0) < batches):
                        self._refuse(rank, position, pair[1].stage, pair[1].micro_batch or 0)
                    continue
                way = ways.get((kind, stage, peer))
                if way is None:
                    other = steps[rank][position].peer_stage
                    if not 0 <= other < stages:
                        raise PlanError(
                            f"simulate: rank {rank}, position {position}: {steps[rank][position]} has stage {other} at its "
                            "other end."
                        )
                    ends = (other, stage) if kind in _RECEIVES else (stage, other)
                    way = ways[kind, stage, peer] = (self._number(kind in _BACKWARD, *ends, 0), other)
                message = way[0] + 2 * number
                messages.append((message, way[1]))
                if self.posted and kind in _RECEIVES:
                    result = self._result(kind is _T.RECV_B, stage, number)
                    self.needed_messages.setdefault(result, []).append(message)
            kinds = {step.type for step in steps[rank]}
            self.explicit = self.explicit or not kinds.isdisjoint(COMMUNICATION)
            self.swaps = self.swaps or _T.SWAP_OUT in kinds or _T.SWAP_IN in kinds
            self.shards = self.shards or _T.UNSHARD in kinds
        if self.rendezvous and not self.explicit and self.schedule.ranks > 1:
            raise PlanError(
                f"simulate: schedule {self.schedule.name} has no sends and receives that could meet; insert them first "
                "(insert_communication), or simulate it without rendezvous."
            )

    def _refuse(self, rank: int, position: int, stage: int, batch: int) -> NoReturn:
        raise PlanError(
            f"simulate: rank {rank}, position {position}: {self.schedule.steps[rank][position]} concerns stage {stage} and "
            f"micro-batch {batch}; the rank runs stages {self.schedule.stages_of(rank)}, and there are {self.batches} "
            "micro-batches."
        )

    # Numbers of facts. Results of a stage's F and backward; gathered weights; swapped in; received; messages.

    def _result(self, backward: bool, stage: int, batch: int) -> int:
        return (self.stages * backward + stage) * self.batches + batch

    def _swapped(self, stage: int, batch: int) -> int:
        return (self.stages * 2 + stage) * self.batches + batch

    def _gathered(self, stage: int) -> int:
        return -1 - stage

    def _number(self, backward: bool, source: int, target: int, batch: int) -> int:
        """The message; one more is the fact that it has been received."""
        base = self.stages * 3 * self.batches
        return base + 2 * (((backward * self.stages + source) * self.stages + target) * self.batches + batch)

    def result(self) -> Simulation:
        """Walk to the end, and hand over to the analysis."""
        while self.awake:
            self._walk(self.awake.popleft())
        steps = self.schedule.steps
        stuck = [rank for rank in range(self.schedule.ranks) if self.position[rank] < len(steps[rank])]
        if stuck:
            where = "; ".join(
                f"rank {rank} at position {self.position[rank]}, {steps[rank][self.position[rank]]}"
                for rank in stuck[:16]
            )
            raise PlanError(
                f"simulate: schedule {self.schedule.name} can't end{' under rendezvous' * self.rendezvous}: what these steps wait "
                f"for never comes, or only after another of them: {where}. validate() shows the cycle."
            )
        ranks = [event.rank for event in self.events]
        order = sorted(range(len(ranks)), key=ranks.__getitem__)  # stable: a rank's own order stays
        place = [-1] * (len(order) + 1)  # what -1 points to is last, and stays -1
        for new, old in enumerate(order):
            place[old] = new
        timeline = Timeline(self.schedule.ranks, tuple(map(self.events.__getitem__, order)))
        because = tuple([place[self.because[index]] for index in order])
        return Simulation(self.schedule, self.costs, timeline, because, tuple(self.waits))

    def _walk(self, rank: int) -> None:
        """As far as this rank gets. Every step either ends here, or leaves the rank asleep until the fact that it needs."""
        steps, messages, beside = self.schedule.steps[rank], self.messages[rank], self.beside
        for at in range(self.position[rank], len(steps)):
            step = steps[at]
            message, peer = messages[at]
            kind = step.type
            if message >= 0:
                act = self._send if kind in _SENDS else self._receive
                fact = act(rank, step, message, peer)
            elif kind in beside:
                fact = self._beside(rank, step)
            else:
                fact = self._compute(rank, step)
            if fact is not None:
                self.waiting.setdefault(fact, []).append(rank)
                self.position[rank] = at
                return
        self.position[rank] = len(steps)

    def _add(self, rank: int, step: MetaStep, start: float, end: float, because: int) -> int:
        self.events.append(tuple.__new__(Event, (rank, step, start, end)))
        self.because.append(because)
        return len(self.events) - 1

    def _state(self, fact: int, since: float, event: int, source: int, left: float) -> None:
        self.there[fact] = (since, event, source, left)
        if fact in self.waiting:
            self.awake.extend(self.waiting.pop(fact))

    def _wait_for(self, rank: int, facts: list[int]) -> tuple[float, int] | int:
        """When the rank can go on after these facts, and which event decides it; or the first fact that isn't there yet."""
        start, because = self.clock[rank], self.last_event[rank]
        latest: tuple[float, int, int, float] | None = None
        for fact in facts:
            known = self.there.get(fact)
            if known is None:
                return fact
            if known[0] > start:
                start, because, latest = known[0], known[1], known
        if latest is not None:
            self.waits.append(Wait(rank, self.clock[rank], start, latest[2], self.events[because].step, latest[3]))
        return start, because

    def _compute(self, rank: int, step: MetaStep) -> int | None:
        parts = step.parts or (step,)
        facts = self.asleep_for.pop(rank, None)
        if facts is None:
            facts = []
            for part in parts:
                self._needs_of(part, facts)
        found = self._wait_for(rank, facts)
        if isinstance(found, int):
            self.asleep_for[rank] = facts
            return found
        start, because = found
        kind, stage = step.type, step.stage
        times = self.times.get(kind)
        end = start + (times[stage] if times is not None else self._time_of_pair(step))
        event = self._add(rank, step, start, end, because)
        self.clock[rank], self.last_event[rank] = end, event
        if kind is _T.W:
            return None
        placement, explicit = self.schedule.placement, self.explicit
        for part in parts:
            stage, batch = part.stage, part.micro_batch or 0
            backward = part.type is not _T.F
            result = (self.stages * backward + stage) * self.batches + batch
            self.there[result] = (end, event, rank, end)  # nobody else can wait for it
            target = stage - 1 if backward else stage + 1
            if not explicit and 0 <= target <= self.last and placement[target] != rank:
                self._transfer(self._number(backward, stage, target, batch), rank, stage, target, end, event)
        return None

    def _needs_of(self, step: MetaStep, facts: list[int]) -> None:
        """Append the facts that a computation needs."""
        stage, batches, many = step.stage, self.batches, self.stages * self.batches
        batch, kind = step.micro_batch or 0, step.type
        place = stage * batches + batch
        if kind is _T.W:
            facts.append(many + place)  # its input gradient
            return
        backward = kind is not _T.F
        if backward:
            facts.append(place)  # its forward
            if self.swaps and 2 * many + place in self.there:
                facts.append(2 * many + place)
        if self.shards and self._gathered(stage) in self.there:
            facts.append(self._gathered(stage))
        source = stage + 1 if backward else stage - 1
        own = many + place if backward else place
        if 0 <= source <= self.last:
            if self.schedule.placement[source] == self.schedule.placement[stage]:
                facts.append(own + (source - stage) * batches)
            else:
                message = self._number(backward, source, stage, batch)
                facts.append(message + 1 if self.explicit else message)
        if self.posted and own in self.needed_messages:
            facts += self.needed_messages[own]

    def _time_of_pair(self, step: MetaStep) -> float:
        assert step.parts is not None
        backward, forward = step.parts
        times = sorted((self.times[backward.type][backward.stage], self.forward[forward.stage]))
        return times[1] + (1.0 - self.costs.overlap) * times[0]

    def _beside(self, rank: int, step: MetaStep) -> int | None:
        """A collective or a copy: it begins when its lane is free, and holds the rank not at all."""
        lane = Event(rank, step, 0.0, 0.0).lane
        free, before = self.lane_free.get((rank, lane), (0.0, -1))
        start, because = self.clock[rank], self.last_event[rank]
        if step.type is _T.RESHARD:
            self._add(rank, step, start, start, because)  # frees memory, and keeps nothing busy
            self.there.pop(self._gathered(step.stage), None)
            return None
        earliest = [(free, before)]
        swapped = self._swapped(step.stage, step.micro_batch or 0)
        if step.type is _T.SWAP_IN and swapped in self.there:
            earliest.append(self.there[swapped][:2])  # it has to be out before it comes back
        for since, event in earliest:
            if since > start:
                start, because = since, event
        end = start + self.beside[step.type][step.stage]
        event = self._add(rank, step, start, end, because)
        self.lane_free[rank, lane] = (end, event)
        if step.type is _T.UNSHARD:
            self._state(self._gathered(step.stage), end, event, rank, end)
        elif step.type in (_T.SWAP_OUT, _T.SWAP_IN):
            self._state(swapped, end, event, rank, end)
        return None

    def _transfer(self, message: int, rank: int, source: int, target: int, start: float, event: int) -> float:
        """A message leaves as soon as the link is free of those before it; returns when it has arrived."""
        link = (rank, self.schedule.placement[target])
        occupied, until = self.edges[min(source, target)]
        begins = max(start, self.link_free.get(link, 0.0))
        self.link_free[link] = begins + occupied
        self._state(message, begins + until, event, rank, start)
        return begins + until

    def _send(self, rank: int, step: MetaStep, message: int, peer: int) -> int | None:
        result = (self.stages * (step.type is _T.SEND_B) + step.stage) * self.batches + (step.micro_batch or 0)
        if result not in self.there:
            return result
        reached = self.clock[rank]
        if not self.rendezvous:
            self.last_event[rank] = self._add(rank, step, reached, reached, self.last_event[rank])
            self._transfer(message, rank, step.stage, peer, reached, self.last_event[rank])
            return None
        return self._meet(rank, step, message, peer, sends=True)

    def _receive(self, rank: int, step: MetaStep, message: int, peer: int) -> int | None:
        if self.rendezvous:
            return self._meet(rank, step, message, peer, sends=False)
        if self.posted:
            self.last_event[rank] = self._add(rank, step, self.clock[rank], self.clock[rank], self.last_event[rank])
            self._received(rank, message)
            return None
        found = self._wait_for(rank, [message])
        if isinstance(found, int):
            return found
        end, because = found
        self.last_event[rank] = self._add(rank, step, self.clock[rank], end, because)
        self.clock[rank] = end
        self._received(rank, message)
        return None

    def _received(self, rank: int, message: int) -> None:
        now = self.clock[rank]
        self.there[message + 1] = (now, self.last_event[rank], rank, now)  # nobody else can wait for it

    def _meet(self, rank: int, step: MetaStep, message: int, peer: int, *, sends: bool) -> int | None:
        """One end of a rendezvous: the second to come starts the message, and both go on when it has arrived."""
        reached = self.clock[rank]
        posts = not sends and self.posted
        arrived = self.there.get(message)
        if arrived is None:
            other = self.meeting.get(message)
            if other is None or other[1] == rank:  # alone so far, or woken for nothing
                self.meeting[message] = (reached, rank, self.last_event[rank])
            else:
                sender = rank if sends else other[1]
                ends = (step.stage, peer) if sends else (peer, step.stage)
                decides = self.last_event[rank] if reached >= other[0] else other[2]
                self._transfer(message, sender, *ends, max(reached, other[0]), decides)
                arrived = self.there[message]
        if posts:
            self.last_event[rank] = self._add(rank, step, reached, reached, self.last_event[rank])
            self._received(rank, message)
            return None
        if arrived is None:
            return message
        since, event, _, left = arrived
        if since > reached:
            self.waits.append(Wait(rank, reached, since, self.schedule.placement[peer], step, left))
        self.last_event[rank] = self._add(
            rank, step, reached, max(since, reached), event if since > reached else self.last_event[rank]
        )
        self.clock[rank] = max(since, reached)
        if not sends:
            self._received(rank, message)
        return None
