"""Orders: every one is possible for any numbers, and reaches the bubble and the memory that its paper promises."""

from __future__ import annotations

from functools import cache

import pytest

from hp_core.errors import PlanError
from hp_pipeline.orders import ORDERS, build_order
from hp_pipeline.passes import insert_communication
from hp_pipeline.schedule import Schedule
from hp_pipeline.steps import MetaStepType
from hp_pipeline.validator import peak_in_flight, validate

_LENGTHS = {MetaStepType.F: 1, MetaStepType.I: 1, MetaStepType.W: 1, MetaStepType.B: 2, MetaStepType.OVERLAP_B_F: 3}
_CHUNKS = [(name, chunks) for name, order in ORDERS.items() for chunks in ([order.chunks] if order.fixed else [1, 2])]


def bubbles(schedule: Schedule) -> list[int]:
    """Idle time of each rank, F = I = W = 1: by asking every step when it ends at the earliest."""
    where = {
        (part.stage, part.micro_batch, "F" if part.type is MetaStepType.F else "B"): (rank, at)
        for rank, steps in enumerate(schedule.steps)
        for at, step in enumerate(steps)
        for part in step.computes
        if part.type is not MetaStepType.W
    }

    @cache
    def end(rank: int, at: int) -> int:
        step = schedule.steps[rank][at]
        before = [(rank, at - 1)] if at else []
        for part in step.computes:
            if part.type is MetaStepType.F and part.stage:
                before.append(where[part.stage - 1, part.micro_batch, "F"])
            if part.type in (MetaStepType.B, MetaStepType.I) and part.stage + 1 < schedule.stages:
                before.append(where[part.stage + 1, part.micro_batch, "B"])
        return _LENGTHS[step.type] + max((end(*each) for each in before), default=0)

    ends = [end(rank, len(steps) - 1) for rank, steps in enumerate(schedule.steps)]
    return [max(ends) - sum(_LENGTHS[step.type] for step in steps) for steps in schedule.steps]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize(
    ("name", "chunks", "bubble", "peak"),
    [
        ("gpipe", 1, lambda p, v: 3 * (p - 1), lambda p, v, s, m: m),
        ("1f1b", 1, lambda p, v: 3 * (p - 1), lambda p, v, s, m: min(m, p - s)),
        ("zbh1", 1, lambda p, v: p - 1, lambda p, v, s, m: p),
        ("loopedbfs", 2, lambda p, v: 3 * (p - 1), lambda p, v, s, m: v * m),
        (
            "interleaved1f1b",
            2,
            lambda p, v: 3 * (p - 1),
            lambda p, v, s, m: min(v * m, (v - 1) * p + 2 * (p - s - 1) + 1),
        ),
        (
            "interleaved1f1b",
            3,
            lambda p, v: 3 * (p - 1),
            lambda p, v, s, m: min(v * m, (v - 1) * p + 2 * (p - s - 1) + 1),
        ),
        ("interleavedzb", 2, lambda p, v: p - 1, lambda p, v, s, m: v * p),
        ("interleavedzb", 3, lambda p, v: p - 1, lambda p, v, s, m: v * p),
        ("zbv", 2, lambda p, v: p - 1, lambda p, v, s, m: 2 * p),
        ("dualpipev", 2, lambda p, v: 2 * (p - 1), lambda p, v, s, m: 2 * p + 1),
    ],
)
def test_known_bubbles_and_peaks(name, chunks, bubble, peak, ranks):
    """Times in units of a chunk's forward; (P - 1)(F + B) / V of a rank's time is (P - 1)(F + B) of a chunk's."""
    for batches in (2 * ranks, 4 * ranks):
        schedule = build_order(name, ranks, batches, chunks)
        assert bubbles(schedule) == [bubble(ranks, chunks)] * ranks
        expected = tuple(peak(ranks, chunks, rank, batches) for rank in range(ranks))
        if name == "dualpipev" and ranks == 1:  # a single rank doesn't pair the first forward with a backward
            assert max(peak_in_flight(schedule)) <= 3
        else:
            assert peak_in_flight(schedule) == expected


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("name", "bubble"), [("interleaved1f1b", 3), ("interleavedzb", 1)])
def test_micro_batches_that_dont_divide_cost_no_time(name, bubble, chunks):
    for ranks in (2, 3, 4, 6):
        for batches in range(ranks, 4 * ranks):
            assert max(bubbles(build_order(name, ranks, batches, chunks))) == bubble * (ranks - 1), (ranks, batches)


@pytest.mark.parametrize(("name", "chunks"), _CHUNKS)
def test_every_order_is_valid_for_any_numbers(name, chunks):
    """Case 44: fewer micro-batches than stages, and one, are among them."""
    for ranks in range(1, 9):
        for batches in range(1, 10):
            schedule = build_order(name, ranks, batches, chunks)
            assert (schedule.micro_batches, schedule.ranks, schedule.stages) == (batches, ranks, ranks * chunks)
            validate(schedule)
            validate(insert_communication(schedule))


@pytest.mark.parametrize("name", ORDERS)
def test_micro_batches_of_a_stage_come_in_order(name):
    for stage_steps in ("F", "BI", "BW"):
        for schedule in (build_order(name, 4, 7), build_order(name, 3, 2)):
            for steps in schedule.steps:
                seen: dict[int, list[int | None]] = {}
                for part in (part for step in steps for part in step.computes):
                    if part.type.value in stage_steps:
                        seen.setdefault(part.stage, []).append(part.micro_batch)
                assert all(batches == list(range(schedule.micro_batches)) for batches in seen.values())


def test_the_last_rank_of_1f1b_begins_with_the_first_micro_batch():
    """Case 55."""
    last = build_order("1f1b", 4, 8).steps[3]
    assert [str(step) for step in last] == [f"{kind}3.{batch}" for batch in range(8) for kind in "FB"]


def test_fewer_micro_batches_than_a_group_keep_the_loop_order():
    assert [str(step) for step in build_order("interleaved1f1b", 4, 1, 2).steps[1]] == ["F1.0", "F5.0", "B5.0", "B1.0"]


def test_names_are_forgiving():
    assert build_order("ZB-V", 2, 3) == build_order("zbv", 2, 3, 2)
    assert build_order("Interleaved_1F1B", 2, 3) == build_order("interleaved1f1b", 2, 3, 2)
    assert ORDERS["zbv"](2, 3) == build_order("zbv", 2, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zbx", 2, 2), "there is no schedule 'zbx'; there are gpipe, 1f1b"),
        (("1f1b", 0, 2), "0 ranks; at least 1"),
        (("1f1b", 2, 0), "0 micro-batches; at least 1"),
        (("looped-bfs", 2, 2, 0), "0 chunks; at least 1"),
        (("1f1b", 2, 2, 2), r"has 1 stage\(s\) per rank, not 2"),
        (("zbv", 2, 2, 3), r"has 2 stage\(s\) per rank, not 3"),
    ],
)
def test_bad_numbers_are_refused(arguments, message):
    with pytest.raises(PlanError, match=message):
        build_order(*arguments)
