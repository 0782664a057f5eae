"""Pairs of which a side fails or hangs, and mistakes in the use of `CommComputeOverlap`."""

from __future__ import annotations

import copy
import threading
import time
from itertools import pairwise

import pytest
import torch
from torch import nn

from hp_core.errors import CommTimeoutError, PlanError
from hp_pipeline.overlap.comm_compute import CommComputeOverlap
from hp_pipeline.overlap.pair import BothFailed


class Failing:
    """A side that exchanges a number of times, and may fail in an exchange or between them."""

    def __init__(self, overlap: CommComputeOverlap, count: int, fails: int = -1, inside: bool = False) -> None:
        self.error = ValueError(f"{count} {fails}")
        self.done = 0
        self.count, self.fails, self.inside = count, fails, inside
        self.exchange = overlap.wrap_dispatch(self._exchange, layer="three")

    def _exchange(self) -> None:
        time.sleep(0.002)
        if self.inside and self.done == self.fails:
            raise self.error

    def __call__(self) -> int:
        for number in range(self.count):
            self.done = number
            if not self.inside and self.done == self.fails:
                raise self.error
            self.exchange()
        return self.count


@pytest.mark.parametrize("inside", [False, True], ids=["between", "inside"])
@pytest.mark.parametrize("side", [0, 1], ids=["backward", "forward"])
@pytest.mark.parametrize("fails", [0, 3])
def test_an_error_of_either_side_is_raised_and_stops_the_other(side: int, fails: int, inside: bool) -> None:
    overlap = CommComputeOverlap(20)
    sides = [Failing(overlap, 30), Failing(overlap, 30)]
    sides[side] = Failing(overlap, 30, fails, inside)
    with pytest.raises(ValueError, match=f"30 {fails}") as caught:
        overlap.run(*sides)
    assert caught.value is sides[side].error
    assert sides[1 - side].done <= fails + 1
    assert overlap.run(Failing(overlap, 2), Failing(overlap, 3)) == (2, 3)  # and it is as before


def test_of_two_errors_the_first_is_raised_and_tells_of_the_other() -> None:
    overlap = CommComputeOverlap(20)
    fails = threading.Event()

    def backward() -> None:
        try:
            overlap.wrap_dispatch(lambda: fails.wait(20))()
        except Exception as error:
            raise TypeError("second") from error

    def forward() -> None:
        fails.set()
        raise ValueError("first") from KeyError("cause")

    with pytest.raises(ValueError, match="first") as caught:
        overlap.run(backward, forward)
    assert isinstance(caught.value.__cause__, KeyError)
    told = caught.value.__cause__.__context__
    assert isinstance(told, BothFailed)
    assert "First the forward (ValueError: first)" in str(told)
    assert "then the backward (TypeError: second)" in str(told)
    assert isinstance(told.__cause__, TypeError)


def test_a_stuck_exchange_ends_the_other_side_in_time_and_the_pair_for_good() -> None:
    overlap = CommComputeOverlap(0.2)
    stuck = threading.Event()
    backward = overlap.wrap_dispatch(lambda: stuck.wait(20), layer="blocks.2")
    forward = overlap.wrap_combine(lambda: None, layer="blocks.5")
    words = (
        r"rank 0, step X: F waited 0.2 s at the combine of layer blocks.5 \(its exchange 1\) for B, which is in the dispatch of "
        r"layer blocks.2 \(its exchange 1\)"
    )
    try:
        with pytest.raises(CommTimeoutError, match=words):
            overlap.run(backward, forward, names=("B", "F"), where="rank 0, step X")
        with pytest.raises(PlanError, match=r"never come back .is in the dispatch of layer blocks.2"):
            overlap.run(lambda: None, lambda: None)
    finally:
        stuck.set()


def test_mistakes_are_refused() -> None:
    overlap = CommComputeOverlap(timeout=20)
    dispatch = overlap.wrap_dispatch(lambda x: x, layer="3")
    module = overlap.wrap_combine(nn.Linear(2, 2))
    with pytest.raises(PlanError, match=r"the combine of layer 1: .* is wrapped already, as the dispatch of layer 3"):
        overlap.wrap_combine(dispatch)
    with pytest.raises(PlanError, match="is wrapped already, as the combine of layer 0"):
        overlap.wrap_dispatch(module)
    with pytest.raises(PlanError, match="5 can't be called"):
        overlap.wrap_dispatch(5)  # type: ignore[type-var]
    with pytest.raises(PlanError, match="7 can't be called"):
        overlap.wrap_dispatch(len, settle=7)  # type: ignore[arg-type]
    for timeout in (0, -1.0):
        with pytest.raises(PlanError, match="positive number of seconds"):
            CommComputeOverlap(timeout)
    outer = overlap.wrap_combine(dispatch.__call__, layer="5")
    with pytest.raises(PlanError, match="the dispatch of layer 3 is called inside the combine of layer 5"):
        outer(1)
    assert dispatch(2) == 2


def test_a_pair_inside_a_pair_is_refused() -> None:
    overlap = CommComputeOverlap(20)
    with pytest.raises(PlanError, match="was called while a pair runs"):
        overlap.run(lambda: None, lambda: overlap.run(lambda: None, lambda: None))


def test_calls_from_other_threads_are_refused() -> None:
    overlap = CommComputeOverlap(20)
    dispatch = overlap.wrap_dispatch(lambda: None)
    errors: list[Exception] = []

    def other() -> None:
        try:
            dispatch()
        except PlanError as error:
            errors.append(error)

    def forward() -> None:
        thread = threading.Thread(target=other, name="loader")
        thread.start()
        thread.join()

    overlap.run(lambda: None, forward)
    assert "was called in thread 'loader', while a pair runs in two others" in str(errors[0])


def test_modules_keep_their_names_and_copies_their_own_weights() -> None:
    overlap = CommComputeOverlap(20)
    module = nn.Sequential(overlap.wrap_dispatch(nn.Linear(2, 2)), nn.Linear(2, 2))
    assert list(module.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    twin = copy.deepcopy(module)
    nn.init.zeros_(twin[0].weight)
    x = torch.ones(1, 2)
    assert torch.equal(twin[0](x)[0], twin[0].bias)
    assert not torch.equal(module[0](x)[0], module[0].bias)
    assert all(one.forward.overlap is overlap for one in (module[0], twin[0]))


def test_threads_end_with_their_owner() -> None:
    def count() -> int:
        return sum(thread.name == "overlapped-backward" for thread in threading.enumerate())

    before = count()
    overlap = CommComputeOverlap(20)
    for one, two in pairwise(range(4)):
        assert overlap.run(lambda one=one: one, lambda two=two: two) == (one, two)
    assert count() == before + 1
    del overlap
    until = time.monotonic() + 20
    while count() > before and time.monotonic() < until:
        time.sleep(0.001)
    assert count() == before
