"""Random ops on DTensors: one global result for every layout, equal to what one process draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hp_core import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh, manual_seed, ones, rand
from hp_core.errors import ShardingRuleError
from hp_core.testing import assert_same_error, record_collectives, run_ranks

Draw = Callable[[Any], Any]

DRAWS: dict[str, Draw] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "nn.Dropout": lambda x: nn.Dropout(0.4)(x),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.4, inplace=True),
    "dropout_": lambda x: torch.dropout_(x.clone(), 0.4, True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "alpha_dropout in place": lambda x: F.alpha_dropout(x.clone(), 0.4, training=True, inplace=True),
    "nn.AlphaDropout": lambda x: nn.AlphaDropout(0.4)(x),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x[..., None], 0.4, training=True),
    "dropout1d": lambda x: F.dropout1d(x, 0.4),
    "dropout1d of a batch": lambda x: F.dropout1d(x[..., None] * torch.ones((), dtype=x.dtype), 0.4),
    "dropout2d": lambda x: F.dropout2d(x[..., None, None].expand(5, 7, 2, 2), 0.4),
    "nn.Dropout2d": lambda x: nn.Dropout2d(0.4)(x[..., None, None]),
    "dropout3d": lambda x: F.dropout3d(x[..., None, None, None], 0.4),
    "rrelu": lambda x: F.rrelu(x - 0.5, 0.1, 0.3, training=True),
    "rrelu not training": lambda x: F.rrelu(x - 0.5, 0.1, 0.3),
    "rrelu in place": lambda x: F.rrelu(x - 0.5, 0.1, 0.3, training=True, inplace=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "bernoulli": lambda x: torch.bernoulli(x.detach()),
    "bernoulli p": lambda x: x.detach().bernoulli(0.3),
    "bernoulli_": lambda x: x.detach().clone().bernoulli_(0.3),
    "rand_like": lambda x: torch.rand_like(x),
    "rand_like device": lambda x: torch.rand_like(x, device="cpu", dtype=torch.bfloat16),
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float64),
    "randint_like": lambda x: torch.randint_like(x, 9),
    "randint_like bounds": lambda x: torch.randint_like(x, -(2**62), 2**62, dtype=torch.int64),
    "normal of tensors": lambda x: torch.normal(x.detach(), x.detach() / 8),
    "normal of a number": lambda x: torch.normal(2.0, x.detach()),
    "multinomial": lambda x: torch.multinomial(x.detach(), 3),
    "multinomial replacement": lambda x: torch.multinomial(x.detach(), 9, replacement=True),
    "uniform_": lambda x: x.detach().uniform_(-1, 2),
    "normal_": lambda x: x.detach().normal_(3, 0.5),
    "exponential_": lambda x: x.detach().exponential_(2.0),
    "cauchy_": lambda x: x.detach().cauchy_(1.0, 0.5),
    "log_normal_": lambda x: x.detach().log_normal_(0.5, 0.25),
    "geometric_": lambda x: x.detach().geometric_(0.2),
    "geometric_ integers": lambda x: x.detach().long().geometric_(0.2),
    "random_": lambda x: x.detach().random_(),
    "random_ to": lambda x: x.detach().long().random_(6),
    "random_ from": lambda x: x.detach().long().random_(-3, 6),
    "random_ all": lambda x: x.detach().long().random_(-(2**63), None),
    "random_ bytes": lambda x: x.detach().to(torch.uint8).random_(),
}
LAYOUTS = [((2,), (0,)), ((2,), (1,)), ((2, 2), (0, 0)), ((2, 2), (1, None)), ((2, 2), (1, 0))]


def draw_all(draws: dict[str, Draw], mesh_shape: tuple[int, ...], cuts: tuple[int | None, ...]) -> dict[str, Any]:
    """For each draw the global result, and the gradient where there is one."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("a", "b")[: len(mesh_shape)])
    placements = [Replicate() if cut is None else Shard(cut) for cut in cuts]
    found = {}
    for name, draw in draws.items():
        x = distribute_tensor(torch.linspace(0.1, 0.9, 35).view(5, 7), mesh, placements).requires_grad_()
        manual_seed(11)
        result = draw(x)
        gradient = None
        if result.requires_grad:
            result.square().sum().backward()
            gradient = x.grad.full_tensor()
        found[name] = (result.detach().full_tensor(), gradient)
    return found


@pytest.fixture(scope="module")
def one_process() -> dict[str, Any]:
    return run_ranks(1, draw_all, DRAWS, (1,), (None,))[0]


@pytest.mark.parametrize(("mesh_shape", "cuts"), LAYOUTS, ids=str)
def test_the_global_values_do_not_depend_on_the_layout(
    one_process: dict[str, Any], mesh_shape: tuple[int, ...], cuts: tuple[int | None, ...]
) -> None:
    """Public reports, cases 111 and 114: dropout masks differ between shards and equal the dense one, as initial weights do."""
    for found in run_ranks(2 * len(mesh_shape), draw_all, DRAWS, mesh_shape, cuts):
        for name, (value, gradient) in found.items():
            wanted, wanted_gradient = one_process[name]
            if name == "gumbel_softmax":  # of elements that are the same bits, through a softmax that isn't
                torch.testing.assert_close(value, wanted)
                torch.testing.assert_close(gradient, wanted_gradient)
                continue
            assert torch.equal(value, wanted), name
            assert (gradient is None) == (wanted_gradient is None), name
            assert gradient is None or torch.equal(gradient, wanted_gradient), name


def test_the_values_are_of_the_distribution(one_process: dict[str, Any]) -> None:
    values = {name: value for name, (value, _) in one_process.items()}
    for name, value in values.items():
        assert value.unique().numel() > 1, name
    assert set(values["random_ to"].unique().tolist()) == set(range(6))
    assert set(values["random_ from"].unique().tolist()) == set(range(-3, 6))
    assert values["random_ all"].min() < -(2**60)
    assert values["random_ all"].max() > 2**60
    assert values["randint_like bounds"].dtype == torch.int64
    assert values["geometric_"].min() == 1
    assert torch.equal(values["geometric_"].long(), values["geometric_ integers"])
    assert values["exponential_"].min() > 0
    for row in values["multinomial"]:
        assert len(set(row.tolist())) == 3
    kept = values["dropout2d"]
    for channel in kept.flatten(0, 1):
        assert (channel == 0).all() or (channel != 0).all()
    torch.testing.assert_close(values["gumbel_softmax"].sum(-1), torch.ones(5))


def test_sharded_dropout_moves_nothing() -> None:
    def messages() -> int:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        x = rand(6, 4, device_mesh=mesh, placements=[Shard(1)])
        with record_collectives() as log:
            F.dropout(x, 0.5)
            F.alpha_dropout(x, 0.5, training=True)
            torch.randint_like(x, 5)
            x.exponential_()
        return len(log)

    assert run_ranks(2, messages) == [0, 0]


def test_dropout_of_a_large_tensor_keeps_what_it_should() -> None:
    def share() -> tuple[float, float, float, float]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        x = ones(400, 500, device_mesh=mesh, placements=[Shard(0)])
        out = F.dropout(x, 0.3)
        assert F.dropout(x, 0.3, training=False) is x
        assert torch.equal(F.dropout(x, 1.0).full_tensor(), torch.zeros(400, 500))
        normal = torch.randn_like(x)
        alpha = F.alpha_dropout(normal, 0.2, training=True).full_tensor()
        return (
            (out.full_tensor() != 0).float().mean().item(),
            out.full_tensor().mean().item(),
            alpha.mean().item(),
            alpha.std().item(),
        )

    kept, mean, alpha_mean, alpha_std = run_ranks(2, share)[0]
    assert abs(kept - 0.7) < 0.005
    assert abs(mean - 1.0) < 0.01
    assert abs(alpha_mean) < 0.01
    assert abs(alpha_std - 1.0) < 0.01


def test_multinomial_draws_with_the_weights_it_is_given() -> None:
    def shares() -> tuple[list[float], list[float]]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        weights = torch.tensor([0.0, 1.0, 3.0, 0.0, 4.0, 0.0]).expand(4000, 6)
        x = distribute_tensor(weights, mesh, [Shard(0)])
        drawn = (torch.multinomial(x, 2, replacement=True), torch.multinomial(x, 1))
        return tuple((one.full_tensor().flatten().bincount(minlength=6) / one.numel()).tolist() for one in drawn)  # type: ignore[return-value]

    for found in run_ranks(2, shares)[0]:
        assert found == pytest.approx([0, 1 / 8, 3 / 8, 0, 4 / 8, 0], abs=0.03)
        assert found[0] == found[3] == found[5] == 0


def test_the_seed_starts_the_stream_anew() -> None:
    """Public reports, case 113: seed, draw, seed, draw gives the same numbers."""

    def draws() -> tuple[bool, bool, bool]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        found = []
        for _ in range(2):
            manual_seed(5)
            found.append([rand(6, device_mesh=mesh, placements=[Shard(0)]).full_tensor() for _ in range(2)])
        return torch.equal(found[0][0], found[1][0]), torch.equal(found[0][1], found[1][1]), torch.equal(*found[0])

    assert run_ranks(2, draws) == [(True, True, False)] * 2


REFUSALS: dict[str, tuple[Draw, str]] = {
    "poisson": (lambda x: torch.poisson(x), "no layout-independent rule"),
    "binomial": (lambda x: torch.binomial(x, x), "no layout-independent rule"),
    "generator": (lambda x: x.normal_(generator=torch.Generator()), "use hp_core.manual_seed"),
    "exponential rate": (lambda x: x.exponential_(-1.0), "must be positive|lambda"),
    "geometric p": (lambda x: x.geometric_(1.5), r"\(0, 1\)|between 0 and 1"),
    "empty interval": (lambda x: x.random_(3, 3), "must hold"),
    "probability": (lambda x: F.feature_alpha_dropout(x, 1.5, training=True), "probability"),
    "pending": (
        lambda x: DTensor.from_local(torch.ones(3), x.device_mesh, [Partial()]).uniform_(),
        "pending reduction",
    ),
    "uniform": (lambda x: torch.rand_like(x.long()), "floating point"),
}


@pytest.mark.parametrize("which", REFUSALS)
def test_what_cannot_be_drawn_is_refused(which: str) -> None:
    act, message = REFUSALS[which]

    def refused() -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        act(DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)]))

    assert_same_error(2, refused, Exception, message)


def test_writing_to_a_view_that_had_to_be_moved_is_refused() -> None:
    """The view of a cut dim is a gathered copy: a write to it would be lost."""

    def write(how: str) -> list[float]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        x = distribute_tensor(torch.zeros(4, 6), mesh, [Shard(0)])
        if how == "moved":
            x[0].add_(1)
        elif how == "view of moved":
            x[0].view(2, 3).mul_(2)
        elif how == "piece":
            x.chunk(2, 0)[1].zero_()
        x[:, 0].add_(1)  # the cut dim is untouched: a real view
        (x[0] * 1).reduce_partial().add_(1)
        return x.full_tensor()[:, 0].tolist()

    assert run_ranks(2, write, "fine") == [[1.0] * 4] * 2
    for how in ("moved", "view of moved", "piece"):
        assert_same_error(2, write, ShardingRuleError, "would be lost to the tensor", how)
