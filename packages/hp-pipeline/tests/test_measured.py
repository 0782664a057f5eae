"""Costs that are read off a timeline make the simulator give that timeline again."""

from __future__ import annotations

import pytest

from hp_core.errors import PlanError
from hp_pipeline import ORDERS, Costs, Timeline, build_order, measured_costs, overlap_communication, simulate
from hp_pipeline.steps import MetaStepType

RANKS, MICRO_BATCHES = 3, 6


@pytest.mark.parametrize("name", ORDERS)
def test_measuring_a_prediction_gives_its_costs(name: str) -> None:
    schedule = overlap_communication(build_order(name, RANKS, MICRO_BATCHES))
    stages = schedule.stages
    costs = Costs(
        forward=[1.0 + 0.1 * stage for stage in range(stages)],
        input_gradient=[0.5 + 0.1 * stage for stage in range(stages)],
        weight_gradient=[0.75] * stages,
        latency=0.375,
        overlap=0.5,
        activation=3.0,
    )
    predicted = simulate(schedule, costs)
    found = measured_costs(schedule, [predicted.timeline], Costs(activation=3.0))
    forward, latency = found.of("forward", stages), found.of("latency", stages)
    assert forward == pytest.approx(costs.of("forward", stages))
    backward = zip(found.of("input_gradient", stages), found.of("weight_gradient", stages), strict=True)
    wanted = zip(costs.of("input_gradient", stages), costs.of("weight_gradient", stages), strict=True)
    assert [sum(both) for both in backward] == pytest.approx([sum(both) for both in wanted])
    assert found.activation == 3.0
    for edge, (value, real) in enumerate(zip(latency, costs.of("latency", stages), strict=True)):
        within = schedule.placement[edge] == schedule.placement[edge + 1]
        assert value == pytest.approx(0.0 if within else real), f"edge {edge}"
    assert simulate(schedule, found).step_time == pytest.approx(predicted.step_time)
    if any(step.parts for steps in schedule.steps for step in steps):
        assert found.overlap == pytest.approx(0.5)


def test_a_rank_that_is_busy_with_a_pair_does_not_wait_for_a_message() -> None:
    schedule = overlap_communication(build_order("dualpipev", 4, 10))
    found = measured_costs(schedule, [simulate(schedule, Costs(latency=0.375)).timeline])
    assert found.of("latency", 8) == pytest.approx((0.375, 0.375, 0.375, 0.0, 0.375, 0.375, 0.375))


def test_halves_of_a_backward_are_told_apart_where_they_are_split() -> None:
    schedule = overlap_communication(build_order("zbh1", RANKS, MICRO_BATCHES))
    costs = Costs(input_gradient=2.0, weight_gradient=0.5, latency=[0.25, 0.5])
    found = measured_costs(schedule, [simulate(schedule, costs).timeline])
    assert found.of("latency", RANKS) == pytest.approx((0.25, 0.5))
    assert found.of("input_gradient", RANKS) == pytest.approx((2.0,) * RANKS)
    assert found.of("weight_gradient", RANKS) == pytest.approx((0.5,) * RANKS)


def test_one_slow_run_among_three_changes_nothing() -> None:
    schedule = overlap_communication(build_order("1f1b", RANKS, MICRO_BATCHES))
    usual = simulate(schedule, Costs()).timeline
    assert measured_costs(schedule, [usual, usual.scaled(5.0), usual]) == measured_costs(schedule, [usual])


def test_a_timeline_without_a_stage_is_refused() -> None:
    schedule = overlap_communication(build_order("1f1b", RANKS, MICRO_BATCHES))
    whole = simulate(schedule, Costs()).timeline
    forwards = Timeline(RANKS, tuple(event for event in whole.events if event.step.type is MetaStepType.F))
    with pytest.raises(PlanError, match="no step B of stage 0 was recorded by itself"):
        measured_costs(schedule, [forwards])
