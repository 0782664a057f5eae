"""When each computation of a schedule would run if F, I and W took one unit and messages none: a clock for the passes.

It is also the proof that the computations are possible in the given order at all: if not, it says who waits for whom.
"""

from __future__ import annotations

from hp_core.errors import PlanError
from hp_pipeline.flow import Flow
from hp_pipeline.schedule import Schedule
from hp_pipeline.steps import MetaStep, MetaStepType

__all__ = ["Times", "cycle_from", "unit_times"]

_F, _B, _I, _W = MetaStepType.F, MetaStepType.B, MetaStepType.I, MetaStepType.W
_LENGTH = {_F: 1, _I: 1, _W: 1, _B: 2, MetaStepType.OVERLAP_B_F: 3}

Times = list[list[tuple[int, int]]]
"""For each rank and each of its steps (start, end); steps that don't compute take no time."""


def unit_times(schedule: Schedule, flow: Flow) -> Times:
    """Start and end of every step; sends and receives are passed over, dependencies hold by themselves.

    Raises:
        PlanError: the computations wait for one another, or for one that no rank does.
    """
    batches, placement = schedule.micro_batches, schedule.placement
    backward = schedule.stages * batches
    ends = [-1] * (2 * backward)  # of the forward of (stage, micro-batch), then of its (input) gradient
    # What each needs, as distances between places in `ends`.
    needs_forward = [[(source - stage) * batches for source in sources] for stage, sources in enumerate(flow.providers)]
    needs_backward = [[-backward, *((t - stage) * batches for t in takers)] for stage, takers in enumerate(flow.takers)]
    times: Times = [[] for _ in schedule.steps]
    blocked: dict[int, list[int]] = {}  # what isn't done yet -> ranks that wait for it
    ready = list(range(schedule.ranks - 1, -1, -1))
    while ready:
        rank = ready.pop()
        own, steps = times[rank], schedule.steps[rank]
        now = own[-1][1] if own else 0
        for at in range(len(own), len(steps)):
            step = steps[at]
            length = _LENGTH.get(step.type)
            if length is None:
                own.append((now, now))
                continue
            if step.type is _W:
                now += 1
                own.append((now - 1, now))
                continue
            done = []
            start, missing = now, -1
            for part in step.parts or (step,):
                key = part.stage * batches + part.micro_batch  # type: ignore[operator]
                if part.type is _F:
                    needs = needs_forward[part.stage]
                else:
                    needs = needs_backward[part.stage]
                    key += backward
                done.append(key)
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
            own.append((start, now))
            for key in done:
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
