"""The simulator: equal to the closed formulas and to an independent longest path; causes, memory and critical path add up."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_core.errors import PlanError
from hp_pipeline.analysis import Simulation
from hp_pipeline.costs import Costs
from hp_pipeline.orders import build_order
from hp_pipeline.orders.simple import gpipe, one_f_one_b
from hp_pipeline.passes import insert_communication
from hp_pipeline.schedule import Schedule, looped_placement, v_placement
from hp_pipeline.simulator import simulate
from hp_pipeline.steps import MetaStep, MetaStepType, parse_step

T = MetaStepType
SENDS, RECEIVES = (T.SEND_F, T.SEND_B), (T.RECV_F, T.RECV_B)


def lines(placement: tuple[int, ...], micro_batches: int, *ranks: str) -> Schedule:
    return Schedule("own", micro_batches, placement, tuple(tuple(map(parse_step, text.split())) for text in ranks))


# An independent longest path: by recursion over "done", without clocks or queues.


def longest_path(schedule: Schedule, costs: Costs, rendezvous: bool, posted: bool) -> dict[tuple[int, MetaStep], float]:
    """For each rank and step when the rank goes on after it."""
    stages, place, steps = schedule.stages, schedule.placement, schedule.steps
    where = {(rank, step): at for rank, of_rank in enumerate(steps) for at, step in enumerate(of_rank)}
    explicit = any(step.type in SENDS for of_rank in steps for step in of_rank)
    parts = {part: (rank, at) for (rank, step), at in where.items() for part in step.computes}
    value = {name: costs.of(name, stages) for name in ("forward", "input_gradient", "weight_gradient", "recompute")}
    edge = {name: costs.of(name, stages) for name in ("latency", "message_bytes", "bandwidth")}

    def lasts(part: MetaStep) -> float:
        if part.type is T.F:
            return value["forward"][part.stage]
        weights = value["weight_gradient"][part.stage]
        inputs = value["input_gradient"][part.stage] + value["recompute"][part.stage]
        return {T.B: inputs + weights, T.I: inputs, T.W: weights}[part.type]

    def backward_of(stage: int, batch: int) -> MetaStep:
        whole = MetaStep(T.B, stage, batch)
        return whole if whole in parts else MetaStep(T.I, stage, batch)

    def sender(message: tuple) -> tuple[int, int]:
        """Rank and position of what sends (backward?, from stage, to stage, micro-batch)."""
        backward, source, _, batch = message
        if not explicit:
            return parts[backward_of(source, batch) if backward else MetaStep(T.F, source, batch)]
        for kind in SENDS:
            for rank in range(schedule.ranks):
                for at, step in enumerate(steps[rank]):
                    if (
                        step.type is kind
                        and (kind is T.SEND_B, step.stage, step.peer_stage, step.micro_batch) == message
                    ):
                        return rank, at
        raise AssertionError(message)

    def messages_of(step: MetaStep) -> list[tuple]:
        if explicit:
            return (
                [(step.type is T.SEND_B, step.stage, step.peer_stage, step.micro_batch)] if step.type in SENDS else []
            )
        out = []
        for part in step.computes:
            target = part.stage + (1 if part.type is T.F else -1)
            if part.type is not T.W and 0 <= target < stages and place[target] != place[part.stage]:
                out.append((part.type is not T.F, part.stage, target, part.micro_batch))
        return out

    @cache
    def on_link_before(message: tuple) -> tuple | None:
        rank, _ = sender(message)
        sent = [m for step in steps[rank] for m in messages_of(step) if place[m[2]] == place[message[2]]]
        at = sent.index(message)
        return sent[at - 1] if at else None

    def cost_of_edge(message: tuple, name: str) -> float:
        return edge[name][min(message[1], message[2])]

    @cache
    def link_free_after(message: tuple) -> float:
        rank, at = sender(message)
        begins = done(rank, at - 1) if explicit else done(rank, at)
        if rendezvous:
            receives = next(
                MetaStep(kind, message[2], message[3], peer)
                for kind in RECEIVES
                for peer in (None, message[1])
                if (place[message[2]], MetaStep(kind, message[2], message[3], peer)) in where
                and (kind is T.RECV_B) == message[0]
                and MetaStep(kind, message[2], message[3], peer).peer_stage == message[1]
            )
            other = place[message[2]]
            begins = max(begins, done(other, where[other, receives] - 1))
        before = on_link_before(message)
        if before is not None:
            begins = max(begins, link_free_after(before))
        return begins + cost_of_edge(message, "message_bytes") / cost_of_edge(message, "bandwidth")

    def arrives(message: tuple) -> float:
        return link_free_after(message) + cost_of_edge(message, "latency")

    @cache
    def done(rank: int, at: int) -> float:
        if at < 0:
            return 0.0
        step, start = steps[rank][at], done(rank, at - 1)
        if step.type in SENDS:
            return max(start, arrives(messages_of(step)[0])) if rendezvous else start
        if step.type in RECEIVES:
            return (
                start
                if posted
                else max(start, arrives((step.type is T.RECV_B, step.peer_stage, step.stage, step.micro_batch)))
            )
        times = []
        for part in step.computes:
            times.append(lasts(part))
            source = part.stage + (-1 if part.type is T.F else 1)
            if part.type is T.W or not 0 <= source < stages or place[source] == rank:
                continue
            if not explicit or posted:
                start = max(start, arrives((part.type is not T.F, source, part.stage, part.micro_batch)))
        return start + max(times) + (1 - costs.overlap) * (min(times) if len(times) == 2 else 0)

    return {(rank, step): done(rank, at) for (rank, step), at in where.items()}


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any valid schedule: what is ready is executed in any order, and each rank's list is what it got to do."""
    ranks, batches = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    placement = draw(st.sampled_from([looped_placement(ranks, 1), looped_placement(ranks, 2), v_placement(ranks)]))
    last, explicit, split, overlaps = len(placement) - 1, draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    steps: list[list[MetaStep]] = [[] for _ in range(ranks)]
    todo = {MetaStep(T.F, 0, batch) for batch in range(batches)}

    def follow(step: MetaStep) -> None:
        stage, batch = step.stage, step.micro_batch
        backward = T.I if split else T.B
        if step.type is T.F:
            following, kinds = (MetaStep(T.F, stage + 1, batch), (T.SEND_F, T.RECV_F)) if stage < last else (None, None)
            if stage == last:
                todo.add(MetaStep(backward, last, batch))
        elif step.type is T.W:
            following, kinds = None, None
        else:
            following, kinds = (MetaStep(backward, stage - 1, batch), (T.SEND_B, T.RECV_B)) if stage else (None, None)
            if split:
                todo.add(MetaStep(T.W, stage, batch))
        if following is not None:
            todo.add(following)
            if explicit and placement[following.stage] != placement[stage]:
                steps[placement[stage]].append(MetaStep(kinds[0], stage, batch))
                steps[placement[following.stage]].append(MetaStep(kinds[1], following.stage, batch))

    while todo:
        step = draw(st.sampled_from(sorted(todo, key=str)))
        todo.discard(step)
        rank, second = placement[step.stage], None
        if overlaps and step.type in (T.B, T.I):
            forwards = sorted((f for f in todo if f.type is T.F and placement[f.stage] == rank), key=str)
            second = draw(st.sampled_from([None, *forwards]))
        steps[rank].append(step if second is None else MetaStep.overlapped(step, second))
        if second is not None:
            todo.discard(second)
        follow(step)
        if second is not None:
            follow(second)
    return Schedule("random", batches, placement, ()).with_steps(steps)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, Costs, bool, bool]:
    schedule = draw(schedules())
    stages = schedule.stages

    def some(count: int, low: int = 0) -> st.SearchStrategy:
        return st.lists(st.integers(low, 5), min_size=count, max_size=count)

    costs = Costs(
        **{name: draw(some(stages)) for name in ("forward", "input_gradient", "weight_gradient", "recompute")},
        latency=draw(some(stages - 1)),
        message_bytes=draw(some(stages - 1)),
        bandwidth=draw(st.sampled_from([0.5, 1, 2, float("inf")])),
        overlap=draw(st.sampled_from([0.0, 0.5, 1.0])),
    )
    explicit = any(step.type in SENDS for steps in schedule.steps for step in steps)
    rendezvous = explicit and draw(st.booleans())
    return schedule, costs, rendezvous, explicit and draw(st.booleans())


def check_reasons(result: Simulation) -> None:
    """No event waited for one that ended after it."""
    events = result.timeline.events
    for event, cause in zip(events, result.because, strict=True):
        assert cause < 0 or events[cause].end <= event.end


@settings(max_examples=500, deadline=None)
@given(cases())
def test_equals_an_independent_longest_path_and_adds_up(case: tuple[Schedule, Costs, bool, bool]) -> None:
    schedule, costs, rendezvous, posted = case
    result = simulate(schedule, costs, rendezvous=rendezvous, posted_receives=posted)
    assert {(event.rank, event.step): event.end for event in result.timeline.events} == longest_path(
        schedule, costs, rendezvous, posted
    )
    for rank, bubble in enumerate(result.bubbles):
        if result.busy[rank]:  # else all steps are free, and there is no "before the first"
            assert bubble.time == pytest.approx(result.step_time - result.busy[rank])
        assert sum(bubble.waited_for.values()) == pytest.approx(bubble.causes["waiting"])
        assert result.memory[rank][-1][1] == 0
    check_reasons(result)
    path = result.critical_path
    assert path[-1].end == result.step_time
    free = max(costs.of("latency", schedule.stages) + costs.of("message_bytes", schedule.stages), default=0) == 0
    if free and not any(step.type in SENDS for steps in schedule.steps for step in steps):
        assert path[0].start == 0
        assert all(before.end == after.start for before, after in pairwise(path))


# Closed formulas, in units of F = I = W = 1.

SIZES = [(ranks, batches) for ranks in (1, 2, 3, 4, 8) for batches in (1, 2, 3, 4, 8, 13)]


@pytest.mark.parametrize(("ranks", "batches"), SIZES)
def test_gpipe_and_1f1b_have_the_bubble_and_memory_of_the_formulas(ranks: int, batches: int) -> None:
    for order in (gpipe, one_f_one_b):
        result = simulate(order(ranks, batches))
        assert [result.step_time - busy for busy in result.busy] == [(ranks - 1) * 3] * ranks
        assert result.bubble_fraction == pytest.approx((ranks - 1) / (batches + ranks - 1))
        in_flight = [batches if order is gpipe else min(batches, ranks - stage) for stage in range(ranks)]
        assert result.peak_memory == tuple(in_flight)


def interleaved_peak(ranks: int, batches: int, chunks: int, rank: int) -> int:
    return min(chunks * batches, (chunks - 1) * ranks + 2 * (ranks - rank - 1) + 1)


# For enough micro-batches; bubble and peak memory in chunks: (name, chunks) -> bubble(P, V), peak(P, M, V, rank).
FORMULAS = {
    ("gpipe", 1): (lambda P, V: 3 * (P - 1), lambda P, M, V, rank: M),
    ("1f1b", 1): (lambda P, V: 3 * (P - 1), lambda P, M, V, rank: min(M, P - rank)),
    ("zbh1", 1): (lambda P, V: P - 1, lambda P, M, V, rank: P),
    ("loopedbfs", 2): (lambda P, V: 3 * (P - 1), lambda P, M, V, rank: V * M),
    ("loopedbfs", 3): (lambda P, V: 3 * (P - 1), lambda P, M, V, rank: V * M),
    ("interleaved1f1b", 2): (lambda P, V: 3 * (P - 1), lambda P, M, V, rank: interleaved_peak(P, M, V, rank)),
    ("interleaved1f1b", 3): (lambda P, V: 3 * (P - 1), lambda P, M, V, rank: interleaved_peak(P, M, V, rank)),
    ("interleavedzb", 2): (lambda P, V: P - 1, lambda P, M, V, rank: 2 * P),
    ("zbv", 2): (lambda P, V: P - 1, lambda P, M, V, rank: 2 * P),
    ("dualpipev", 2): (lambda P, V: 2 * (P - 1), lambda P, M, V, rank: 2 * P + 1),
}


@pytest.mark.parametrize(("name", "chunks"), FORMULAS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("rounds", [2, 3])
def test_every_order_has_the_bubble_and_memory_of_its_formula(name: str, chunks: int, ranks: int, rounds: int) -> None:
    bubble, peak = FORMULAS[name, chunks]
    batches = rounds * ranks
    computations = build_order(name, ranks, batches, chunks)
    for schedule in (computations, insert_communication(computations)):
        result = simulate(schedule)
        assert [result.step_time - busy for busy in result.busy] == [bubble(ranks, chunks)] * ranks
        assert result.busy == (3 * chunks * batches,) * ranks
        assert max(result.peak_memory) == max(peak(ranks, batches, chunks, rank) for rank in range(ranks))
        assert all(have <= peak(ranks, batches, chunks, rank) for rank, have in enumerate(result.peak_memory))


# Each mechanism by hand.


def test_a_message_takes_its_latency_and_its_size() -> None:
    costs = Costs(latency=0.5, message_bytes=10, bandwidth=20)
    result = simulate(one_f_one_b(2, 1), costs)
    assert [(str(e.step), e.start, e.end) for e in result.timeline.events] == [
        ("F0.0", 0, 1),
        ("B0.0", 6, 8),
        ("F1.0", 2, 3),
        ("B1.0", 3, 5),
    ]
    assert result.bubbles[0].causes["communication"] == 1.0
    assert result.bubbles[0].waited_for == {1: 4.0}


def test_messages_of_a_link_follow_each_other() -> None:
    result = simulate(gpipe(2, 3), Costs(message_bytes=3, latency=0.25))
    starts = [event.start for event in simulate(gpipe(2, 3), Costs(message_bytes=3, bandwidth=1)).timeline.of(1)[:3]]
    assert starts == [4, 7, 10]
    assert [event.start for event in result.timeline.of(1)[:3]] == [1.25, 2.25, 3.25]


def test_a_rendezvous_holds_the_sender() -> None:
    schedule = lines((0, 1), 2, "F0.0 SEND_F0.0 F0.1 SEND_F0.1", "RECV_F1.0 F1.0 RECV_F1.1 F1.1")
    costs = Costs(forward=(1, 4))
    free, held = simulate(schedule, costs), simulate(schedule, costs, rendezvous=True)
    assert free.timeline.of(0)[-1].end == 2
    assert held.timeline.of(0)[-1].end == 5
    assert held.step_time == free.step_time == 9


def test_a_receiver_that_went_on_after_posting_is_no_reason_for_the_sender() -> None:
    schedule = lines(
        (0, 2, 1, 0),
        4,
        "F0.0 SEND_F0.0 F0.1 F0.2 RECV_F3.0 F0.3 F3.0",
        "RECV_F2.0 F2.0 SEND_F2.0",
        "RECV_F1.0 F1.0 SEND_F1.0",
    )
    result = simulate(schedule, Costs(forward=(2, 1, 1, 1)), rendezvous=True)
    check_reasons(result)
    assert (
        str(result.timeline.events[result.because[result.timeline.events.index(result.timeline.of(1)[-1])]].step)
        == "F0.2"
    )
    assert result.timeline.of(1)[-1].end == 6


def test_a_posted_receive_is_waited_for_when_it_is_needed() -> None:
    schedule = lines((0, 1), 2, "F0.0 SEND_F0.0 F0.1 SEND_F0.1", "RECV_F1.0 RECV_F1.1 F1.0 F1.1")
    assert simulate(schedule).timeline.of(1)[2].start == 1
    assert simulate(schedule, posted_receives=False).timeline.of(1)[2].start == 2


def test_a_skip_connection_is_waited_for() -> None:
    schedule = lines(
        (0, 1, 2), 2, "F0.0 SEND_F0.0 F0.1 SEND_F0.0@2", "RECV_F1.0 F1.0 SEND_F1.0", "RECV_F2.0@0 RECV_F2.0 F2.0"
    )
    for posted in (False, True):
        result = simulate(schedule, Costs(forward=(5, 1, 1)), posted_receives=posted)
        assert result.timeline.of(2)[-1].start == 10
    in_turn = "RECV_F2.0 RECV_F2.0@0 F2.0"
    assert (
        simulate(
            lines((0, 1, 2), 1, "F0.0 SEND_F0.0 SEND_F0.0@2", "RECV_F1.0 F1.0 SEND_F1.0", in_turn), rendezvous=True
        ).step_time
        == 3
    )


@pytest.mark.parametrize(("overlap", "time"), [(0.0, 3.0), (0.5, 2.5), (1.0, 2.0)])
def test_an_overlapped_pair_takes_from_their_sum_to_the_longer(overlap: float, time: float) -> None:
    schedule = lines((0,), 2, "F0.0 OVERLAP_B_F(B0.0,F0.1) B0.1")
    result = simulate(schedule, Costs(overlap=overlap))
    assert result.timeline.events[1].duration == time
    assert result.peak_memory == (2,)
    assert result.busy == (3 + time,)


def test_recompute_lengthens_the_backward() -> None:
    assert simulate(gpipe(1, 1), Costs(recompute=1)).step_time == 4
    assert simulate(lines((0,), 1, "F0.0 I0.0 W0.0"), Costs(recompute=1)).step_time == 4


def test_memory_is_freed_when_it_is_no_longer_needed() -> None:
    split = lines((0,), 2, "F0.0 I0.0 F0.1 W0.0 I0.1 W0.1")
    assert simulate(split, Costs(activation=10)).peak_memory == (20,)
    part = simulate(split, Costs(activation=10, weight_activation=4, static=100))
    assert part.memory[0] == ((0, 100), (0, 110), (2, 104), (2, 114), (4, 110), (5, 104), (6, 100))
    assert (part.peak_memory, part.peak_at) == ((114,), (2,))
    assert simulate(lines((0,), 2, "F0.0 F0.1"), Costs()).peak_memory == (
        1,
    )  # nothing is kept for a backward that isn't


def test_collectives_and_copies_run_beside_the_computation() -> None:
    sharded = lines((0, 0), 1, "UNSHARD0 UNSHARD1 F0.0 F1.0 B1.0 RESHARD1 REDUCE_GRAD1 B0.0 RESHARD0 REDUCE_GRAD0")
    result = simulate(sharded, Costs(unshard=3, reduce=4, unsharded=7, activation=0))
    assert [(str(e.step), e.start, e.end) for e in result.timeline.events] == [
        ("UNSHARD0", 0, 3),
        ("UNSHARD1", 3, 6),
        ("F0.0", 3, 4),
        ("F1.0", 6, 7),
        ("B1.0", 7, 9),
        ("RESHARD1", 9, 9),
        ("REDUCE_GRAD1", 9, 13),
        ("B0.0", 9, 11),
        ("RESHARD0", 11, 11),
        ("REDUCE_GRAD0", 13, 17),
    ]
    assert result.bubbles[0].causes == {
        "warm-up": 3,
        "drain": 0,
        "waiting": 0,
        "communication": 0,
        "sharding": 8,
        "swap": 0,
    }
    assert result.peak_memory == (14,)


def test_swapped_activations_leave_and_are_waited_for() -> None:
    swapped = lines((0,), 2, "F0.0 SWAP_OUT0.0 F0.1 SWAP_IN0.0 B0.1 B0.0")
    result = simulate(swapped, Costs(swap=1.5))
    assert [(str(e.step), e.start) for e in result.timeline.events] == [
        ("F0.0", 0),
        ("SWAP_OUT0.0", 1),
        ("F0.1", 1),
        ("SWAP_IN0.0", 2.5),
        ("B0.1", 2),
        ("B0.0", 4),
    ]
    assert result.memory[0] == ((0, 0), (0, 1), (1, 2), (2.5, 1), (2.5, 2), (4, 1), (6, 0))
    slow = simulate(swapped, Costs(swap=5))
    assert slow.bubbles[0].causes["swap"] == 7


def test_critical_path_of_1f1b_goes_down_along_the_last_rank_and_up() -> None:
    path = simulate(one_f_one_b(3, 3)).critical_path
    assert " ".join(str(event.step) for event in path) == "F0.0 F1.0 F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 B1.2 B0.2"
    assert all(before.end == after.start for before, after in pairwise(path))


# Bad use.


@pytest.mark.parametrize(
    ("schedule", "rendezvous", "message"),
    [
        (
            lines((0, 1), 1, "F0.0 SEND_F0.0 RECV_B0.0 B0.0", "RECV_F1.0 F1.0 B1.0"),
            False,
            r"rank 0 at position 2, RECV_B0.0",
        ),
        (lines((0, 1), 1, "F0.0", "F1.0 RECV_F1.0"), False, r"rank 1 at position 0, F1.0"),
        (lines((0,), 1, "B0.0 F0.0"), False, r"rank 0 at position 0, B0.0"),
        (lines((0,), 1, "F0.0 W0.0 I0.0"), False, r"rank 0 at position 1, W0.0"),
        (
            lines((0, 1, 1, 0), 2, "F0.0 F0.1 SEND_F0.0 RECV_F3.0", "RECV_F1.0 F1.0 F2.0 RECV_F1.1 SEND_F2.0"),
            False,
            r"can't end: .* rank 0 at position 3, RECV_F3.0; rank 1 at position 3, RECV_F1.1",
        ),
        (
            lines((0, 1, 1, 0), 1, "F0.0 RECV_F3.0 SEND_F0.0", "RECV_F1.0 F1.0 F2.0 SEND_F2.0"),
            True,
            r"under rendezvous: .*rank 0 at position 1, RECV_F3.0; rank 1 at position 0, RECV_F1.0",
        ),
        (one_f_one_b(2, 1), True, r"no sends and receives"),
        (lines((0,), 1, "F0.1 B0.1"), False, r"rank 0, position 0: F0.1 concerns stage 0 and micro-batch 1"),
        (lines((0, 1), 1, "F1.0", "F0.0"), False, r"rank 0, position 0: F1.0 .* runs stages \(0,\)"),
        (lines((0, 1), 1, "F0.0 SEND_B0.0", ""), False, r"SEND_B0.0 has stage -1"),
    ],
)
def test_a_schedule_that_cannot_end_is_refused_with_the_steps_where_ranks_are_stuck(
    schedule: Schedule, rendezvous: bool, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        simulate(schedule, rendezvous=rendezvous, posted_receives=False)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (lambda: Costs(forward=-1), "forward = -1 should be finite and >= 0"),
        (lambda: Costs(forward=float("inf")), "forward = inf"),
        (lambda: Costs(latency=(1, float("nan"))), "latency"),
        (lambda: Costs(bandwidth=0), "bandwidth = 0 should be > 0"),
        (lambda: Costs(overlap=1.5), "overlap = 1.5"),
        (
            lambda: simulate(gpipe(2, 1), Costs(forward=(1, 2, 3))),
            "forward has 3 values, but the pipeline has 2 stages",
        ),
        (lambda: simulate(gpipe(2, 1), Costs(latency=(1, 2))), "latency has 2 values, but the pipeline has 1 edges"),
    ],
)
def test_costs_that_make_no_sense_are_refused(costs: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        costs()
