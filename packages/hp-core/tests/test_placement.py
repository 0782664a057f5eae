"""Placements: small immutable values that say what they are, and refuse what makes no sense."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError

import pytest

from hp_core.errors import HyperParallelError, LayoutError
from hp_core.placement import Partial, Placement, RaggedShard, Replicate, Shard

ALL: list[Placement] = [Shard(0), Shard(1), Replicate(), Partial(), Partial("max"), RaggedShard((1, 2))]


def test_placements_are_values() -> None:
    assert Shard(1) == Shard(1)
    assert Partial() == Partial("sum")
    assert RaggedShard([1, 2]) == RaggedShard((1, 2))
    assert len(set(ALL + [copy.copy(one) for one in ALL])) == len(ALL)
    assert [pickle.loads(pickle.dumps(one)) for one in ALL] == ALL
    with pytest.raises((FrozenInstanceError, AttributeError)):
        ALL[0].dim = 3  # type: ignore[attr-defined]


def test_placements_say_what_they_are() -> None:
    assert [one.is_shard() for one in ALL] == [True, True, False, False, False, False]
    assert [one.is_shard(1) for one in ALL] == [False, True, False, False, False, False]
    assert [one.is_replicate() for one in ALL] == [False, False, True, False, False, False]
    assert [one.is_partial() for one in ALL] == [False, False, False, True, True, False]
    assert [one.is_partial("max") for one in ALL] == [False, False, False, False, True, False]
    assert list(map(str, ALL)) == ["S(0)", "S(1)", "R", "P(sum)", "P(max)", "Ragged(1, 2)"]


def test_an_unknown_reduce_op_is_refused_with_those_there_are() -> None:
    with pytest.raises(LayoutError, match=r"Partial\('prod'\).*sum, avg, max, min") as caught:
        Partial("prod")
    assert isinstance(caught.value, HyperParallelError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("units", [(0, 0), (1, -1), ()])
def test_senseless_shares_are_refused(units: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="must be >= 0 and not all zero"):
        RaggedShard(units)
