"""Gradients of several micro-batches: with and without sync, over replicas, dropped by `zero_grad`, in spite of skipped ones."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from hp_core.testing import record_collectives, run_ranks
from hp_fsdp import fully_shard, hsdp_sync_stream

FOUR = pytest.mark.parametrize("ranks", [4], indirect=True)
MICRO_BATCHES = 3


@pytest.mark.parametrize("way", ["each synced", "the last synced", "no_sync()", "the last over replicas", "kept whole"])
@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_three_micro_batches(bed: Any, ranks: int, kind: str, way: str) -> None:
    """Ten steps of three micro-batches each; the shards' gradients are those of one large batch (cases 30 and 31)."""

    def body(bed: Any) -> None:
        it = bed(kind)
        for step in range(10):
            for micro in range(MICRO_BATCHES):
                last = micro == MICRO_BATCHES - 1
                if way == "the last synced":
                    it.model.set_requires_gradient_sync(last)
                elif way == "the last over replicas":
                    it.model.set_requires_all_reduce(last)
                elif way == "kept whole":
                    it.model.set_reshard_after_backward(False)
                with it.model.no_sync() if way == "no_sync()" and not last else nullcontext():
                    it.backward(MICRO_BATCHES * step + micro, share=1 / MICRO_BATCHES)
            if step in (0, 9):
                it.check_gradients()
            it.update()
        it.check()

    run_ranks(ranks, body, bed)


def test_three_micro_batches_of_replicated_and_frozen_parameters(bed: Any, ranks: int) -> None:
    """One unit is replicated, one frozen, one has both; and a layer is unused in some micro-batches on some ranks."""

    def freeze(model: Any) -> None:
        model.blocks[1].requires_grad_(False)
        model.blocks[2].up.weight.requires_grad_(False)

    def shard(model: Any, mesh: Any) -> None:
        fully_shard(model.blocks[0], mesh=mesh, replicate_params=list(model.blocks[0].parameters()))
        for block in model.blocks[1:]:
            fully_shard(block, mesh=mesh, replicate_params=[block.down.weight])
        fully_shard(model, mesh=mesh)

    def objective(model: Any, rank: int, step: int) -> torch.Tensor:
        return bed.loss_of(model, rank, step, skip=(0, 2) if rank == 1 and step % 3 == 1 else ())

    def body(bed: Any) -> None:
        it = bed(prepare=freeze, shard=shard)
        it.optimize(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        for step in range(4):
            with it.model.no_sync():
                it.backward(3 * step, objective)
                it.backward(3 * step + 1, objective)
            it.backward(3 * step + 2, objective)
            it.check_gradients()
            it.update()
        it.check()

    run_ranks(ranks, body, bed)


@pytest.mark.parametrize(
    "before", ["without sync", "with sync", "with, then without sync", "reduced among shards only"]
)
@pytest.mark.parametrize("how", ["to none", "to zero", "by optimizer", "of a parameter"])
@FOUR
def test_zeroing_drops_what_has_added_up(bed: Any, ranks: int, before: str, how: str) -> None:
    """Also what was not yet reduced, which no parameter shows."""

    def body(bed: Any) -> None:
        it = bed("hsdp")
        if before in ("with sync", "with, then without sync"):
            it.backward(0)
        if before in ("without sync", "with, then without sync"):
            with it.model.no_sync():
                it.backward(1)
                it.backward(2)
        if before == "reduced among shards only":
            it.model.set_requires_all_reduce(False)
            it.backward(1)
            it.model.set_requires_all_reduce(True)
        for model, optimizer in zip((it.dense, it.model), it.optimizers, strict=True):
            if how == "by optimizer":
                optimizer.zero_grad()
            elif how == "of a parameter":
                for parameter in model.parameters():
                    parameter.grad = None
            else:
                model.zero_grad(set_to_none=how == "to none")
        it.backward(3)
        it.check_gradients()
        it.update()
        it.check()

    run_ranks(ranks, body, bed)


def test_zeroing_drops_what_replicated_parameters_have_added_up(bed: Any, ranks: int) -> None:
    """Of a unit that has no others."""

    def shard(model: Any, mesh: Any) -> None:
        fully_shard(model.blocks[1], mesh=mesh, replicate_params=list(model.blocks[1].parameters()))
        fully_shard(model, mesh=mesh)

    def body(bed: Any) -> None:
        it = bed(shard=shard)
        with it.model.no_sync():
            it.backward(0)
        for model in (it.dense, it.model):
            model.zero_grad()
        it.backward(1)
        it.check_gradients()

    run_ranks(ranks, body, bed)


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, {"reshard_after_forward": 2}])
@FOUR
def test_a_forward_without_its_backward(bed: Any, ranks: int, options: Any) -> None:
    """A skipped batch keeps nothing that is out of date after the next step: neither gathered parameters nor parts of them."""

    def body(bed: Any) -> None:
        it = bed(**options)
        for step in range(3):
            kept = bed.loss_of(it.model, it.rank, 77)  # its graph stays alive
            it.backward(step)
            skipped = bed.loss_of(it.model, it.rank, 78)
            it.update()
            del skipped
            bed.loss_of(it.model, it.rank, 79)
            with torch.no_grad():
                for _, dense, sharded in it.pairs():
                    dense.mul_(0.75)
                    sharded.mul_(0.75)
        it.backward(3)
        it.check_gradients()
        it.update()
        it.check()
        assert kept.requires_grad

    run_ranks(ranks, body, bed)


@pytest.mark.parametrize("by_hand", [False, True])
def test_parameters_kept_whole_are_gathered_again_after_a_step(bed: Any, ranks: int, by_hand: bool) -> None:
    def body(bed: Any) -> None:
        it = bed()
        for step in range(3):
            if by_hand:
                for module in (it.model, *it.model.blocks):
                    module.unshard()
            else:
                it.model.set_reshard_after_backward(False)
            it.backward(2 * step)
            it.backward(2 * step + 1)
            if not by_hand:  # else modules hold whole parameters, which have no gradients
                it.check_gradients()
            it.update()
            assert not it.held_whole()
        it.check()

    run_ranks(ranks, body, bed)


def test_reductions_may_outlast_the_backward(bed: Any, ranks: int) -> None:
    """Without a wait at the end of the backward, the optimizer's step or `hsdp_sync_stream` waits."""

    def body(bed: Any) -> None:
        it = bed()
        it.model.set_is_last_backward(False)
        for step in range(3):
            it.backward(step)
            if step == 1:
                hsdp_sync_stream()
                it.check_gradients()
            it.update()
        it.check()

    run_ranks(ranks, body, bed)


@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_reductions_may_outlast_the_backwards_of_micro_batches(bed: Any, ranks: int, kind: str) -> None:
    """Only the last one waits; zeroing in between drops what is on its way."""

    def body(bed: Any) -> None:
        it = bed(kind)
        for step in range(3):
            for micro in range(MICRO_BATCHES):
                it.model.set_is_last_backward(micro == MICRO_BATCHES - 1)
                it.backward(MICRO_BATCHES * step + micro)
                if step == 2 and micro == 0:
                    for optimizer in it.optimizers:
                        optimizer.zero_grad()
            it.check_gradients()
            it.update()
        it.check()

    run_ranks(ranks, body, bed)


def test_sync_of_some_units_only(bed: Any, ranks: int) -> None:
    """`recurse=False` changes one unit."""

    def body(bed: Any) -> None:
        it = bed()
        it.model.set_requires_gradient_sync(False, recurse=False)
        with record_collectives() as log:
            bed.loss_of(it.model, it.rank, 0).backward()
        assert log.counts["reduce_scatter"] == 3
        it.model.set_requires_gradient_sync(True)
        it.dense_backward(0)
        it.backward(1)
        it.check_gradients()

    run_ranks(ranks, body, bed)


def test_no_sync_is_restored_after_an_exception(bed: Any, ranks: int) -> None:
    def body(bed: Any) -> None:
        it = bed()
        it.model.blocks[0].set_requires_gradient_sync(False)
        with pytest.raises(KeyError), it.model.no_sync():
            raise KeyError
        switches = [block._unit.switches.sync for block in it.model.blocks]
        assert switches == [False, True, True]

    run_ranks(ranks, body, bed)


def test_a_module_without_parameters_of_its_own(bed: Any, ranks: int) -> None:
    """The outermost unit has nothing to gather; gradients add up in those below."""

    def shard(model: Any, mesh: Any) -> None:
        for part in model:
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def objective(model: Any, rank: int, step: int) -> torch.Tensor:
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
        return model(x).square().mean()

    def body(bed: Any) -> None:
        it = bed(build=lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), shard=shard)
        with it.model.no_sync():
            it.backward(0, objective)
        it.backward(1, objective)
        it.check_gradients()
        it.update()
        it.check()

    run_ranks(ranks, body, bed)


@FOUR
def test_unfreezing_between_micro_batches_of_replicas(bed: Any, ranks: int) -> None:
    def body(bed: Any) -> None:
        it = bed("hsdp", prepare=lambda model: model.blocks[0].up.requires_grad_(False))
        it.model.set_requires_all_reduce(False)
        it.backward(0, share=0.5)
        for model in (it.dense, it.model):
            model.blocks[0].up.requires_grad_(True)
        it.model.set_requires_all_reduce(True)
        it.backward(1, share=0.5)
        it.check_gradients()
        it.update()
        it.check()

    run_ranks(ranks, body, bed)
