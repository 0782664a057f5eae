"""Random ops on DTensors: one global result for every layout, equal to what one process draws."""

from __future__ import annotations

import pytest

from hp_core.errors import ShardingRuleError
from hp_core.testing import assert_same_error, run_ranks

DRAWS = [
    "dropout",
    "dropout in place",
    "bernoulli",
    "rand_like",
    "randn_like",
    "uniform_",
    "normal_",
    "init",
    "nn.Dropout",
]


def _draw(which: str, mesh_shape: tuple[int, ...], roles: tuple[str, ...]):
    """The global result (and gradient, for dropout) of one random op on one layout."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    from hp_core import Replicate, Shard, distribute_tensor, init_device_mesh, manual_seed

    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("a", "b")[: len(mesh_shape)])
    placements = [Shard(int(role)) if role.isdigit() else Replicate() for role in roles]
    x = distribute_tensor(torch.linspace(0.1, 0.9, 35).view(5, 7), mesh, placements).requires_grad_()
    manual_seed(11)
    with torch.set_grad_enabled(which in ("dropout", "nn.Dropout")):
        out = {
            "dropout": lambda: F.dropout(x, 0.4),
            "nn.Dropout": lambda: nn.Dropout(0.4)(x),
            "dropout in place": lambda: F.dropout(x.clone(), 0.4, inplace=True),
            "bernoulli": lambda: torch.bernoulli(x),
            "rand_like": lambda: torch.rand_like(x),
            "randn_like": lambda: torch.randn_like(x, dtype=torch.float64),
            "uniform_": lambda: x.uniform_(-1, 2),
            "normal_": lambda: x.normal_(3, 0.5),
            "init": lambda: nn.init.xavier_uniform_(x),
        }[which]()
    gradient = None
    if out.requires_grad and out is not x:
        out.sum().backward()
        gradient = x.grad.full_tensor()
    return out.detach().full_tensor(), gradient


@pytest.mark.parametrize("which", DRAWS)
def test_the_global_values_do_not_depend_on_the_layout(which):
    """Public reports, cases 111 and 114: dropout masks differ between shards and equal the dense one, as initial weights do."""
    import torch

    value, gradient = run_ranks(1, _draw, which, (1,), ("r",))[0]
    for mesh_shape, roles in [((2,), ("0",)), ((2,), ("1",)), ((2, 2), ("0", "0")), ((2, 2), ("1", "r"))]:
        world = 2 * len(mesh_shape)
        for other, other_gradient in run_ranks(world, _draw, which, mesh_shape, roles):
            assert torch.equal(value, other), (which, roles)
            assert gradient is None or torch.equal(gradient, other_gradient)
    assert value.unique().numel() > 1


def test_dropout_of_a_large_tensor_keeps_what_it_should():
    def share():
        import torch
        import torch.nn.functional as F

        from hp_core import Shard, init_device_mesh, ones

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        x = ones(400, 500, device_mesh=mesh, placements=[Shard(0)])
        out = F.dropout(x, 0.3)
        assert F.dropout(x, 0.3, training=False) is x
        assert torch.equal(F.dropout(x, 1.0).full_tensor(), torch.zeros(400, 500))
        return (out.full_tensor() != 0).float().mean().item(), out.full_tensor().mean().item()

    kept, mean = run_ranks(2, share)[0]
    assert abs(kept - 0.7) < 0.005
    assert abs(mean - 1.0) < 0.01


def test_the_seed_starts_the_stream_anew():
    """Public reports, case 113: seed, draw, seed, draw gives the same numbers."""

    def draws():
        import torch

        from hp_core import Shard, init_device_mesh, manual_seed, rand

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        found = []
        for _ in range(2):
            manual_seed(5)
            found.append([rand(6, device_mesh=mesh, placements=[Shard(0)]).full_tensor() for _ in range(2)])
        return torch.equal(found[0][0], found[1][0]), torch.equal(found[0][1], found[1][1]), torch.equal(*found[0])

    assert run_ranks(2, draws) == [(True, True, False)] * 2


@pytest.mark.parametrize("which", ["multinomial", "generator", "exponential_", "pending", "normal"])
def test_what_cannot_be_layout_independent_is_refused(which):
    def refused(which):
        import torch

        from hp_core import DTensor, Partial, Shard, init_device_mesh

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        x = DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)])
        {
            "multinomial": lambda: torch.multinomial(x, 1),
            "generator": lambda: x.normal_(generator=torch.Generator()),
            "exponential_": lambda: x.exponential_(),
            "pending": lambda: DTensor.from_local(torch.ones(3), mesh, [Partial()]).uniform_(),
            "normal": lambda: torch.normal(x, 1.0),
        }[which]()

    message = {
        "generator": "use hp_core.manual_seed",
        "pending": "pending reduction",
        "normal": r"normal has no rule.*x\.normal_",
    }.get(which, "no layout-independent rule")
    assert_same_error(2, refused, ShardingRuleError, message, which)


def test_writing_to_a_view_that_had_to_be_moved_is_refused():
    """The view of a cut dim is a gathered copy: a write to it would be lost."""

    def write(how):
        import torch

        from hp_core import Shard, distribute_tensor, init_device_mesh

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        x = distribute_tensor(torch.zeros(4, 6), mesh, [Shard(0)])
        if how == "moved":
            x[0].add_(1)
        elif how == "view of moved":
            x[0].view(2, 3).mul_(2)
        elif how == "piece":
            x.chunk(2, 0)[1].zero_()
        x[:, 0].add_(1)  # the cut dim is untouched: a real view
        x[0].clone().add_(1)
        return x.full_tensor()[:, 0].tolist()

    assert run_ranks(2, write, "fine") == [[1.0] * 4] * 2
    for how in ("moved", "view of moved", "piece"):
        assert_same_error(2, write, ShardingRuleError, "would be lost to the tensor", how)
