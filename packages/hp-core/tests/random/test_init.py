"""torch.nn.init on DTensors: the same global values for every layout, world size and for one process.

Public reports, case 114: weights initialised under tp=1 and tp=2 are equal, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hp_core import Replicate, Shard, distribute_tensor, init_device_mesh, manual_seed, zeros
from hp_core.errors import ShardingRuleError
from hp_core.testing import assert_same_error, run_ranks

init = nn.init
INITS: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "uniform_": (lambda w: init.uniform_(w, -2.0, 1.0), (6, 9)),
    "normal_": (lambda w: init.normal_(w, 1.0, 0.3), (6, 9)),
    "trunc_normal_": (lambda w: init.trunc_normal_(w, 0.1, 1.0, -1.5, 2.0), (6, 9)),
    "trunc_normal_ far": (lambda w: init.trunc_normal_(w, 0.0, 1.0, 1.0, 1.3), (6, 9)),
    "constant_": (lambda w: init.constant_(w, 2.5), (6, 9)),
    "ones_": (lambda w: init.ones_(w), (6, 9)),
    "zeros_": (lambda w: init.zeros_(w), (6, 9)),
    "eye_": (lambda w: init.eye_(w), (6, 9)),
    "dirac_": (lambda w: init.dirac_(w), (6, 4, 3)),
    "dirac_ groups": (lambda w: init.dirac_(w, 2), (6, 2, 3, 3)),
    "xavier_uniform_": (lambda w: init.xavier_uniform_(w, 0.7), (6, 9)),
    "xavier_uniform_ of a convolution": (lambda w: init.xavier_uniform_(w), (6, 3, 3, 3)),
    "xavier_normal_": (lambda w: init.xavier_normal_(w), (6, 9)),
    "kaiming_uniform_": (lambda w: init.kaiming_uniform_(w, a=5**0.5), (6, 9)),
    "kaiming_uniform_ fan out": (lambda w: init.kaiming_uniform_(w, mode="fan_out", nonlinearity="relu"), (6, 3, 3)),
    "kaiming_normal_": (lambda w: init.kaiming_normal_(w), (6, 9)),
    "orthogonal_ wide": (lambda w: init.orthogonal_(w, 1.5), (4, 10)),
    "orthogonal_ tall": (lambda w: init.orthogonal_(w), (10, 4)),
    "orthogonal_ of a convolution": (lambda w: init.orthogonal_(w), (8, 4, 3)),
}
LAYOUTS = [((2,), (0,)), ((2,), (1,)), ((2, 2), (0, 0)), ((2, 2), (1, None)), ((2, 2), (1, 0))]


def initialise(
    inits: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]], mesh_shape: tuple[int, ...], cuts: tuple[Any, ...]
) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("a", "b")[: len(mesh_shape)])
    placements = [Replicate() if cut is None else Shard(cut) for cut in cuts]
    found = {}
    for name, (function, shape) in inits.items():
        weight = nn.Parameter(zeros(shape, device_mesh=mesh, placements=placements))
        manual_seed(3)
        assert function(weight) is weight, name
        found[name] = weight.detach().full_tensor()
    return found


@pytest.fixture(scope="module")
def one_process() -> dict[str, torch.Tensor]:
    return run_ranks(1, initialise, INITS, (1,), (None,))[0]


@pytest.mark.parametrize(("mesh_shape", "cuts"), LAYOUTS, ids=str)
def test_initial_values_do_not_depend_on_the_layout(
    one_process: dict[str, torch.Tensor], mesh_shape: tuple[int, ...], cuts: tuple[int | None, ...]
) -> None:
    for found in run_ranks(2 * len(mesh_shape), initialise, INITS, mesh_shape, cuts):
        for name, value in found.items():
            assert torch.equal(value, one_process[name]), name


@pytest.mark.parametrize("name", ["constant_", "ones_", "zeros_", "eye_", "dirac_", "dirac_ groups"])
def test_what_is_not_random_equals_torch(one_process: dict[str, torch.Tensor], name: str) -> None:
    function, shape = INITS[name]
    assert torch.equal(one_process[name], function(torch.empty(shape)))


def test_random_ones_have_the_scale_of_the_global_shape(one_process: dict[str, torch.Tensor]) -> None:
    for name, low, high in (("trunc_normal_", -1.5, 2.0), ("trunc_normal_ far", 1.0, 1.3)):
        assert one_process[name].min() >= low
        assert one_process[name].max() <= high
    assert 0.6 < one_process["kaiming_uniform_"].abs().max() * 9**0.5 <= 1.0
    assert 0.6 < one_process["xavier_uniform_"].abs().max() / 0.7 / (6 / 15) ** 0.5 <= 1.0
    wide, tall = one_process["orthogonal_ wide"] / 1.5, one_process["orthogonal_ tall"]
    torch.testing.assert_close(wide @ wide.T, torch.eye(4))
    torch.testing.assert_close(tall.T @ tall, torch.eye(4))


def test_modules_reset_as_dense_ones_of_one_process() -> None:
    """nn.Linear.reset_parameters on cut weights: the bound comes from the global fan."""

    def reset(world: int, cut: Any) -> tuple[torch.Tensor, torch.Tensor]:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        layer = nn.Linear(7, 5)
        for name, parameter in list(layer.named_parameters()):
            placement = Shard(cut) if cut is not None and cut < parameter.dim() else Replicate()
            setattr(layer, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placement])))
        manual_seed(8)
        layer.reset_parameters()
        return layer.weight.full_tensor(), layer.bias.full_tensor()

    expected = run_ranks(1, reset, 1, None)[0]
    for cut in (0, 1):
        for found in run_ranks(2, reset, 2, cut):
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["uniform_", "normal_", "kaiming_normal_", "orthogonal_", "trunc_normal_"])
def test_a_generator_is_refused(name: str) -> None:
    def refused() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        getattr(nn.init, name)(zeros(4, 4, device_mesh=mesh, placements=[Shard(0)]), generator=torch.Generator())

    assert_same_error(2, refused, ShardingRuleError, "use hp_core.manual_seed")
