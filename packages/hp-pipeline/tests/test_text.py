"""Steps and schedules as text: what is written is read back exactly, what isn't a schedule is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_core.errors import PlanError
from hp_pipeline.orders import ORDERS, build_order
from hp_pipeline.passes import insert_communication, insert_fsdp, insert_swaps
from hp_pipeline.schedule import Schedule
from hp_pipeline.steps import COMMUNICATION, COMPUTE, MetaStep, MetaStepType, parse_step

_T = MetaStepType
_NUMBER = st.integers(0, 600)


def _step(*fields: st.SearchStrategy[object]) -> st.SearchStrategy[MetaStep]:
    return st.tuples(*fields).map(
        lambda values: MetaStep(*values)
    )  # st.builds would invent the fields that are left out


_BATCHED = _step(st.sampled_from(sorted(COMPUTE | {_T.SWAP_IN, _T.SWAP_OUT}, key=str)), _NUMBER, _NUMBER)
_STEPS = st.one_of(
    _BATCHED,
    _step(st.sampled_from(sorted(COMMUNICATION, key=str)), _NUMBER, _NUMBER, st.none() | _NUMBER),
    _step(st.sampled_from([_T.UNSHARD, _T.RESHARD, _T.REDUCE_GRAD]), _NUMBER),
    st.builds(
        MetaStep.overlapped,
        _step(st.sampled_from([_T.B, _T.I]), _NUMBER, _NUMBER),
        _step(st.just(_T.F), _NUMBER, _NUMBER),
    ),
)


@given(_STEPS)
def test_any_step_is_read_back(step):
    assert parse_step(str(step)) == step


@pytest.mark.parametrize("name", ORDERS)
def test_any_schedule_is_read_back(name):
    schedule = insert_communication(build_order(name, 3, 5), skips=[(0, 2)])
    schedule = insert_swaps(insert_fsdp(schedule, range(schedule.stages)), 2)
    assert Schedule.from_text(schedule.to_text()) == schedule
    assert Schedule.from_text("# a remark\n\n" + str(schedule).replace("\n", "\n\n")) == schedule


def test_the_text_is_for_people():
    assert (
        str(build_order("1f1b", 2, 2))
        == "schedule 1f1b micro_batches=2 placement=0,1\n0: F0.0 F0.1 B0.0 B0.1\n1: F1.0 B1.0 F1.1 B1.1\n"
    )


@pytest.mark.parametrize(
    "text", ["", "F0", "F.1", "Q0.1", "UNSHARD1.2", "F0.1@2", "OVERLAP_B_F(B0.0)", "OVERLAP_B_F(F0.0,B0.0)", "F0.1 x"]
)
def test_what_is_no_step_is_refused(text):
    with pytest.raises(PlanError):
        parse_step(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "order x",
        "schedule x micro_batches=a placement=0",
        "schedule x micro_batches=1 placement=0\n1: F0.0",
        "schedule x micro_batches=1 placement=0\nF0.0",
    ],
)
def test_what_is_no_schedule_is_refused(text):
    with pytest.raises(PlanError):
        Schedule.from_text(text)
