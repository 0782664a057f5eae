"""What happened when: the steps of all ranks with start and end, predicted by the simulator or recorded by the runtime.

Both come in this one form, so that pictures, traces and comparisons take either.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from hp_core.errors import PlanError
from hp_pipeline.steps import MetaStep, MetaStepType, parse_step

__all__ = ["LANES", "Event", "Recorder", "Timeline"]

_T = MetaStepType
LANES: dict[MetaStepType, str] = {
    _T.UNSHARD: "collectives",
    _T.RESHARD: "collectives",
    _T.REDUCE_GRAD: "collectives",
    _T.SWAP_OUT: "swap out",
    _T.SWAP_IN: "swap in",
}
"""What runs beside the computation, and on which lane; every other step is on the lane "steps"."""


class Event(NamedTuple):
    """One step of one rank, from `start` to `end`. A receive lasts from when the rank gets to it until the message is there."""

    rank: int
    step: MetaStep
    start: float
    end: float

    @property
    def lane(self) -> str:
        """What it keeps busy: "steps", "collectives", "swap out" or "swap in"."""
        return LANES.get(self.step.type, "steps")

    @property
    def duration(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The events of all ranks.

    Attributes:
        ranks: how many ranks there are.
        events: of all ranks, ordered by start within a rank.
    """

    ranks: int
    events: tuple[Event, ...]

    @property
    def end(self) -> float:
        """When the last step ends."""
        return max((event.end for event in self.events), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """For each rank the time that it computes; what it computes at the same time counts once."""
        busy, until = [0.0] * self.ranks, [float("-inf")] * self.ranks
        for event in sorted(self.events, key=lambda event: event.start):
            if event.step.computes:
                busy[event.rank] += max(0.0, event.end - max(event.start, until[event.rank]))
                until[event.rank] = max(until[event.rank], event.end)
        return tuple(busy)

    def of(self, rank: int) -> tuple[Event, ...]:
        """A rank's events."""
        return tuple(event for event in self.events if event.rank == rank)

    def scaled(self, factor: float) -> Timeline:
        """The same with other units of time."""
        return Timeline(self.ranks, tuple(Event(e.rank, e.step, e.start * factor, e.end * factor) for e in self.events))

    @staticmethod
    def merged(timelines: Iterable[Timeline]) -> Timeline:
        """One timeline of those that ranks recorded each for itself; it begins at 0.

        The clocks are compared as they are: within a host exact, between hosts as good as their clocks agree.
        """
        all_of_them = tuple(timelines)
        events = [event for timeline in all_of_them for event in timeline.events]
        first = min((event.start for event in events), default=0.0)
        events.sort(key=lambda event: (event.rank, event.start))
        moved = tuple(Event(e.rank, e.step, e.start - first, e.end - first) for e in events)
        return Timeline(max((timeline.ranks for timeline in all_of_them), default=0), moved)

    def to_json(self) -> str:
        """As text that `from_json` reads back exactly: what a rank writes or sends to the one that draws."""
        return json.dumps({"ranks": self.ranks, "events": [[e.rank, str(e.step), e.start, e.end] for e in self.events]})

    @staticmethod
    def from_json(text: str) -> Timeline:
        """The timeline that `to_json` wrote.

        Raises:
            PlanError: the text is none.
        """
        try:
            read = json.loads(text)
            events = tuple(
                Event(int(rank), parse_step(step), float(start), float(end))
                for rank, step, start, end in read["events"]
            )
            return Timeline(int(read["ranks"]), events)
        except (ValueError, KeyError, TypeError) as error:
            raise PlanError(f"the text of a timeline can't be read: {error}") from error


class Recorder:
    """Records when a rank's steps begin and end. The runtime calls `begin` and `end`; steps of several threads may overlap.

    Args:
        rank: position along the pipeline axis.
        ranks: how many there are.
        clock: seconds, never going backwards.
    """

    def __init__(self, rank: int, ranks: int, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.rank = rank
        self.ranks = ranks
        self._clock = clock
        # Anchored to the time of day, so that ranks of several hosts can be put side by side.
        self._anchor = time.time() - clock()
        self._began: dict[MetaStep, float] = {}
        self._events: list[Event] = []

    def begin(self, step: MetaStep) -> None:
        """A step begins now. Called again before its end, it begins anew: what it waited for its messages is no part of it then."""
        self._began[step] = self._clock()

    def end(self, step: MetaStep) -> None:
        """It ends now.

        Raises:
            PlanError: it hasn't begun.
        """
        now = self._clock()
        began = self._began.pop(step, None)
        if began is None:
            raise PlanError(f"recorder of rank {self.rank}: {step} ends, but it hasn't begun.")
        self._events.append(Event(self.rank, step, began + self._anchor, now + self._anchor))

    def clear(self) -> None:
        """Forget everything, steps that have begun included."""
        self._began.clear()
        self._events.clear()

    def timeline(self) -> Timeline:
        """What was recorded on this rank; `Timeline.merged` puts those of all ranks together and begins at 0."""
        return Timeline(self.ranks, tuple(sorted(self._events, key=lambda event: event.start)))
