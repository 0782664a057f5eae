"""The validator of rules on MindSpore: sample calls equal dense in many layouts, and cost what is recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from hp_core.platform import get_platform
from hp_core.platform.protocol import OpSample
from hp_core.rules.registry import find_rule
from hp_core.testing.validator import Golden
from hp_core.testing.validator.combinations import MESHES
from hp_core.testing.validator.report import faults_text
from hp_core.testing.validator.runs import check_samples, plan_tasks, validate

GOLDEN = Path(__file__).parent / "golden"
PARTS = 6


@pytest.mark.parametrize(("mesh", "part"), [(mesh, part) for mesh in MESHES for part in range(PARTS)])
def test_rules_equal_dense_and_cost_what_is_recorded(mesh: str, part: int) -> None:
    tasks = plan_tasks(get_platform().op_samples().table(), [mesh], quick=True)
    size = -(-len(tasks) // PARTS)
    result = validate(tasks[part * size : (part + 1) * size])
    if result.faults:
        pytest.fail("differs from dense:\n" + faults_text(result), pytrace=False)
    differences = Golden(GOLDEN).differences(result.findings)
    if differences:
        pytest.fail("differs from the golden record:\n" + "\n".join(map(str, differences[:20])), pytrace=False)


def test_every_sample_reaches_a_rule_and_the_record_has_no_more() -> None:
    table = get_platform().op_samples().table()
    assert all(find_rule(None, sample.op) for sample in table)
    assert not Golden(GOLDEN).stale(table)


def test_a_wrong_value_and_a_wrong_gradient_are_found() -> None:
    def wrong_value(x):  # type: ignore[no-untyped-def]
        return x * 3 if hasattr(x, "_spec") else x * 2

    def wrong_gradient(x):  # type: ignore[no-untyped-def]
        return x * x.detach() if hasattr(x, "_spec") else x * x

    for function, told in ((wrong_value, "output 0 differs"), (wrong_gradient, "gradient 0 differs")):
        faults = check_samples([OpSample("", "wrong(x)", function, "5x3")], "2", 4)
        assert any(told in fault for fault in faults), faults
