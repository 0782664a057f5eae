"""Mistakes are told alike on all ranks, before anything is sent, and in the same words on both frameworks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hp_core as hp
from hp_core import Layout, Partial, Replicate, Shard, init_device_mesh
from hp_core.errors import HyperParallelError, LayoutError, MeshError, PlanError, ShardingRuleError
from hp_core.testing import assert_same_error

from .layouts import WHOLE, grid, lay


class World:
    """What the mistakes are made with, on this rank."""

    def __init__(self, framework: Any) -> None:
        self.framework = framework
        self.mesh = grid()
        self.base = Layout.from_device_mesh(self.mesh)
        self.x = lay(framework, WHOLE, self.base("dp"))
        self.line = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))

    def plain(self, *shape: int) -> Any:
        """A plain tensor."""
        return self.framework.tensor(np.ones(shape, np.float32))

    def layer(self) -> Any:
        """A model of one layer, called "0"."""
        return self.framework.sequential(self.framework.linear(np.ones((4, 4), np.float32), np.ones(4, np.float32)))


MISTAKES: dict[str, tuple[Callable[[World], Any], type[Exception], str]] = {
    "a mesh larger than the world": (
        lambda w: init_device_mesh("cpu", (8,), mesh_dim_names=("tp",)),
        MeshError,
        "needs 8 ranks, but the world has 4",
    ),
    "an unknown axis": (lambda w: w.base("pp"), LayoutError, "no mesh axis 'pp'"),
    "an axis used twice": (lambda w: w.base("tp", "tp"), LayoutError, "tp"),
    "a dim that isn't there": (
        lambda w: hp.distribute_tensor(w.plain(4, 6), w.mesh, [Shard(2), Replicate()]),
        LayoutError,
        "2 dims",
    ),
    "too few placements": (lambda w: hp.distribute_tensor(w.plain(4), w.mesh, [Shard(0)]), LayoutError, "placement"),
    "a part of another shape": (
        lambda w: hp.DTensor.from_local(w.plain(3, 6), w.base("dp"), shape=(4, 6)),
        LayoutError,
        r"holds a local tensor of shape \(3, 6\).*its part is \(2, 6\)",
    ),
    "a DTensor as a part": (lambda w: hp.DTensor.from_local(w.x, w.base), LayoutError, "takes a plain tensor"),
    "a DTensor distributed again": (lambda w: hp.distribute_tensor(w.x, w.base), LayoutError, "redistribute"),
    "a source outside of the mesh": (
        lambda w: hp.distribute_tensor(w.plain(4), w.base, src_data_rank=7),
        LayoutError,
        "src_data_rank=7",
    ),
    "a plain tensor among DTensors": (lambda w: w.x + w.plain(5, 7), LayoutError, "plain tensor of shape"),
    "operands on two meshes": (
        lambda w: w.x + lay(w.framework, WHOLE, Layout.from_device_mesh(w.line)),
        ShardingRuleError,
        "different meshes",
    ),
    "kinds of pending sums mixed": (lambda w: w.base(Partial("sum"), Partial("max")), LayoutError, "max"),
    "a negative size": (lambda w: hp.zeros(4, -1, device_mesh=w.mesh), HyperParallelError, "-1"),
    "an empty interval": (lambda w: hp.randint(3, 3, (4,), device_mesh=w.mesh), ShardingRuleError, "3"),
    "a pattern that matches nothing": (
        lambda w: hp.parallelize_module(w.layer(), w.mesh, {"1": hp.ColwiseParallel()}),
        PlanError,
        "'1'.*near names: 0|'1'",
    ),
    "a style for another kind of layer": (
        lambda w: hp.parallelize_module(
            w.framework.sequential(w.framework.activation()), w.mesh, {"0": hp.ColwiseParallel()}
        ),
        PlanError,
        "ColwiseParallel",
    ),
    "a plan of no styles": (lambda w: hp.parallelize_module(w.layer(), w.mesh, {"0": "rows"}), PlanError, "str"),
}


def _mistake(framework: Any, name: str) -> None:
    world = World(framework)
    with hp.record_collectives() as log:
        try:
            MISTAKES[name][0](world)
        finally:
            assert not log, f"communicated before it was refused: {log.summary()}"


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_alike_on_all_ranks_before_anything_is_sent(framework: Any, name: str) -> None:
    _, kind, words = MISTAKES[name]
    assert_same_error(4, _mistake, kind, words, framework, name)
