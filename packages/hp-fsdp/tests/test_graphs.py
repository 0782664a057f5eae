"""Backwards that aren't just one after a forward: of retained graphs, for inputs only, of gradients' own graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hp_core.testing import record_collectives, run_ranks


def test_retained_graph_backward_twice(bed: Any, ranks: int) -> None:
    def body(bed: Any) -> None:
        it = bed()
        it.dense_backward(share=3.0)
        loss = bed.loss_of(it.model, it.rank, 0)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        it.check_gradients()

    run_ranks(ranks, body, bed)


def test_gradients_of_inputs_only(bed: Any, ranks: int) -> None:
    """`torch.autograd.grad` gives dense gradients, reduces nothing, and leaves accumulated gradients alone."""

    def outer(model: Any, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).requires_grad_()
        return x, model.blocks[1](model.blocks[0](x)).square().sum()

    def body(bed: Any) -> None:
        it = bed()
        with it.model.no_sync():
            it.backward(0)
        gradients = []
        for model in (it.dense, it.model):
            x, loss = outer(model, it.rank)
            with record_collectives() as log:
                gradients.append(torch.autograd.grad(loss, x)[0])
            assert "reduce_scatter" not in log.counts
        it.close(*gradients, "gradient of the input")
        it.backward(1)
        it.check_gradients()

    run_ranks(ranks, body, bed)


def test_inputs_that_want_gradients_get_them(bed: Any, ranks: int) -> None:
    def body(bed: Any) -> None:
        it = bed()
        gradients = []
        for model in (it.dense, it.model):
            x = torch.full((2, 6), 0.5 + it.rank, dtype=torch.float64, requires_grad=True)
            model.blocks[2](model.blocks[0](x * x)).square().sum().backward()
            gradients.append(x.grad)
        it.close(*gradients, "gradient of the input")

    run_ranks(ranks, body, bed)


def test_gradients_with_a_graph_of_their_own(bed: Any, ranks: int) -> None:
    """`create_graph` makes the engine add out of place: what had added up before counts once."""

    def body(bed: Any) -> None:
        it = bed()
        with it.model.no_sync():
            it.backward(0)
        it.dense_backward(1)
        bed.loss_of(it.model, it.rank, 1).backward(create_graph=True)
        it.check_gradients()

    run_ranks(ranks, body, bed)


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}])
@pytest.mark.parametrize("whole", [False, True])
def test_gradient_penalty(bed: Any, ranks: int, options: Any, whole: bool) -> None:
    """The loss contains a gradient of the model by its input: parameters stay whole until its backward."""

    def penalty(model: Any, rank: int, step: int) -> torch.Tensor:
        x = torch.full((2, 6), 0.5 + rank + 0.1 * step, dtype=torch.float64, requires_grad=True)
        out = model.blocks[1](model.blocks[0](x)).square().sum()
        (gradient,) = torch.autograd.grad(out, x, create_graph=True)
        loss = gradient.square().sum()
        return loss + bed.loss_of(model, rank, step) if whole else loss

    def body(bed: Any) -> None:
        it = bed(tolerance=1e-10, **options)
        it.backward(0)  # so that units have the root of all
        it.optimizers[0].zero_grad()
        it.optimizers[1].zero_grad()
        for step in range(3):
            it.backward(step, penalty)
            it.check_gradients(zero_for_none=True)
            assert not it.held_whole()
            if whole:
                it.update()
            else:
                for optimizer in it.optimizers:
                    optimizer.zero_grad()
        it.check()

    run_ranks(ranks, body, bed)
