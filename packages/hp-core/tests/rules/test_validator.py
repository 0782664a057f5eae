"""The validator of rules: all rules pass it, none escapes it, and it finds what is wrong.

What combinations of layouts are tried here is told in `hp_core.testing.validator.runs`; the tool tries more.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from hp_core.mesh import DeviceMesh
from hp_core.platform import get_platform
from hp_core.platform.protocol import OpSample
from hp_core.testing import run_ranks
from hp_core.testing.validator import Golden
from hp_core.testing.validator.combinations import MESHES, combinations, operand_layouts, spread
from hp_core.testing.validator.main import main
from hp_core.testing.validator.missing import find_missing
from hp_core.testing.validator.oracle import examine
from hp_core.testing.validator.report import faults_text
from hp_core.testing.validator.runs import Findings, Task, check_samples, plan_tasks, validate
from hp_core.testing.validator.samples import unsampled_inplace, unsampled_rules

GOLDEN = Path(__file__).parent / "golden"
PARTS = 8


def test_every_rule_has_a_sample():
    assert not unsampled_rules(), "give these rules samples in hp_core/platform/torch/op_samples"


def test_every_in_place_variant_has_a_sample():
    assert not unsampled_inplace(), "give the in-place variants of these rules samples"


@pytest.mark.parametrize(("mesh", "part"), [(mesh, part) for mesh in MESHES for part in range(PARTS)])
def test_rules_equal_dense_and_cost_what_is_recorded(mesh: str, part: int):
    tasks = plan_tasks(get_platform().op_samples().table(), [mesh], quick=True)
    size = -(-len(tasks) // PARTS)
    result = validate(tasks[part * size : (part + 1) * size])
    if result.faults:
        pytest.fail("differs from dense:\n" + faults_text(result), pytrace=False)
    differences = _golden().differences(result.findings)
    if differences:
        pytest.fail(
            f"{len(differences)} differ from the golden record; if that is meant, rewrite it with "
            f"`python -m hp_core.rules.validate --quick --update`:\n" + "\n".join(map(str, differences[:20])),
            pytrace=False,
        )


def test_the_golden_record_has_no_more_than_there_is():
    assert not _golden().stale(get_platform().op_samples().table())
    assert sum(path.stat().st_size for path in GOLDEN.glob("*.txt")) < 500_000


@cache
def _golden() -> Golden:
    return Golden(GOLDEN)


# -- it finds what is wrong -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "fault", "told"),
    [("sum", "no reduction", "output 0 differs"), ("mul", "no vary", "gradient 1 differs")],
)
def test_a_broken_rule_is_found(op: str, fault: str, told: str):
    def broken() -> list[str]:
        from dataclasses import replace
        from unittest.mock import patch

        from hp_core.dtensor.dispatch import dispatch_cache_clear
        from hp_core.mesh import init_device_mesh
        from hp_core.rules import registry

        right = registry.find_rule(None, op)

        def wrong(call):
            strategy = right.function(call)
            (layout, sizes), *others = strategy.outputs
            if fault == "no reduction":
                strategy.outputs = ((layout.gradient, sizes), *others)
            else:
                strategy.complete = frozenset(range(len(call.specs)))
            return strategy

        tools = get_platform().op_samples()
        sample = next(one for one in tools.table() if one.op == op and one.operands in ("5x3", "p:5x3 p:3"))
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with patch.dict(registry._rules, {op: replace(right, function=wrong)}):
            outcome = examine(sample, mesh, combinations(mesh, tools.values(sample.operands, 0)))
        dispatch_cache_clear()
        return [what for _, what in outcome.faults]

    assert any(told in what for what in run_ranks(2, broken)[0])


def test_a_wrong_value_is_found():
    def wrong(x):
        return x * 2 if type(x) is torch.Tensor else x * 3

    assert any("output 0 differs" in fault for fault in _faults(wrong))


def test_a_wrong_shape_or_dtype_is_found():
    def wrong_shape(x):
        return x.sum() if type(x) is torch.Tensor else x.sum(0)

    def wrong_dtype(x):
        return x.detach() if type(x) is torch.Tensor else x.detach().float()

    assert any("output 0 is (3,) torch.float64 for ()" in fault for fault in _faults(wrong_shape))
    assert any("torch.float32 for (5, 3) torch.float64" in fault for fault in _faults(wrong_dtype))


def test_a_wrong_gradient_is_found():
    def wrong(x):
        return x * 2 if type(x) is torch.Tensor else x.detach() + x

    def lost(x):
        return x * 2 if type(x) is torch.Tensor else x.detach() * 2

    assert any("gradient 0 differs" in fault for fault in _faults(wrong))
    assert any("lost its gradient" in fault for fault in _faults(lost))


def test_a_gradient_against_the_law_is_found():
    def unreduced(x):
        from hp_core import DTensor, Partial

        if type(x) is torch.Tensor:
            return x.sum()
        placements = [Partial() if p.is_replicate() else p for p in x.placements]
        local = x.to_local(grad_placements=None if x.is_partial() else placements)
        return DTensor.from_local(local, x.layout, shape=tuple(x.shape)).sum()

    assert any("gradient 0 differs" in fault for fault in _faults(unreduced))


def test_a_call_planned_anew_is_found():
    count = iter(range(10**6))

    def fresh(x):
        return x.reshape(5, 3) if type(x) is torch.Tensor else x.roll(15 * next(count), (0,)).reshape(5, 3)

    assert any("planned again" in fault for fault in _faults(fresh))


def test_a_refusal_is_found():
    def refused(x):
        from hp_core.errors import ShardingRuleError

        if type(x) is not torch.Tensor and x.layout.axes_of(0):
            raise ShardingRuleError("no way with dim 0 cut")
        return x * 2

    assert _faults(refused) == ["case: ShardingRuleError: no way with dim (5x3 laid out (tp))"]


def test_ranks_that_disagree_are_found():
    def odd(x):
        from hp_core import get_rank
        from hp_core.errors import ShardingRuleError

        if type(x) is not torch.Tensor and get_rank() == 1 and x.layout.axes_of(0):
            raise ShardingRuleError("only here")
        return x * 2

    sample = OpSample("mul", "odd(x)", odd, "f:5x3")
    result = validate([Task(sample, "2")])
    assert any("ranks disagree" in what for _, _, what in result.faults)


def test_a_call_that_reaches_another_rule_is_found():
    sample = OpSample("sub", "x + x", lambda x: x + x, "5x3")
    assert "never looks up the rule of sub; it reaches add" in validate([Task(sample, "2")]).faults[0][2]


def _faults(function) -> list[str]:
    return check_samples([OpSample("", "case", function, "5x3")], "2", 16)


def test_whatever_the_frameworks_own_library_has_can_run():
    assert not find_missing()


def test_an_op_that_cannot_run_is_found():
    def reasons() -> list[str]:
        from hp_core.testing.validator.missing import why_not

        def picky(x, y, z):
            if type(x) is not torch.Tensor:
                raise TypeError("plain tensors only")
            return x + y + z

        return [why_not(calls) for calls in ((picky,), (picky, lambda x, y, z: x * y), (lambda x, y, z: x.none,))]

    assert run_ranks(2, reasons)[0] == ["plain tensors only", "", "no call of it is known to try"]


# -- combinations and the record --------------------------------------------------------------------------------------


def test_all_layouts_of_an_operand():
    two, four = DeviceMesh(*MESHES["2"]), DeviceMesh(*MESHES["2x2"])
    assert len(operand_layouts(two, 2, True)) == 4  # R, S0, S1, P
    assert len(operand_layouts(four, 2, True)) == 4 * 4 + 2  # and both orders of the axes on either dim
    assert len(set(operand_layouts(four, 3, False))) == 4 * 4 + 3


def test_three_operands_meet_in_every_pair_of_layouts_with_the_largest():
    mesh = DeviceMesh(*MESHES["2x2"])
    operands = get_platform().op_samples().values("5x3 5x3 3", 0)
    chosen = combinations(mesh, operands, extras=False)
    counts = [len(operand_layouts(mesh, len(one.tensor.shape), True)) for one in operands]
    assert len(chosen) == counts[0] * counts[1]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert len({(one[first], one[second]) for one in chosen}) == counts[first] * counts[second]
    assert len(combinations(mesh, operands, exhaustive=True, extras=False)) == counts[0] * counts[1] * counts[2]


@pytest.mark.parametrize(("count", "most"), [(10, 20), (324, 20), (1600, 60), (7, 3)])
def test_a_choice_is_fixed_and_strewn(count: int, most: int):
    chosen = spread(count, most)
    assert chosen == spread(count, most) == sorted(set(chosen))
    assert len(chosen) == min(count, most)
    assert all(0 <= number < count for number in chosen)
    gaps = [b - a for a, b in pairwise(chosen)]
    assert max(gaps) <= 3 * count // len(chosen) + 1


def test_the_record_survives_its_text_and_tells_differences(tmp_path: Path):
    table = get_platform().op_samples().table()
    sample = next(one for one in table if one.op == "add" and one.operands == "p:5x3 p:3")
    task = plan_tasks([sample], ["2"], quick=True)[0]
    mesh = DeviceMesh(*MESHES["2"])
    count = len(combinations(mesh, get_platform().op_samples().values(sample.operands, 0)))
    cells = {number: "- | -" if number % 3 else "all_reduce 48B | -" for number in task.chosen}
    found = Findings(task, cells, count=count)
    Golden(tmp_path).update([found], table)
    assert (tmp_path / "elementwise.txt").read_text().count("table 2 ") == 1
    assert not Golden(tmp_path).differences([found])

    worse = Findings(
        task, cells | {task.chosen[1]: "all_reduce*2 96B | -", task.chosen[2]: "refused LayoutError: no"}, count=count
    )
    told = [str(difference) for difference in Golden(tmp_path).differences([worse])]
    assert len(told) == 2
    assert "x + y of p:5x3 p:3 on 2 laid out" in told[0]
    assert "was - | -, is all_reduce*2 96B | -" in told[0]
    assert "is refused LayoutError: no" in told[1]
    assert "not recorded" in str(Golden(tmp_path / "none").differences([found])[0])
    assert Golden(tmp_path).stale(table[:0]) == [("2", "add", sample.call, sample.operands)]


# -- the tool ---------------------------------------------------------------------------------------------------------


def test_the_tool_updates_compares_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["view_as", "--mesh", "2", "--golden", str(tmp_path / "golden")]
    assert main([*arguments, "--update"]) == 0
    assert main(arguments) == 0
    path = tmp_path / "golden" / "view.txt"
    path.write_text(path.read_text().replace("-|-", "ag 8|-", 1))
    capsys.readouterr()
    assert main(arguments) == 1
    assert "was all_gather 8B | -, is - | -" in capsys.readouterr().out
    assert main(["viev_as"]) == 2
    assert "did you mean view_as" in capsys.readouterr().err


def test_the_tool_is_reached_by_its_name():
    command = [sys.executable, "-m", "hp_core.rules.validate", "view_as", "--list"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert "view_as: x.view_as(y) @ 4x6 2x12" in done.stdout.splitlines()
