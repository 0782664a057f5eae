"""What forwards and backwards may do with sharded modules: the results equal dense ones, on all ranks alike.

Inputs and outputs of any structure, modules that are called twice, in another order, by themselves or not at all,
several forwards or backwards, gradients of inputs.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hp_core.errors import PlanError
from hp_core.testing import record_collectives, run_ranks
from hp_fsdp import fully_shard

FOUR = pytest.mark.parametrize("ranks", [4], indirect=True)


@dataclasses.dataclass
class Output:
    """What a module may return."""

    hidden: Any
    note: str = ""


class Odd:
    """The same, as a class of its own."""

    def __init__(self, hidden: Any) -> None:
        self.hidden = hidden


WRAPPERS = {
    "dict": (lambda x: {"a": [x], "b": 3}, lambda y: y["a"][0]),
    "nested tuple": (lambda x: (None, (x, "text")), lambda y: y[1][0]),
    "dataclass": (lambda x: Output(x), lambda y: y.hidden),
    "object": (lambda x: [Odd({"x": x})], lambda y: y[0].hidden["x"]),
    "distribution": (lambda x: torch.distributions.Normal(x, 1.0, validate_args=False), lambda y: y.loc),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_structures_of_inputs_and_outputs(bed: Any, ranks: int, name: str) -> None:
    def body(bed: Any, wrap: Any, unwrap: Any) -> None:
        class Wrapped(bed.Block):
            def forward(self, *, given: Any) -> Any:
                return wrap(super().forward(unwrap(given)))

        def build() -> nn.Module:
            net = bed.Net(blocks=0)
            net.blocks = nn.ModuleList(Wrapped() for _ in range(2))
            return net

        def objective(model: Any, rank: int, step: int) -> torch.Tensor:
            return bed.loss_of(model, rank, step, run=lambda block, x: unwrap(block(given=wrap(x))))

        bed(build=build).train(3, objective)

    run_ranks(ranks, body, bed, *WRAPPERS[name])


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, {"reshard_after_forward": 2}])
@FOUR
def test_blocks_called_twice_and_backwards_in_order(bed: Any, ranks: int, options: Any) -> None:
    """Out of the order of registration, some twice; the gradients of both calls add up."""

    class Tangled(bed.Net):  # type: ignore[name-defined,misc]
        def forward(self, tokens: Any) -> Any:
            x = self.embed(tokens)
            for index in (2, 0, 0, 1, 2):
                x = self.blocks[index](x)
            return self.head(self.norm(x))

    def body(bed: Any) -> None:
        it = bed(build=Tangled, **options)
        it.train()
        assert not it.held_whole()

    run_ranks(ranks, body, bed)


def test_blocks_in_another_order_at_each_step(bed: Any, ranks: int) -> None:
    """Alike on all ranks, but not in the order that the first forward has shown."""

    class Shuffled(bed.Net):  # type: ignore[name-defined,misc]
        def forward(self, tokens: Any, order: Any) -> Any:
            x = self.embed(tokens)
            for index in order:
                x = self.blocks[index](x)
            return self.head(self.norm(x))

    def objective(model: Any, rank: int, step: int) -> torch.Tensor:
        orders = [(0, 1, 2), (2, 1, 0), (1, 0), (2, 0, 1), (1, 2, 0), (2,)]
        return bed.loss_of(model, rank, step, order=orders[step])

    def body(bed: Any) -> None:
        it = bed(build=Shuffled)
        it.optimize(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        for step in range(6):
            it.backward(step, objective)
            it.check_gradients(zero_for_none=True)
            it.update()
        assert not it.held_whole()

    run_ranks(ranks, body, bed)


UNUSED = {
    "on the last rank": lambda rank, size: (1,) if rank == size - 1 else (),
    "on the first rank": lambda rank, size: (0,) if rank == 0 else (),
    "on each rank another": lambda rank, size: (rank % 3,),
    "the first and the last, but for one rank": lambda rank, size: (0, 2) if rank else (1,),
}


@pytest.mark.parametrize("name", UNUSED)
@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_layers_unused_on_some_ranks(bed: Any, ranks: int, kind: str, name: str) -> None:
    """Ranks issue the same collectives, and the unused layer's gradient is that of the others."""

    def body(bed: Any, skips: Any) -> list[tuple[str, int]]:
        it = bed(kind)

        def objective(model: Any, rank: int, step: int) -> torch.Tensor:
            return bed.loss_of(model, rank, step, skip=skips(rank, it.size) if step != 1 else ())

        with record_collectives() as log:
            it.train(4, objective)
        assert not it.held_whole()
        return [(record.kind, record.nbytes) for record in log]

    logs = run_ranks(ranks, body, bed, UNUSED[name])
    assert all(log == logs[0] for log in logs)


def test_a_layer_that_no_rank_uses(bed: Any, ranks: int) -> None:
    """Its gradient is zeros, where dense has None: a rank can't know of the others without asking them."""

    def body(bed: Any) -> None:
        it = bed()
        it.backward(0, lambda model, rank, step: bed.loss_of(model, rank, step, skip=(1,)))
        it.check_gradients(zero_for_none=True)
        assert all(parameter.grad is not None for parameter in it.model.blocks[1].parameters())

    run_ranks(ranks, body, bed)


def test_a_unit_called_by_itself(bed: Any, ranks: int) -> None:
    """Before the root was ever called, between, and together with it in one backward; tied to a unit outside of it."""

    def shard(model: Any, mesh: Any) -> None:
        fully_shard(model.embed, mesh=mesh)
        fully_shard([model.norm, model.head], mesh=mesh)
        bed.shard_blocks(model, mesh)

    def alone(model: Any, rank: int, step: int) -> torch.Tensor:
        x = torch.randn(2, 6, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        return model.blocks[1](model.blocks[0](x)).square().mean() + model.head(x).square().mean()

    def both(model: Any, rank: int, step: int) -> torch.Tensor:
        return alone(model, rank, step) * 3 + bed.loss_of(model, rank, step, skip=(1,))

    def both_turned(model: Any, rank: int, step: int) -> torch.Tensor:
        return bed.loss_of(model, rank, step, skip=(1,)) + alone(model, rank, step)

    def body(bed: Any) -> None:
        it = bed(build=lambda: bed.Net(tied=True), shard=shard)
        for objective in (alone, both, bed.loss_of, alone, both_turned, both):
            it.backward(1, objective)
            it.check_gradients(zero_for_none=True)
            assert not it.held_whole()
            it.optimizers[0].zero_grad()
            it.optimizers[1].zero_grad()

    run_ranks(ranks, body, bed)


def test_a_unit_and_then_its_root_in_one_backward(bed: Any, ranks: int) -> None:
    """The unit has had a root of its own until the root of all is called."""

    def objective(model: Any, rank: int, step: int) -> torch.Tensor:
        x = torch.randn(2, 6, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        return model.blocks[1](x).square().mean() + bed.loss_of(model, rank, step)

    run_ranks(ranks, lambda bed: bed().train(3, objective), bed)


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": 2}, {"overlap": False}])
def test_two_forwards_before_one_backward(bed: Any, ranks: int, options: Any) -> None:
    def objective(model: Any, rank: int, step: int) -> torch.Tensor:
        first = bed.loss_of(model, rank, step, skip=(0,) if rank else ())
        return first * 2 + bed.loss_of(model, rank, step + 50, skip=(1,))

    run_ranks(ranks, lambda bed: bed(**options).train(3, objective), bed)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_evaluation_before_and_between(bed: Any, ranks: int, mode: str) -> None:
    """Before the first step, between steps, and between a forward and its backward."""

    def objective(model: Any, rank: int, step: int) -> torch.Tensor:
        evaluate(model, rank)
        loss = bed.loss_of(model, rank, step)
        evaluate(model, rank)
        return loss

    def evaluate(model: Any, rank: int) -> None:
        model.eval()
        with getattr(torch, mode)():
            bed.loss_of(model, rank, 99)
        model.train()

    def body(bed: Any) -> None:
        it = bed()
        it.train(3, objective)
        evaluate(it.model, it.rank)
        assert not it.held_whole()

    run_ranks(ranks, body, bed)


def test_weights_that_are_read_past_their_gradients(bed: Any, ranks: int) -> None:
    """Detached weights are needed after all gradients of the unit have arrived; embeddings may read their table, too."""

    class Detached(bed.Block):  # type: ignore[name-defined,misc]
        def forward(self, x: Any) -> Any:
            return super().forward(torch.tanh(F.linear(x, self.up.weight.detach())[..., :6]))

    class Scaled(nn.Embedding):
        def forward(self, tokens: Any) -> Any:
            return super().forward(tokens) * self.weight.square().mean()

    def build() -> nn.Module:
        net = bed.Net(blocks=0)
        net.embed = Scaled(11, 6)
        net.blocks = nn.ModuleList(Detached() for _ in range(3))
        return net

    def shard(model: Any, mesh: Any) -> None:
        fully_shard(model.embed, mesh=mesh)
        bed.shard_blocks(model, mesh)

    run_ranks(ranks, lambda bed: bed(build=build, shard=shard).train(3), bed)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("what", ["each block", "two blocks together", "the model"])
def test_recomputation(bed: Any, ranks: int, what: str, reentrant: bool) -> None:
    """Activation checkpoints of torch, with dropout and a layer that the last rank doesn't use."""

    class Dropped(bed.Block):  # type: ignore[name-defined,misc]
        def forward(self, x: Any) -> Any:
            return F.dropout(super().forward(x), 0.5)

    def build() -> nn.Module:
        net = bed.Net(blocks=0)
        net.blocks = nn.ModuleList(Dropped() for _ in range(4))
        return net

    def objective(model: Any, rank: int, step: int) -> torch.Tensor:
        torch.manual_seed(10 * step + rank)
        tokens, targets = bed.tokens_of(rank, step)
        skip = (1,) if rank and step != 1 else ()
        again = partial(checkpoint, use_reentrant=reentrant)
        x = model.embed(tokens) if what == "two blocks together" else None
        if x is not None:  # units are called by themselves here
            x = again(lambda x: model.blocks[1](model.blocks[0](x)), x)
            logits = model.head(model.norm(again(lambda x: model.blocks[3](model.blocks[2](x)), x)))
        elif what == "the model":
            dummy = torch.ones((), dtype=torch.float64, requires_grad=True)
            logits = again(lambda tokens, _: model(tokens, skip=skip), tokens, dummy)
        else:
            logits = model(tokens, skip=skip, run=again)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def shard(model: Any, mesh: Any) -> None:
        if what == "two blocks together":
            for one in (model.embed, model.norm, model.head):
                fully_shard(one, mesh=mesh)
        bed.shard_blocks(model, mesh)

    def body(bed: Any) -> None:
        it = bed(build=build, shard=shard)
        it.train(4, objective)
        assert not it.held_whole()

    run_ranks(ranks, body, bed)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_block_recomputed_twice_in_one_backward(bed: Any, ranks: int, reentrant: bool) -> None:
    """Re-entrant backwards reduce the block when the first of them is through: the second is refused, alike on all ranks."""

    def objective(model: Any, rank: int, step: int) -> torch.Tensor:
        def run(block: Any, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

        return bed.loss_of(model, rank, step, run=run)  # type: ignore[no-any-return]

    def body(bed: Any) -> None:
        it = bed()
        if reentrant:
            with pytest.raises(PlanError, match="use_reentrant=False"):
                it.backward(0, objective)
            it.optimizers[1].zero_grad()
            it.optimizers[0].zero_grad()
        it.train(2, bed.loss_of if reentrant else objective)

    run_ranks(ranks, body, bed)


def test_units_within_units(bed: Any, ranks: int) -> None:
    """Units at three depths, each with parameters of its own before and after those below it."""

    def shard(model: Any, mesh: Any) -> None:
        for block in model.blocks:
            fully_shard(block.up, mesh=mesh)
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def body(bed: Any) -> None:
        it = bed(shard=shard)
        it.train(4)
        assert not it.held_whole()

    run_ranks(ranks, body, bed)


def test_prefetching_chosen_units(bed: Any, ranks: int) -> None:
    def body(bed: Any) -> None:
        it = bed()
        first, second, third = it.model.blocks
        it.model.set_modules_to_forward_prefetch([first, second, third])
        first.set_modules_to_forward_prefetch([])
        it.model.set_modules_to_backward_prefetch([third])
        third.set_modules_to_backward_prefetch([second, first])
        it.train(3)
        assert not it.held_whole()

    run_ranks(ranks, body, bed)
