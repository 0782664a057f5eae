"""Steps are values, and making many of them leaves the interpreter's collector as it was."""

from __future__ import annotations

import gc
import pickle

import pytest

from hp_core.errors import PlanError
from hp_pipeline.bulk import in_bulk
from hp_pipeline.steps import MetaStep, MetaStepType, parse_step, plain_step, plain_steps

_T = MetaStepType


def test_a_step_is_a_value():
    pair = MetaStep.overlapped(MetaStep(_T.B, 1, 0), MetaStep(_T.F, 0, 3))
    for step in (MetaStep(_T.SEND_F, 0, 2, peer=3), MetaStep(_T.UNSHARD, 1), pair):
        again = pickle.loads(pickle.dumps(step))
        assert again == step == parse_step(str(step))
        assert hash(again) == hash(step)
        with pytest.raises(AttributeError):
            step.stage = 5


def test_steps_that_are_known_to_be_right_are_those_that_are_checked():
    assert plain_step(_T.F, 1, 2) == MetaStep(_T.F, 1, 2)
    assert plain_steps(_T.W, [(0, 1), (2, 3)]) == [MetaStep(_T.W, 0, 1), MetaStep(_T.W, 2, 3)]
    for wrong in (lambda: MetaStep(_T.F, 0), lambda: MetaStep(_T.UNSHARD, 0, 1), lambda: MetaStep(_T.F, 0, 1, peer=2)):
        with pytest.raises(PlanError, match="of stage 0"):
            wrong()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_before_whatever_happens(enabled):
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        assert not in_bulk(gc.isenabled)()
        assert gc.isenabled() is enabled
        with pytest.raises(ZeroDivisionError):
            in_bulk(lambda: 1 // 0)()
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()
