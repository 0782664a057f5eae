"""When each computation of a schedule would run if F, I and W took one unit and messages none: a clock for the passes.

It is also the proof that the computations are possible in the given order at all: if not, it says who waits for whom.
"""

from __future__ import annotations

from collections.abc import Sequence

from hp_core.errors import PlanError
from hp_pipeline.flow import Flow
from hp_pipeline.schedule import Columns, Schedule, columns_of
from hp_pipeline.steps import MetaStep, MetaStepType

__all__ = ["LENGTH", "Times", "cycle_from", "unit_times"]

_F, _B, _I, _W = MetaStepType.F, MetaStepType.B, MetaStepType.I, MetaStepType.W
LENGTH = {_F: 1, _I: 1, _W: 1, _B: 2, MetaStepType.OVERLAP_B_F: 3}
"""How long the steps that compute take."""

Times = list[list[int]]
"""For each rank and each of its steps when it ends; those that don't compute take no time."""


def unit_times(schedule: Schedule, flow: Flow, columns: Sequence[Columns] | None = None) -> Times:
    """The end of every step; sends and receives are passed over, dependencies hold by themselves.

    Args:
        schedule: the computations.
        flow: what they need.
        columns: of the steps of each rank, if they are known.

    Raises:
        PlanError: the computations wait for one another, or for one that no rank does.
    """
    batches, placement = schedule.micro_batches, schedule.placement
    backward = schedule.stages * batches
    ends = [-1] * (2 * backward)  # of the forward of (stage, micro-batch), then of its (input) gradient
    # What each needs, as distances between places in `ends`.
    needs_forward = [[(source - stage) * batches for source in sources] for stage, sources in enumerate(flow.providers)]
    needs_backward = [[-backward, *((t - stage) * batches for t in takers)] for stage, takers in enumerate(flow.takers)]
    columns = columns or [columns_of(steps) for steps in schedule.steps]
    times: Times = [[] for _ in schedule.steps]
    blocked: dict[int, list[int]] = {}  # what isn't done yet -> ranks that wait for it
    ready = list(range(schedule.ranks - 1, -1, -1))
    while ready:
        rank = ready.pop()
        own, (kinds, stages, numbers, _, pairs) = times[rank], columns[rank]
        now = own[-1] if own else 0
        for at in range(len(own), len(kinds)):
            kind = kinds[at]
            length = LENGTH.get(kind, 0)
            if kind is _W or not length:
                now += length
                own.append(now)
                continue
            start, missing = now, -1
            if pairs[at] is None:
                stage = stages[at]
                key = stage * batches + numbers[at]  # type: ignore[operator]
                needs = needs_forward[stage]
                if kind is not _F:
                    key, needs = key + backward, needs_backward[stage]
                done: tuple[tuple[int, list[int]], ...] = ((key, needs),)
            else:
                first, second = pairs[at]  # type: ignore[misc]
                done = (
                    (first.stage * batches + (first.micro_batch or 0) + backward, needs_backward[first.stage]),
                    (second.stage * batches + (second.micro_batch or 0), needs_forward[second.stage]),
                )
            for key, needs in done:
                for need in needs:
                    end = ends[key + need]
                    if end < 0:
                        missing = key + need
                    elif end > start:
                        start = end
            if missing >= 0:
                blocked.setdefault(missing, []).append(rank)
                break
            now = start + length
            own.append(now)
            for key, _ in done:
                ends[key] = now
                if key in blocked:
                    ready += blocked.pop(key)
    if any(len(own) < len(steps) for own, steps in zip(times, schedule.steps, strict=True)):
        waits: dict[int, tuple[str, int]] = {}
        for key, ranks in blocked.items():
            stage, batch = divmod(key % backward, batches)
            what = MetaStep(_F if key < backward else _I, stage, batch)
            name = f"{'the forward' if what.type is _F else 'the gradient'} of stage {stage}, micro-batch {batch}"
            for rank in ranks:
                position = len(times[rank])
                waits[rank] = (
                    f"rank {rank} in its step {position} ({schedule.steps[rank][position]}) waits for {name}",
                    placement[stage],
                )
        raise PlanError(f"schedule {schedule.name} can't run: {cycle_from(waits)}.")
    return times


def cycle_from(waits: dict[int, tuple[str, int]], word: str = "from") -> str:
    """From (what is said about a rank that waits, the rank it waits for): the circle, or the chain up to one that is done."""
    rank, seen = min(waits), list[int]()
    while rank in waits and rank not in seen:
        seen.append(rank)
        rank = waits[rank][1]
    if rank in waits:
        told = seen[seen.index(rank) :]
        return "these wait for one another: " + "; ".join(
            f"{waits[each][0]} {word} rank {waits[each][1]}" for each in told
        )
    return "; ".join(f"{waits[each][0]} {word} rank {waits[each][1]}" for each in seen) + ", which is done without it"
