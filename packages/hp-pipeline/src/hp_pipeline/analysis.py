"""What a simulated timeline means: bubbles and their causes, memory over time, the critical path.

`Simulation` holds the timeline as the simulator found it; everything else follows from it and is computed when asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from hp_pipeline.costs import Costs
from hp_pipeline.schedule import Schedule
from hp_pipeline.steps import MetaStep, MetaStepType
from hp_pipeline.timeline import Event, Timeline

__all__ = ["CAUSES", "Bubble", "Simulation", "Wait"]

_T = MetaStepType
CAUSES = ("warm-up", "drain", "waiting", "communication", "sharding", "swap")
"""Why a rank doesn't compute."""


class Wait(NamedTuple):
    """A rank didn't get on.

    Attributes:
        rank: which.
        start: since when.
        end: until when.
        source: the rank that it waited for; itself, if it was for a collective or copy of its own.
        step: what it waited for.
        left: when that was done and its message left: what comes after is communication.
    """

    rank: int
    start: float
    end: float
    source: int
    step: MetaStep
    left: float


@dataclass(frozen=True)
class Bubble:
    """The time that a rank doesn't compute.

    Attributes:
        causes: time for each of `CAUSES`: before its first computation (warm-up) and after its last (drain), whatever it waits for
            then; between them until a result on another rank is done (waiting), until it has arrived (communication), until its own
            unshard (sharding) or copy (swap) is done. An own reduce after the last computation is sharding too.
        waited_for: the time of "waiting", by the rank that was waited for.
    """

    causes: dict[str, float]
    waited_for: dict[int, float]

    @property
    def time(self) -> float:
        """All of it."""
        return sum(self.causes.values())


@dataclass(frozen=True)
class Simulation:
    """What the simulator predicts.

    Attributes:
        schedule: that was simulated.
        costs: under which.
        timeline: start and end of every step.
        because: for each event of the timeline the one that its start waited for last (a receive: its end); -1: none.
        waits: when ranks didn't get on, and for whom.
    """

    schedule: Schedule
    costs: Costs
    timeline: Timeline
    because: tuple[int, ...] = field(repr=False)
    waits: tuple[Wait, ...] = field(repr=False)

    @cached_property
    def step_time(self) -> float:
        """From the start until the last step of the last rank has ended."""
        return self.timeline.end

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For each rank the time that it computes."""
        return self.timeline.busy

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time in which they don't compute."""
        total = self.step_time * self.schedule.ranks
        return 1.0 - sum(self.busy) / total if total else 0.0

    @cached_property
    def bubbles(self) -> tuple[Bubble, ...]:
        """For each rank the time that it doesn't compute, and why. Adds up to `step_time` minus `busy`."""
        ranks = range(self.schedule.ranks)
        first, last, beside = [self.step_time for _ in ranks], [0.0 for _ in ranks], [0.0 for _ in ranks]
        for event in self.timeline.events:
            if event.step.computes:
                first[event.rank] = min(first[event.rank], event.start)
                last[event.rank] = max(last[event.rank], event.end)
            elif event.step.type is _T.REDUCE_GRAD:
                beside[event.rank] = max(beside[event.rank], event.end)
        bubbles = []
        for rank in ranks:
            causes = dict.fromkeys(CAUSES, 0.0)
            causes["warm-up"] = first[rank]
            if first[rank] < self.step_time or last[rank]:
                causes["sharding"] = max(0.0, beside[rank] - last[rank])
                causes["drain"] = self.step_time - last[rank] - causes["sharding"]
            bubbles.append(Bubble(causes, {}))
        for rank, start, end, source, step, left in self.waits:
            if start < first[rank] or start >= last[rank]:
                continue
            causes, waited_for = bubbles[rank].causes, bubbles[rank].waited_for
            if step.type in (_T.UNSHARD, _T.SWAP_IN, _T.SWAP_OUT):
                causes["sharding" if step.type is _T.UNSHARD else "swap"] += end - start
                continue
            done = min(max(left, start), end)
            causes["waiting"] += done - start
            causes["communication"] += end - done
            waited_for[source] = waited_for.get(source, 0.0) + done - start
        return tuple(bubbles)

    @cached_property
    def memory(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """For each rank its memory as steps: (since when, how much), the first at time 0."""
        stages = self.schedule.stages
        cost = {
            name: self.costs.of(name, stages) for name in ("activation", "weight_activation", "static", "unsharded")
        }
        has_backward = {
            (part.stage, part.micro_batch, part.type is _T.I)
            for steps in self.schedule.steps
            for step in steps
            for part in step.computes
            if part.type is not _T.F
        }
        split = {(stage, batch) for stage, batch, only_inputs in has_backward if only_inputs}
        kept = {(stage, batch) for stage, batch, _ in has_backward}
        # (when, what is freed beside the computation comes first, change), in the order of the rank's steps
        changes: list[list[tuple[float, int, float]]] = [[] for _ in range(self.schedule.ranks)]
        for rank, step, start, end in self.timeline.events:
            stage, of_rank = step.stage, changes[rank]
            for part in step.computes:
                whole, rest = cost["activation"][part.stage], cost["weight_activation"][part.stage]
                key = (part.stage, part.micro_batch)
                if part.type is _T.F:
                    of_rank.append((start, 1, whole))
                    if key not in kept:
                        of_rank.append((end, 1, -whole))
                elif part.type is _T.W:
                    of_rank.append((end, 1, -(rest if key in split else whole)))
                else:
                    of_rank.append((end, 1, -whole if part.type is _T.B else rest - whole))
            if step.type is _T.SWAP_OUT:
                of_rank.append((end, 0, -cost["activation"][stage]))
            elif step.type is _T.SWAP_IN:
                of_rank.append((start, 1, cost["activation"][stage]))
            elif step.type is _T.UNSHARD:
                of_rank.append((start, 1, cost["unsharded"][stage]))
            elif step.type is _T.RESHARD:
                of_rank.append((end, 1, -cost["unsharded"][stage]))
        curves = []
        for rank, of_rank in enumerate(changes):
            level = sum(cost["static"][stage] for stage in self.schedule.stages_of(rank))
            curve = [(0.0, level)]
            for when, _, change in sorted(of_rank, key=lambda change: change[:2]):
                level += change
                curve.append((when, level))
            curves.append(tuple(curve))
        return tuple(curves)

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """For each rank the most memory that it needs."""
        return tuple(max(level for _, level in curve) for curve in self.memory)

    @cached_property
    def peak_at(self) -> tuple[float, ...]:
        """For each rank when it needs the most, for the first time."""
        return tuple(max(curve, key=lambda point: point[1])[0] for curve in self.memory)

    @cached_property
    def critical_path(self) -> tuple[Event, ...]:
        """The chain of steps that makes the whole as long as it is: each waited for the one before it."""
        events = self.timeline.events
        at = max(range(len(events)), key=lambda index: events[index].end, default=-1)
        path = []
        while at >= 0:
            path.append(events[at])
            at = self.because[at]
        return tuple(reversed(path))

    def summary(self) -> str:
        """Step time, bubbles with their causes, and peaks, as lines for a person."""
        schedule = self.schedule
        lines = [
            f"{schedule.name}: {schedule.ranks} ranks, {schedule.stages} stages, {schedule.micro_batches} micro-batches",
            f"step time {self.step_time:g}, bubble {self.bubble_fraction:.1%}",
            f"{'rank':>4} {'busy':>8} {'bubble':>8} {'peak memory':>12} {'at':>8}  why it doesn't compute",
        ]
        for rank, bubble in enumerate(self.bubbles):
            why = [f"{cause} {time:g}" for cause, time in bubble.causes.items() if time > 0 and cause != "waiting"]
            why += [
                f"waiting for rank {source} {time:g}" for source, time in sorted(bubble.waited_for.items()) if time > 0
            ]
            lines.append(
                f"{rank:>4} {self.busy[rank]:>8g} {self.step_time - self.busy[rank]:>8g} {self.peak_memory[rank]:>12g} "
                f"{self.peak_at[rank]:>8g}  {', '.join(why) or '-'}"
            )
        return "\n".join(lines)
