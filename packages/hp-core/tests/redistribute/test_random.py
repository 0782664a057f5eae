"""Ten thousand random redistributions, run on arrays by the simulator; two hundred of them on real ranks, there and back.

On one mesh and across meshes (other ranks, overlapping, subsets, other grids, permuted), every placement, sizes down to zero.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from hp_core.redistribute.planner import plan_redistribute
from hp_core.testing import run_ranks

from .random_layouts import RANKS, Question, questions, questions_on_few_meshes
from .simulate import at_of, contributions, coordinates, run_plan, value_of

THOUSANDS = settings(max_examples=1, suppress_health_check=list(HealthCheck), database=None)


def check(question: Question) -> None:
    """There and back: two redistributions."""
    src, dst, shape = question
    full = np.arange(prod(shape), dtype=float).reshape(shape) + 7
    for one, other in ((src, dst), (dst, src)):
        result = run_plan(plan_redistribute(one, other, shape, 4), contributions(one, full, 0))
        np.testing.assert_allclose(value_of(other, result, shape), full, rtol=0, atol=1e-9)


@settings(THOUSANDS, max_examples=1500)
@given(questions("same"))
def test_three_thousand_on_one_mesh(question: Question) -> None:
    check(question)


@settings(THOUSANDS, max_examples=1500)
@given(questions("view"))
def test_three_thousand_between_grids_of_the_same_ranks(question: Question) -> None:
    check(question)


@settings(THOUSANDS, max_examples=2000)
@given(questions("other"))
def test_four_thousand_between_any_meshes(question: Question) -> None:
    check(question)


# -- on real ranks ----------------------------------------------------------------------------------------------------

Parts = dict[int, npt.NDArray[np.float64]]


def there_and_back(cases: list[tuple[tuple[Any, ...], Parts, npt.NDArray[np.float64]]]) -> list[Any]:
    """For each case what this rank gets: its local tensor forward, and its local gradient for a given dense one."""
    import torch

    from hp_core import DTensor, get_rank

    got = []
    for number, ((src, dst, shape), parts, direction) in enumerate(cases):
        local = torch.tensor(parts.get(get_rank(), np.empty(0)), dtype=torch.float64, requires_grad=True)
        y = DTensor.from_local(local, src, shape=shape).redistribute(dst, async_op=number % 2 == 0)
        value = y.to_local().detach().numpy()
        own = np.empty(0)
        if dst.mesh.get_coordinate() is not None:
            own = direction[(*(slice(*interval) for interval in dst.gradient.bounds(shape)), ...)]
        y.backward(DTensor.from_local(torch.tensor(own), dst.gradient, shape=shape))
        got.append((value, local.grad.numpy()))
    return got


def test_two_hundred_on_real_ranks() -> None:
    drawn: list[Question] = []

    @settings(THOUSANDS, max_examples=200, phases=[Phase.generate])
    @given(questions_on_few_meshes())
    def draw(question: Question) -> None:
        drawn.append(question)

    draw()
    cases = []
    for number, question in enumerate(drawn):
        src, _, shape = question
        full = np.arange(prod(shape), dtype=float).reshape(shape) + 7
        direction = np.array(np.random.default_rng(number).integers(-50, 50, shape), dtype=float)
        by_place = contributions(src, full, number)
        cases.append(
            (tuple(question), {rank: by_place[at_of(src.mesh, rank)] for rank in src.mesh.rank_list}, direction)
        )
    assert len(cases) == 200
    got = run_ranks(RANKS, there_and_back, cases, timeout=150)
    for number, ((src, dst, shape), _, direction) in enumerate(cases):
        full = np.arange(prod(shape), dtype=float).reshape(shape) + 7
        forward, backward = ({rank: got[rank][number][way] for rank in range(RANKS)} for way in (0, 1))
        told = f"case {number}: {src!r} on {src.mesh} to {dst!r} on {dst.mesh}, shape {shape}"
        for mesh, parts in ((dst.mesh, forward), (src.mesh, backward)):
            assert all(parts[rank].shape == (0,) for rank in range(RANKS) if rank not in mesh.rank_list), told
        value = value_of(dst, {at_of(dst.mesh, rank): forward[rank] for rank in dst.mesh.rank_list}, shape)
        np.testing.assert_allclose(value, full, rtol=0, atol=1e-9, err_msg=told)
        # the law: the gradient of what is pending is whole on every rank; of an average each has its share, and of an
        # extremum only who holds it
        law, scale = src.gradient, 1
        if src.partials and src.partials[0][1] == "avg":
            scale = prod(src.mesh.shape[axis] for axis, _ in src.partials)
        elif src.partials and src.partials[0][1] != "sum":
            law = src.with_partials(tuple((axis, "sum") for axis, _ in src.partials))
        places = dict(zip(src.mesh.rank_list, coordinates(src.mesh.shape), strict=True))
        gradient = value_of(law, {at: backward[rank] * scale for rank, at in places.items()}, shape)
        np.testing.assert_allclose(gradient, direction, rtol=0, atol=1e-9, err_msg=told)


def test_the_check_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A route that loses a piece is seen."""
    import sys

    simulate = sys.modules[run_plan.__module__]
    whole = simulate.route
    monkeypatch.setattr(simulate, "route", lambda *question: whole(*question)[:-1])
    from hp_core.layout import Layout

    with pytest.raises(AssertionError, match="doesn't get all"):
        check(Question(Layout((2,), ("a",))("a"), Layout((2,), ("b",), (2, 3))("b"), (4,)))
