"""The validator against execution: `survives` runs a schedule's steps with named values, knowing nothing of the validator.

What the validator lets through must survive, and what survives must be let through: for valid schedules, and for a thousand
corrupted ones.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from hp_pipeline.steps import MetaStep, MetaStepType, parse_step
from hp_pipeline.validator import peak_in_flight, validate

_T = MetaStepType
_SENDS, _RECEIVES = (_T.SEND_F, _T.SEND_B), (_T.RECV_F, _T.RECV_B)


class _Failed(Exception):
    """A step can't be done, now or ever."""


class _Machine:
    """Ranks that own values by name, and hand them over when one sends and the other receives at the same time."""

    def __init__(self, schedule: Schedule, skips: tuple[tuple[int, int], ...], buffered: bool) -> None:
        self.schedule, self.buffered = schedule, buffered
        self.edges = {(stage, stage + 1) for stage in range(schedule.stages - 1)} | set(skips)
        self.silent = not any(step.type in _SENDS + _RECEIVES for steps in schedule.steps for step in steps)
        self.at = [0] * schedule.ranks
        self.values: list[set[tuple[object, ...]]] = [set() for _ in schedule.steps]
        self.everywhere: set[tuple[object, ...]] = set()
        self.mail: dict[tuple[int, int], list[tuple[object, ...]]] = {}
        self.used: set[tuple[object, ...]] = set()
        self.times: Counter[tuple[str, int, int]] = Counter()
        self.sharded = {step.stage for steps in schedule.steps for step in steps if step.type is _T.UNSHARD}
        self.whole: set[int] = set()
        self.reduced: set[int] = set()
        self.host: set[tuple[int, int]] = set()

    def run(self) -> None:
        moved = True
        while moved:
            moved = False
            for rank, steps in enumerate(self.schedule.steps):
                while self.at[rank] < len(steps) and self.step(rank, steps[self.at[rank]]):
                    self.at[rank] += 1
                    moved = True
        if any(at < len(steps) for at, steps in zip(self.at, self.schedule.steps, strict=True)):
            raise _Failed("stuck")
        every = [(s, m) for s in range(self.schedule.stages) for m in range(self.schedule.micro_batches)]
        for kind in ("forward", "inputs", "weights"):
            if self.times != {**self.times, **{(kind, *each): 1 for each in every}}:
                raise _Failed(f"{kind} not once each")
        left = [value for values in self.values for value in values if value[0] == "letter" and value not in self.used]
        if left or any(self.mail.values()) or self.whole or self.sharded - self.reduced:
            raise _Failed("left over")

    def step(self, rank: int, step: MetaStep) -> bool:
        if self.schedule.placement[step.stage] != rank:
            raise _Failed("not its stage")
        if step.type in _SENDS + _RECEIVES:
            return self.message(rank, step)
        if step.type is _T.UNSHARD:
            self.require(step.stage not in self.whole)
            self.whole.add(step.stage)
        elif step.type is _T.RESHARD:
            self.require(step.stage in self.whole)
            self.whole.remove(step.stage)
        elif step.type is _T.REDUCE_GRAD:
            done = sum(self.times["weights", step.stage, batch] for batch in range(self.schedule.micro_batches))
            self.require(done == self.schedule.micro_batches and step.stage not in self.reduced)
            self.reduced.add(step.stage)
        elif step.type in (_T.SWAP_OUT, _T.SWAP_IN):
            key = (step.stage, step.micro_batch)
            self.require(self.times[("forward", *key)] == 1 and not self.times[("inputs", *key)])
            self.require((key in self.host) == (step.type is _T.SWAP_IN))
            self.host ^= {key}
        else:
            parts = step.parts or (step,)
            for part in parts:
                self.require(self.schedule.placement[part.stage] == rank)
            if not all(self.possible(rank, part) for part in parts):
                if not self.silent:
                    raise _Failed("a value is missing")
                return False
            for part in parts:
                self.compute(rank, part)
        return True

    def require(self, holds: bool) -> None:
        if not holds:
            raise _Failed("wrong state")

    def possible(self, rank: int, part: MetaStep) -> bool:
        stage, batch = part.stage, part.micro_batch
        self.require(stage not in self.sharded or stage in self.whole)
        self.require((stage, batch) not in self.host or part.type is _T.F)
        there = self.values[rank] | (self.everywhere if self.silent else set())
        if part.type is _T.F:
            needs = [("output", source, batch) for source, target in self.edges if target == stage]
        elif part.type is _T.W:
            self.require(self.times["inputs", stage, batch] == 1 and not self.times["weights", stage, batch])
            return True
        else:
            self.require(self.times["forward", stage, batch] == 1)
            needs = [("gradient", target, batch) for source, target in self.edges if source == stage]
        letters = [need if need in there else ("letter", *need, stage) for need in needs]
        if not all(need in there for need in letters):
            return False
        self.used.update(letters)
        return True

    def compute(self, rank: int, part: MetaStep) -> None:
        stage, batch = part.stage, part.micro_batch or 0
        self.require(batch < self.schedule.micro_batches)
        for kind in {"F": ["forward"], "B": ["inputs", "weights"], "I": ["inputs"], "W": ["weights"]}[part.type.value]:
            self.require(not self.times[kind, stage, batch])
            self.times[kind, stage, batch] += 1
        if part.type is not _T.W:
            value = ("output" if part.type is _T.F else "gradient", stage, batch)
            self.values[rank].add(value)
            self.everywhere.add(value)

    def message(self, rank: int, step: MetaStep) -> bool:
        self.require(0 <= step.peer_stage < self.schedule.stages)
        other = self.schedule.placement[step.peer_stage]
        kind = "output" if step.type in (_T.SEND_F, _T.RECV_F) else "gradient"
        if step.type in _SENDS:
            content = (kind, step.stage, step.micro_batch)
            self.require(content in self.values[rank] and other != rank)
            letter = ("letter", *content, step.peer_stage)
            if self.buffered:
                self.mail.setdefault((rank, other), []).append(letter)
                return True
            theirs = self.schedule.steps[other][self.at[other] : self.at[other] + 1]
            if not theirs or theirs[0].type not in _RECEIVES or self.schedule.placement[theirs[0].peer_stage] != rank:
                return False
            self.take(other, theirs[0], letter)
            self.at[other] += 1
            return True
        if self.buffered and self.mail.get((other, rank)):
            self.take(rank, step, self.mail[other, rank].pop(0))
            return True
        return False  # the sender moves both

    def take(self, rank: int, step: MetaStep, letter: tuple[object, ...]) -> None:
        kind = "output" if step.type is _T.RECV_F else "gradient"
        self.require(self.schedule.placement[step.stage] == rank)
        self.require(
            letter == ("letter", kind, step.peer_stage, step.micro_batch, step.stage)
            and letter not in self.values[rank]
        )
        self.values[rank].add(letter)


def survives(schedule: Schedule, skips: tuple[tuple[int, int], ...] = (), buffered: bool = False) -> bool:
    """Whether the steps, executed, compute everything once and come to an end."""
    try:
        _Machine(schedule, skips, buffered).run()
    except _Failed:
        return False
    return True


def accepts(schedule: Schedule, skips: tuple[tuple[int, int], ...] = (), buffered: bool = False) -> bool:
    try:
        validate(schedule, skips=skips, rendezvous=not buffered)
    except PlanError:
        return False
    return True


@st.composite
def valid_schedules(draw: st.DrawFn) -> tuple[Schedule, tuple[tuple[int, int], ...]]:
    name = draw(st.sampled_from(list(ORDERS)))
    schedule = build_order(name, draw(st.integers(1, 4)), draw(st.integers(1, 5)))
    skips = ((0, schedule.stages - 1),) if schedule.stages > 2 and draw(st.booleans()) else ()
    if draw(st.booleans()):
        schedule = draw(st.sampled_from([merge_backward, split_backward]))(schedule)
    if draw(st.integers(0, 3)):
        schedule = draw(st.sampled_from([insert_communication, overlap_communication]))(schedule, skips)
    if draw(st.integers(0, 3)) == 0:
        schedule = insert_fsdp(schedule, draw(st.sets(st.integers(0, schedule.stages - 1))), draw(st.integers(0, 2)))
    if draw(st.integers(0, 3)) == 0:
        schedule = insert_swaps(schedule, draw(st.integers(1, 3)))
    return schedule, skips


def corrupt(draw: st.DrawFn, schedule: Schedule, kind: str) -> Schedule:
    """One thing wrong with one step."""
    steps = [list(each) for each in schedule.steps]
    rank = draw(st.sampled_from([rank for rank, each in enumerate(steps) if each] or [0]))
    own = steps[rank]
    if not own:
        return schedule
    at = draw(st.integers(0, len(own) - 1))
    step = own[at]
    if kind == "swap":
        other = draw(st.integers(0, len(own) - 1) | st.just(min(at + 1, len(own) - 1)))
        own[at], own[other] = own[other], own[at]
    elif kind == "drop":
        del own[at]
    elif kind == "duplicate":
        own.insert(draw(st.integers(0, len(own))), step)
    elif kind == "rank":
        into = steps[draw(st.integers(0, len(steps) - 1))]
        del own[at]
        into.insert(draw(st.integers(0, len(into))), step)
    elif kind == "move":
        del own[at]
        own.insert(draw(st.integers(0, len(own)) | st.integers(max(at - 2, 0), min(at + 2, len(own)))), step)
    elif step.parts is None:
        stage, batch, peer = step.stage, step.micro_batch, step.peer
        if kind == "micro_batch" and batch is not None:
            batch = draw(st.integers(0, schedule.micro_batches))
        elif kind == "stage":
            stage = draw(st.integers(0, schedule.stages - 1))
        elif kind == "peer" and step.type in _SENDS + _RECEIVES:
            peer = draw(st.none() | st.integers(0, schedule.stages - 1))
        own[at] = MetaStep(step.type, stage, batch, peer)
    return schedule.with_steps(steps)


@st.composite
def corrupted_schedules(draw: st.DrawFn) -> tuple[Schedule, tuple[tuple[int, int], ...]]:
    schedule, skips = draw(valid_schedules())
    for kind in draw(
        st.lists(
            st.sampled_from(["swap", "drop", "duplicate", "rank", "move", "micro_batch", "stage", "peer"]),
            min_size=1,
            max_size=2,
        )
    ):
        schedule = corrupt(draw, schedule, kind)
    return schedule, skips


@settings(max_examples=300, deadline=None)
@given(valid_schedules())
def test_no_valid_schedule_is_refused(case):
    schedule, skips = case
    assert survives(schedule, skips)
    validate(schedule, skips=skips)
    validate(schedule, skips=skips, rendezvous=False)
    validate(schedule, skips=skips, memory=peak_in_flight(schedule))


@settings(max_examples=1000, deadline=None)
@given(corrupted_schedules(), st.booleans())
def test_a_corrupted_schedule_is_refused_exactly_if_it_fails(case, buffered):
    schedule, skips = case
    assert accepts(schedule, skips, buffered) == survives(schedule, skips, buffered), schedule.to_text()


def test_most_corruptions_are_harmful():
    """So that the test above says something: a dropped, doubled or moved computation never passes."""
    schedule = insert_communication(build_order("zbv", 2, 3))
    for rank, steps in enumerate(schedule.steps):
        for at in range(len(steps)):
            for changed in (steps[:at] + steps[at + 1 :], steps[:at] + steps[at : at + 1] + steps[at:]):
                assert not accepts(
                    schedule.with_steps([changed if each == rank else s for each, s in enumerate(schedule.steps)])
                )


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("name", ORDERS)
def test_built_in_schedules_never_deadlock(name, chunks):
    """Case 52: proven under rendezvous sends, up to 16 ranks and 64 micro-batches (a sample of them)."""
    if ORDERS[name].fixed:
        chunks = ORDERS[name].chunks
    for ranks, batches in ((2, 2), (2, 64), (3, 7), (7, 5), (16, 17), (16, 64)):
        schedule = build_order(name, ranks, batches, chunks)
        validate(insert_communication(schedule))
        validate(overlap_communication(schedule))


def naive(schedule: Schedule) -> Schedule:
    """Each message received right before it is used and sent right after it is made: what one writes first."""
    steps = []
    for own in schedule.steps:
        order = []
        for step in own:
            forward = step.type is _T.F
            before, after = step.stage + (-1 if forward else 1), step.stage + (1 if forward else -1)
            if 0 <= before < schedule.stages:
                order.append(MetaStep(_T.RECV_F if forward else _T.RECV_B, step.stage, step.micro_batch))
            order.append(step)
            if 0 <= after < schedule.stages:
                order.append(MetaStep(_T.SEND_F if forward else _T.SEND_B, step.stage, step.micro_batch))
        steps.append(order)
    return schedule.with_steps(steps)


def test_a_deadlock_is_told_as_a_circle():
    """Case 52: it goes well as long as sends are buffered; without, both ranks send and none receives."""
    schedule = naive(build_order("1f1b", 2, 3))
    validate(schedule, rendezvous=False)
    with pytest.raises(PlanError) as error:
        validate(schedule)
    assert str(error.value) == (
        "schedule 1f1b deadlocks if sends wait for their receives: these wait for one another: rank 0 in step 3 (SEND_F0.1)"
        " waits for rank 1; rank 1 in step 3 (SEND_B1.0) waits for rank 0."
    )


def test_a_deadlock_of_interleaved_chunks_is_found():
    """Case 52 as reported: two ranks with two stages each; here already the order differs between the ends."""
    schedule = naive(build_order("interleaved1f1b", 2, 4, 2))
    assert not accepts(schedule)
    assert not survives(schedule)


def test_computations_that_wait_for_one_another_are_told():
    schedule = build_order("gpipe", 2, 2).with_steps(
        [map(parse_step, line.split()) for line in ("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1")]
    )
    with pytest.raises(
        PlanError,
        match=r"rank 0 in its step 1 \(B0.0\) waits for the gradient of stage 1, micro-batch 0 from rank 1; rank 1 in",
    ):
        validate(schedule)
    with pytest.raises(PlanError, match="these wait for one another"):
        insert_communication(schedule)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ["F0.0 SEND_F0.0 RECV_B0.0 B0.0", "F1.0 B1.0"],
            r"rank 1, step 0 \(F1.0\): stage 1 needs the outputs of stage 0, which haven't been rec",
        ),
        (
            ["F0.0 SEND_F0.0 B0.0", "RECV_F1.0 F1.0 B1.0"],
            r"rank 0, step 2 \(B0.0\): stage 0 needs the gradient from stage 1, which hasn't",
        ),
        (
            ["F0.0 F0.0", "F1.0 B1.0"],
            r"rank 0, step 1 \(F0.0\): stage 0 has had its forward with micro-batch 0 already",
        ),
        (["B0.0 F0.0", "F1.0 B1.0"], r"rank 0, step 0 \(B0.0\): stage 0 hasn't had its forward with micro-batch 0"),
        (["F0.0 W0.0", "F1.0 B1.0"], r"step 1 \(W0.0\): stage 0 has had its forward with micro-batch 0"),
        (["F0.0", "F1.0 B1.0"], "rank 0: at the end stage 0 has had its forward with micro-batch 0: a step is missing"),
        (["F0.0 I0.0", "F1.0 B1.0"], "rank 0: at the end stage 0 has had its input gradient with micro-batch 0"),
        (["F0.0 B0.0 F1.0", "B1.0"], r"rank 0, step 2 \(F1.0\): stage 1 doesn't run here"),
        (["F0.0 F0.1 B0.0", "F1.0 B1.0"], r"rank 0, step 1 \(F0.1\): stage 0 has micro-batches 0 to 0 only"),
        (
            ["SEND_F0.0 F0.0 RECV_B0.0 B0.0", "RECV_F1.0 F1.0 B1.0 SEND_B1.0"],
            "has no outputs to send before its forward",
        ),
        (
            ["F0.0 SEND_F0.0 RECV_B0.0 B0.0", "RECV_F1.0 F1.0 SEND_B1.0 B1.0"],
            "has no gradient to send before its backward",
        ),
        (
            ["F0.0 SEND_F0.0 SEND_F0.0 RECV_B0.0 B0.0", "RECV_F1.0 F1.0 B1.0 SEND_B1.0"],
            "stage 0 has had this message already",
        ),
        (
            ["F0.0 SEND_F0.0@2 RECV_B0.0 B0.0", "RECV_F1.0 F1.0 B1.0 SEND_B1.0"],
            "stage 0 has no connection to stage 2 this way; name skip",
        ),
        (
            ["F0.0 RECV_B0.0 B0.0", "RECV_F1.0 F1.0 B1.0 SEND_B1.0"],
            r"from rank 0 to rank 1: rank 0 sends nothing more, but rank 1 receives step 0 \(RECV_F1.0",
        ),
        (
            ["F0.0 SEND_F0.0 RECV_B0.0 B0.0", "RECV_F1.0 F1.0 B1.0"],
            "message 0 from rank 1 to rank 0: rank 1 sends nothing more, but rank 0 rec",
        ),
        (["F0.0 SWAP_OUT0.0 B0.0", "F1.0 B1.0"], r"step 2 \(B0.0\): stage 0 is swapped out"),
        (["F0.0 SWAP_IN0.0 B0.0", "F1.0 B1.0"], r"step 1 \(SWAP_IN0.0\): stage 0 has had its forward"),
        (
            ["UNSHARD0 F0.0 RESHARD0 B0.0", "F1.0 B1.0"],
            r"step 3 \(B0.0\): stage 0 is sharded here; UNSHARD comes first",
        ),
        (["UNSHARD0 UNSHARD0 F0.0 B0.0", "F1.0 B1.0"], r"step 1 \(UNSHARD0\): stage 0 is whole already"),
        (["UNSHARD0 F0.0 B0.0 REDUCE_GRAD0", "F1.0 B1.0"], "stage 0 is whole: RESHARD0 is missing"),
        (["UNSHARD0 F0.0 B0.0 RESHARD0", "F1.0 B1.0"], "never reduced: REDUCE_GRAD0 is missing"),
        (
            ["UNSHARD0 F0.0 REDUCE_GRAD0 B0.0 RESHARD0", "F1.0 B1.0"],
            r"\(REDUCE_GRAD0\): stage 0 has 1 backward\(s\) to come",
        ),
    ],
)
def test_refusals_name_rank_position_and_step(lines, message):
    schedule = build_order("gpipe", 2, 1).with_steps([map(parse_step, line.split()) for line in lines])
    with pytest.raises(PlanError, match=message):
        validate(schedule)


def test_an_overlapped_pair_cant_feed_itself():
    text = "schedule x micro_batches=1 placement=0,0\n0: F0.0 OVERLAP_B_F(B0.0,F1.0) B1.0\n"
    with pytest.raises(PlanError, match="stage 0 needs the gradient from stage 1, which comes later on this rank"):
        validate(Schedule.from_text(text))


def test_messages_on_one_rank_are_refused():
    text = "schedule x micro_batches=1 placement=0,0\n0: F0.0 SEND_F0.0 RECV_F1.0 F1.0 B1.0 B0.0\n"
    with pytest.raises(PlanError, match="on the same rank as stage 1: nothing is sent between them"):
        validate(Schedule.from_text(text))


def test_memory_claims_are_checked():
    schedule = build_order("1f1b", 3, 6)
    assert peak_in_flight(schedule) == (3, 2, 1)
    validate(schedule, memory=3)
    validate(schedule, memory=[3, 2, 1])
    with pytest.raises(PlanError, match="rank 0 holds 3 activations at a time, more than the 2 allowed"):
        validate(schedule, memory=2)
    with pytest.raises(PlanError, match="has 3 ranks, but memory is given for 2"):
        validate(schedule, memory=[3, 2])


def test_heads_are_checked():
    with pytest.raises(PlanError, match=r"stage 1 is placed on rank 3, but there are steps for 2 rank\(s\)"):
        validate(Schedule("x", 1, (0, 3), ((), ())))
    with pytest.raises(PlanError, match="0 micro-batches in 1 stages"):
        validate(Schedule("x", 0, (0,), ((),)))
