"""A step that ends with an exception, alike on all ranks: the next one is right, as after the same exception in dense training.

What had arrived before it stays, unless gradients are zeroed: nothing is lost, and nothing counts twice.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hp_core.testing import run_ranks

FOUR = pytest.mark.parametrize("ranks", [4], indirect=True)

PLACES = [
    "block",
    "block within",
    "root",
    "backward of the last block",
    "backward of the first block",
    "backward of the input",
]


class Failure(Exception):
    """Raised on purpose."""


def failing(bed: Any, place: str, kind: type[BaseException] = Failure) -> Any:
    """An objective that raises at a place; the same for the dense and the sharded model."""

    def refuse(*_: Any) -> None:
        raise kind(place)

    def objective(model: Any, rank: int, step: int) -> torch.Tensor:
        hooks = []

        def run(block: Any, x: torch.Tensor) -> torch.Tensor:
            index = list(model.blocks).index(block)
            if place == "block within" and index == 1:
                hooks.append(block.up.register_forward_hook(refuse))
            if place == "block" and index == 1:
                hooks.append(block.register_forward_pre_hook(refuse))
            if (place, index) in (("backward of the last block", 2), ("backward of the first block", 0)):
                hooks.append(
                    block.norm.register_forward_hook(lambda module, args, out: out.register_hook(refuse) and None)
                )
            if place == "backward of the input" and index == 0:
                x.register_hook(refuse)
            return block(x)  # type: ignore[no-any-return]

        if place == "root":
            hooks.append(model.norm.register_forward_hook(refuse))
        try:
            return bed.loss_of(model, rank, step, run=run)
        finally:
            for hook in hooks:
                hook.remove()

    return objective


@pytest.mark.parametrize("zeroes", [True, False])
@pytest.mark.parametrize("before", ["nothing", "synced", "not synced"])
@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
@FOUR
def test_the_next_step_equals_dense(bed: Any, ranks: int, kind: str, before: str, zeroes: bool) -> None:
    def body(bed: Any) -> None:
        it = bed(kind)
        it.backward(0)
        it.update()
        for number, place in enumerate(PLACES):
            step = 10 * number + 10
            if before != "nothing":
                it.model.set_requires_gradient_sync(before == "synced")
                it.backward(step)
                it.model.set_requires_gradient_sync(True)
            objective = failing(bed, place)
            with pytest.raises(Failure):
                objective(it.model, it.rank, step + 1).backward()
            for rank in range(it.size):  # each rank of the dense run fails by itself
                with pytest.raises(Failure):
                    (objective(it.dense, rank, step + 1) / it.size).backward()
            if zeroes:
                for optimizer in it.optimizers:
                    optimizer.zero_grad()
            it.backward(step + 2)
            it.check_gradients()
            assert not it.held_whole(), place
            it.update()
            it.check()

    run_ranks(ranks, body, bed)


@pytest.mark.parametrize(
    "options", [{"reshard_after_forward": False}, {"reshard_after_forward": 2}, {"overlap": False}]
)
@FOUR
def test_under_other_options(bed: Any, ranks: int, options: Any) -> None:
    def body(bed: Any) -> None:
        it = bed(**options)
        for number, place in enumerate(PLACES):
            with pytest.raises(Failure):
                failing(bed, place)(it.model, it.rank, 1).backward()
            it.optimizers[1].zero_grad()
            it.backward(number)
            it.check_gradients()
            it.update()
        it.check()

    run_ranks(ranks, body, bed)


@pytest.mark.parametrize("place", PLACES)
def test_state_right_after_the_exception(bed: Any, ranks: int, place: str) -> None:
    """Modules hold shards, nothing is gathered, and the state dict is complete, without any further step."""

    def body(bed: Any) -> None:
        it = bed()
        with pytest.raises(Failure):
            failing(bed, place)(it.model, it.rank, 1).backward()
        state = it.model.state_dict()
        assert not it.held_whole()
        for name, dense, sharded in it.pairs():
            assert state[name].to_local().data_ptr() == sharded.to_local().data_ptr()
            it.close(sharded.detach().full_tensor(), dense.detach(), name)
        for module in it.model.modules():
            for parameter in module.parameters(recurse=False):
                assert hasattr(parameter, "to_local")

    run_ranks(ranks, body, bed)


@pytest.mark.parametrize("place", PLACES[3:])
def test_zeroing_after_the_next_forward(bed: Any, ranks: int, place: str) -> None:
    """The forward finishes what the failed backward had begun to reduce; gradients are zeroed behind it."""

    def body(bed: Any) -> None:
        it = bed()
        with pytest.raises(Failure):
            failing(bed, place)(it.model, it.rank, 1).backward()
        loss = bed.loss_of(it.model, it.rank, 2)
        it.optimizers[1].zero_grad()
        loss.backward()
        it.dense_backward(2)
        it.check_gradients()

    run_ranks(ranks, body, bed)


def test_an_exception_that_the_model_handles(bed: Any, ranks: int) -> None:
    """A block fails, and the model goes on without it: the step is that of a model without the block."""

    def body(bed: Any) -> None:
        class Tolerant(bed.Net):
            def forward(self, tokens: Any) -> Any:
                x = self.embed(tokens)
                for index, block in enumerate(self.blocks):
                    try:
                        x = block(x if index != 1 else None)
                    except AttributeError:
                        continue
                    except TypeError:
                        continue
                return self.head(self.norm(x))

        it = bed(build=Tolerant)
        for step in range(2):
            it.backward(step)
            it.check_gradients(zero_for_none=True)
            assert not it.held_whole()
            it.optimizers[0].zero_grad()
            it.optimizers[1].zero_grad()

    run_ranks(ranks, body, bed)


def test_evaluation_fails_between_forward_and_backward(bed: Any, ranks: int) -> None:
    def body(bed: Any) -> None:
        it = bed()
        loss = bed.loss_of(it.model, it.rank, 0)
        with pytest.raises(Failure), torch.no_grad():
            failing(bed, "block within")(it.model, it.rank, 1)
        loss.backward()
        it.dense_backward(0)
        it.check_gradients()
        assert not it.held_whole()

    run_ranks(ranks, body, bed)


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_an_interrupt(bed: Any, ranks: int, place: str, saves: bool) -> None:
    """What isn't an `Exception` passes by hooks: the next step, or saving the state, finds that the forward was left."""

    def body(bed: Any) -> None:
        it = bed()
        it.backward(0)
        it.update()
        with pytest.raises(KeyboardInterrupt):
            failing(bed, place, KeyboardInterrupt)(it.model, it.rank, 1).backward()
        if saves:
            assert all(hasattr(value, "to_local") for value in it.model.state_dict().values())
            assert not it.held_whole()
        it.optimizers[1].zero_grad()
        for step in (2, 3):
            it.backward(step)
            it.check_gradients()
            assert not it.held_whole()
            it.update()
        it.check()

    run_ranks(ranks, body, bed)


def test_a_model_that_calls_itself(bed: Any, ranks: int) -> None:
    """Recursion isn't taken for an interrupted forward."""

    class Tree(bed.Net):  # type: ignore[name-defined,misc]
        def forward(self, tokens: Any) -> Any:
            if tokens.shape[0] > 1:
                return torch.cat([self(part) for part in tokens.chunk(2)])
            return super().forward(tokens)

    run_ranks(ranks, lambda bed: bed(build=Tree).train(3), bed)
