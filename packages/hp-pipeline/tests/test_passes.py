"""Passes: what each adds, where, and that what comes out is valid."""

from __future__ import annotations

import pytest

from hp_core.errors import PlanError
from hp_pipeline.orders import ORDERS, build_order
from hp_pipeline.passes import (
    insert_communication,
    insert_fsdp,
    insert_swaps,
    merge_backward,
    overlap_communication,
    split_backward,
)
from hp_pipeline.schedule import Schedule
from hp_pipeline.steps import COMMUNICATION, MetaStep, MetaStepType
from hp_pipeline.validator import peak_in_flight, validate

_T = MetaStepType


def lines(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, steps)) for steps in schedule.steps]


def without(schedule: Schedule, types: frozenset[MetaStepType]) -> Schedule:
    return schedule.with_steps([[step for step in steps if step.type not in types] for steps in schedule.steps])


def test_messages_meet_in_both_directions():
    """The last rank receives the next forward before it sends the gradient that the first waits for: the classic trap."""
    assert lines(insert_communication(build_order("1f1b", 2, 2))) == [
        "F0.0 SEND_F0.0 F0.1 SEND_F0.1 RECV_B0.0 B0.0 RECV_B0.1 B0.1",
        "RECV_F1.0 F1.0 RECV_F1.1 B1.0 SEND_B1.0 F1.1 B1.1 SEND_B1.1",
    ]


def test_nothing_is_sent_on_one_rank():
    schedule = insert_communication(build_order("zbv", 2, 2))
    inner = lines(schedule)[1].split()
    assert "SEND_F2.0" in inner
    assert not {"SEND_F1.0", "RECV_F2.0", "SEND_B2.0", "RECV_B1.0"} & set(inner)
    assert not any(
        step.type in COMMUNICATION for steps in insert_communication(build_order("zbv", 1, 3)).steps for step in steps
    )


@pytest.mark.parametrize("place", [insert_communication, overlap_communication])
def test_skip_connections_are_extra_peers(place):
    schedule = place(build_order("gpipe", 3, 1), skips=[(0, 2)])
    steps = [set(line.split()) for line in lines(schedule)]
    assert {"SEND_F0.0@2", "SEND_F0.0", "RECV_B0.0@2", "RECV_B0.0"} < steps[0]
    assert {"RECV_F2.0@0", "RECV_F2.0", "SEND_B2.0@0", "SEND_B2.0"} < steps[2]
    validate(schedule, skips=[(0, 2)])
    with pytest.raises(PlanError, match="stage 0 has no connection to stage 2"):
        validate(schedule)


def test_skip_connections_within_a_rank_need_no_messages():
    schedule = insert_communication(build_order("zbv", 2, 2), skips=[(0, 3)])
    assert schedule == insert_communication(build_order("zbv", 2, 2))
    validate(schedule, skips=[(0, 3)])


@pytest.mark.parametrize("skip", [(0, 1), (1, 0), (0, 3), (-1, 1), (2, 2)])
def test_what_is_no_skip_connection_is_refused(skip):
    with pytest.raises(PlanError, match="it must lead over at least one other stage to a later one"):
        insert_communication(build_order("gpipe", 3, 1), skips=[skip])
    with pytest.raises(PlanError, match="be named once"):
        validate(build_order("gpipe", 3, 1), skips=[(0, 2), (0, 2)])


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_communication_changes_no_computation_and_receives_ahead_are_bounded(name, ranks):
    bare = build_order(name, ranks, 7)
    plain, ahead = insert_communication(bare), overlap_communication(bare)
    assert overlap_communication(plain) == ahead
    assert without(plain, COMMUNICATION) == without(ahead, COMMUNICATION) == bare
    validate(ahead)
    moved = 0
    for before, after in zip(plain.steps, ahead.steps, strict=True):
        for step in before:
            if step.type in COMMUNICATION:
                early = computed(before, step) - computed(after, step)
                assert early in ((0, 1) if step.type in (_T.RECV_F, _T.RECV_B) else (0,)), step
                moved += early
    assert moved > 0


def computed(steps: tuple[MetaStep, ...], until: MetaStep) -> int:
    """Computations before a step."""
    return sum(bool(step.computes) for step in steps[: steps.index(until)])


def test_communication_is_inserted_once():
    schedule = insert_communication(build_order("1f1b", 2, 2))
    with pytest.raises(PlanError, match=r"communicates already \(rank 0: SEND_F0.0\)"):
        insert_communication(schedule)


@pytest.mark.parametrize("line", ["F2.0 B0.0", "F0.1 B0.0", "F0.0 OVERLAP_B_F(B0.0,F5.0)"])
def test_communication_needs_stages_and_micro_batches_that_exist(line):
    with pytest.raises(PlanError, match=r"rank 0, .*: there are stages 0 to 0 and micro-batches 0 to 0"):
        insert_communication(Schedule.from_text(f"schedule x micro_batches=1 placement=0\n0: {line}"))
    with pytest.raises(PlanError, match=r"on ranks \(0, 1\), but there are steps for 1 rank"):
        insert_communication(Schedule.from_text("schedule x micro_batches=1 placement=0,1\n0: F0.0 B0.0"))


def test_communication_waits_for_no_missing_step():
    with pytest.raises(
        PlanError, match="waits for the forward of stage 0, micro-batch 0 from rank 0, which is done without it"
    ):
        insert_communication(Schedule.from_text("schedule x micro_batches=1 placement=0,1\n0:\n1: F1.0 B1.0"))


def test_communication_keeps_other_steps():
    schedule = insert_swaps(insert_fsdp(build_order("interleaved1f1b", 2, 5, 2), range(4), ahead=0), 2)
    for place in (insert_communication, overlap_communication):
        assert without(place(schedule), COMMUNICATION) == schedule
        validate(place(schedule))


def test_a_sharded_stage_is_gathered_once_if_it_stays():
    assert lines(insert_fsdp(build_order("1f1b", 2, 1), [1])) == [
        "F0.0 B0.0",
        "UNSHARD1 F1.0 B1.0 REDUCE_GRAD1 RESHARD1",
    ]


def test_stages_are_gathered_ahead_and_freed_between():
    order = build_order("loopedbfs", 1, 1, 3)
    assert lines(insert_fsdp(order, range(3), ahead=0)) == [
        "UNSHARD0 F0.0 RESHARD0 UNSHARD1 F1.0 RESHARD1 UNSHARD2 F2.0 B2.0 REDUCE_GRAD2 RESHARD2"
        " UNSHARD1 B1.0 REDUCE_GRAD1 RESHARD1 UNSHARD0 B0.0 REDUCE_GRAD0 RESHARD0"
    ]
    assert lines(insert_fsdp(order, range(3), ahead=1)) == [
        "UNSHARD0 UNSHARD1 F0.0 RESHARD0 UNSHARD2 F1.0 F2.0 B2.0 REDUCE_GRAD2 RESHARD2 UNSHARD0 B1.0 REDUCE_GRAD1 RESHARD1"
        " B0.0 REDUCE_GRAD0 RESHARD0"
    ]


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("name", ORDERS)
def test_sharded_stages_are_whole_when_used_and_few(name, ahead):
    schedule = insert_fsdp(
        insert_communication(build_order(name, 3, 4)), range(6 if ORDERS[name].chunks == 2 else 3), ahead
    )
    validate(schedule)
    for steps in schedule.steps:
        whole = 0
        for step in steps:
            whole += {_T.UNSHARD: 1, _T.RESHARD: -1}.get(step.type, 0)
            assert whole <= len({part.stage for part in step.computes} or (0, 0)) + ahead + (1 if "v" in name else 0)


def test_bad_fsdp_arguments_are_refused():
    order = build_order("1f1b", 2, 1)
    with pytest.raises(PlanError, match=r"stages \[2\] of 2 don't exist"):
        insert_fsdp(order, [1, 2])
    with pytest.raises(PlanError, match="ahead=-1 < 0"):
        insert_fsdp(order, [1], ahead=-1)
    with pytest.raises(PlanError, match="has UNSHARD1 on rank 1 already"):
        insert_fsdp(insert_fsdp(order, [1]), [1])


def test_what_is_used_last_goes_and_comes_back_one_computation_before():
    assert lines(insert_swaps(build_order("gpipe", 1, 3), 1)) == [
        "F0.0 F0.1 SWAP_OUT0.1 F0.2 SWAP_OUT0.2 SWAP_IN0.1 B0.0 SWAP_IN0.2 B0.1 B0.2"
    ]


def test_sends_pass_before_a_swap():
    assert lines(insert_swaps(insert_communication(build_order("gpipe", 2, 2)), 1))[0].startswith(
        "F0.0 SEND_F0.0 F0.1 SEND_F0.1 SWAP_OUT0.1"
    )


@pytest.mark.parametrize("keep", [1, 2, 3, 100])
@pytest.mark.parametrize("name", ORDERS)
def test_swaps_keep_what_they_promise(name, keep):
    bare = insert_communication(build_order(name, 3, 7))
    schedule = insert_swaps(bare, keep)
    validate(schedule)
    if keep == 100:
        assert schedule == bare
    waiting_for_weights = max(
        sum(step.type is _T.I for step in steps[:at]) - sum(step.type is _T.W for step in steps[:at])
        for steps in bare.steps
        for at in range(len(steps))
    )
    assert max(peak_in_flight(schedule)) <= min(keep + 2 + waiting_for_weights, max(peak_in_flight(bare)))
    for steps in schedule.steps:
        held: set[tuple[int, int | None]] = set()
        for step, after in zip(steps, (*steps[1:], None), strict=True):
            for part in step.computes:
                (held.add if part.type is _T.F else held.discard)((part.stage, part.micro_batch))
            if step.type in (_T.SWAP_OUT, _T.SWAP_IN):
                held ^= {(step.stage, step.micro_batch)}
            if after is not None and after.computes and step.type is not _T.SWAP_IN:
                assert len(held) <= keep


def test_bad_swap_arguments_are_refused():
    with pytest.raises(PlanError, match="keep=0"):
        insert_swaps(build_order("gpipe", 1, 3), 0)
    with pytest.raises(PlanError, match="swaps already"):
        insert_swaps(insert_swaps(build_order("gpipe", 1, 3), 1), 1)


def test_a_backward_is_split_around_its_send():
    schedule = insert_communication(build_order("1f1b", 2, 1))
    assert lines(split_backward(schedule)) == [
        "F0.0 SEND_F0.0 RECV_B0.0 I0.0 W0.0",
        "RECV_F1.0 F1.0 I1.0 SEND_B1.0 W1.0",
    ]
    assert merge_backward(split_backward(schedule)) == schedule


@pytest.mark.parametrize("name", ORDERS)
def test_split_and_merged_backwards_are_valid(name):
    schedule = insert_fsdp(insert_communication(build_order(name, 3, 5)), [0, 2])
    for changed in (split_backward(schedule), merge_backward(schedule), merge_backward(split_backward(schedule))):
        validate(changed)
    types = {part.type for steps in split_backward(schedule).steps for step in steps for part in step.computes}
    assert types == {_T.F, _T.I, _T.W}
    types = {part.type for steps in merge_backward(schedule).steps for step in steps for part in step.computes}
    assert types == {_T.F, _T.B}


@pytest.mark.parametrize("name", ["zbv", "interleavedzb", "dualpipev"])
def test_backwards_of_sharded_stages_are_whole(name):
    schedule = insert_communication(build_order(name, 2, 4))
    sharded = insert_fsdp(schedule, [0, 3])
    validate(sharded)
    for stage in range(4):
        parts = [part for steps in sharded.steps for step in steps for part in step.computes if part.stage == stage]
        before = [part for steps in schedule.steps for step in steps for part in step.computes if part.stage == stage]
        if stage in (0, 3):
            assert {part.type for part in parts} == {_T.F, _T.B}
            assert [p.micro_batch for p in parts if p.type is _T.B] == [
                p.micro_batch for p in before if p.type in (_T.B, _T.I)
            ]
        else:
            assert parts == before
