"""Activation recomputation draws the numbers of the forward, or is refused: never other ones.

Public reports, case 93 (dropout recomputed without the generator's state) and case 96 (RReLU under checkpointing).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from hp_core import Shard, distribute_tensor, init_device_mesh, manual_seed
from hp_core.errors import ShardingRuleError
from hp_core.random import get_rng_state, recompute_contexts, set_rng_state
from hp_core.testing import assert_same_error, run_ranks


def two_blocks(x: Any, weight: Any, saves: bool, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    def block(y: Any) -> Any:
        return F.dropout(F.rrelu(y @ weight, training=True), 0.5)

    manual_seed(7)
    y = x
    for _ in range(2):
        y = block(y) if saves else checkpoint(block, y, **options)
    drawn_after = torch.rand_like(y)
    (y * drawn_after).sum().backward()
    return x.grad.full_tensor(), drawn_after.full_tensor()


def gradients(saves: bool, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    generator = torch.Generator().manual_seed(1)
    x = distribute_tensor(torch.randn(6, 4, generator=generator), mesh, [Shard(0)]).requires_grad_()
    weight = distribute_tensor(torch.randn(4, 4, generator=generator), mesh, [Shard(1)])
    return two_blocks(x, weight, saves, **options)


@pytest.mark.parametrize("preserve", [True, False])
def test_recomputed_dropout_is_the_dropout_of_the_forward(preserve: bool) -> None:
    options = {"use_reentrant": False, "context_fn": recompute_contexts, "preserve_rng_state": preserve}
    expected = run_ranks(2, gradients, True)
    for (gradient, after), (wanted, wanted_after) in zip(
        run_ranks(2, gradients, False, **options), expected, strict=True
    ):
        assert torch.equal(gradient, wanted)
        assert torch.equal(after, wanted_after)


def test_recomputing_random_ops_without_the_state_is_refused() -> None:
    assert_same_error(
        2, gradients, ShardingRuleError, "context_fn=recompute_contexts", saves=False, use_reentrant=False
    )


def test_recomputing_without_random_ops_needs_no_state() -> None:
    def gradient() -> bool:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]).requires_grad_()
        checkpoint(lambda y: (y * y).sin(), x, use_reentrant=False).sum().backward()
        return bool((x.grad.full_tensor() - 2 * torch.cos(torch.ones(4, 2))).abs().max() < 1e-6)

    assert run_ranks(2, gradient) == [True, True]


def test_a_hook_of_the_backward_may_draw() -> None:
    """Noise on gradients is drawn in the backward, but recomputes nothing."""

    def noise() -> torch.Tensor:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
        manual_seed(1)
        x.register_hook(lambda gradient: gradient + torch.rand_like(gradient))
        (x * 1).sum().backward()
        return x.grad.full_tensor()

    first, second = run_ranks(2, noise)
    assert torch.equal(first, second)
    assert first.min() > 1
    assert first.unique().numel() == 4


def test_the_state_can_be_read_and_set() -> None:
    manual_seed(9)
    try:
        set_rng_state((9, 4))
        assert get_rng_state() == (9, 4)
        forward, recompute = recompute_contexts()
        with forward:
            set_rng_state((9, 6))
        with recompute:
            assert get_rng_state() == (9, 4)
            set_rng_state((9, 5))
        assert get_rng_state() == (9, 6)
        with pytest.raises(RuntimeError), recompute:
            raise RuntimeError
        assert get_rng_state() == (9, 6)
    finally:
        manual_seed(0)
