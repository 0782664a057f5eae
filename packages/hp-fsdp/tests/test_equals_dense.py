"""Training on shards equals dense training: gradients, parameters and optimizer states after ten steps, in float64.

Here the ways of cutting a model: meshes, units, granularity, kept parameters. What forwards may do is in
`test_forwards`, micro-batches are in `test_accumulation`, element types in `test_precision`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hp_core.testing import run_ranks
from hp_fsdp import CPUOffloadPolicy, fully_shard

FOUR = pytest.mark.parametrize("ranks", [4], indirect=True)

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "rows": {"shard_granularity": lambda name, parameter: "row"},
    "five rows": {"shard_granularity": lambda name, parameter: 5},
    "whole matrices": {"shard_granularity": lambda name, parameter: "whole" if parameter.dim() == 2 else "element"},
    "kept after forward": {"reshard_after_forward": False},
    "shared by two after forward": {"reshard_after_forward": 2},
    "no overlap": {"overlap": False},
}


@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_meshes(bed: Any, ranks: int, kind: str) -> None:
    run_ranks(ranks, lambda bed: bed(kind).train(), bed)


def test_with_tensor_parallel_blocks(bed: Any, ranks: int) -> None:
    """On 2 ranks the data axis has one: tp 2 x dp 1."""
    run_ranks(ranks, lambda bed: bed("tp").train(), bed)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "defaults"])
@pytest.mark.parametrize("kind", ["fsdp", "tp"])
@FOUR
def test_options(bed: Any, ranks: int, kind: str, name: str) -> None:
    def body(bed: Any, options: dict[str, Any]) -> None:
        bed(kind, **options).train()

    run_ranks(ranks, body, bed, OPTIONS[name])


@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_uneven_sizes(bed: Any, ranks: int, kind: str) -> None:
    """Primes, scalars, empty parameters, and fewer elements than ranks."""

    def build() -> nn.Module:
        class Odd(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = nn.Linear(7, 13)
                self.second = nn.Linear(13, 1)
                self.scale = nn.Parameter(torch.tensor(1.5))
                self.none = nn.Parameter(torch.zeros(0, 3))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.second(torch.tanh(self.first(x))) * self.scale + self.none.sum()

        return nn.Sequential(Odd(), nn.Linear(1, 1))

    def shard(model: Any, mesh: Any) -> None:
        fully_shard(model[0], mesh=mesh)
        fully_shard(model[1], mesh=mesh)
        fully_shard(model, mesh=mesh)

    def objective(model: Any, rank: int, step: int) -> torch.Tensor:
        x = torch.randn(3, 7, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
        return model(x).square().mean()

    run_ranks(ranks, lambda bed: bed(kind, build=build, shard=shard).train(objective=objective), bed)


@pytest.mark.parametrize("where", ["one unit", "two units"])
def test_tied_embedding(bed: Any, ranks: int, where: str) -> None:
    def shard(model: Any, mesh: Any) -> None:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        if where == "two units":
            fully_shard(model.embed, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert model.head.weight is model.embed.weight

    def body(bed: Any) -> None:
        it = bed(build=lambda: bed.Net(tied=True), shard=shard)
        it.train()
        assert it.model.head.weight is it.model.embed.weight

    run_ranks(ranks, body, bed)


@pytest.mark.parametrize("first", ["embed", "head"])
def test_tied_across_units_of_any_order(bed: Any, ranks: int, first: str) -> None:
    """Whichever of the two is sharded first owns the weight; here both are units of their own."""

    def shard(model: Any, mesh: Any) -> None:
        for name in (first, "head" if first == "embed" else "embed"):
            fully_shard(getattr(model, name), mesh=mesh)
        bed.shard_blocks(model, mesh)

    run_ranks(ranks, lambda bed: bed(build=lambda: bed.Net(tied=True), shard=shard).train(5), bed)


def test_frozen_layers_and_unfreezing(bed: Any, ranks: int) -> None:
    """A frozen embedding, a frozen matrix in a trained unit, a frozen unit; the latter two are trained later."""

    def freeze(model: Any) -> None:
        model.embed.requires_grad_(False)
        model.blocks[0].up.weight.requires_grad_(False)
        model.blocks[1].requires_grad_(False)

    def body(bed: Any) -> None:
        it = bed(prepare=freeze)
        it.train(4)
        for model in (it.dense, it.model):
            model.blocks[1].requires_grad_(True)
            model.blocks[0].up.weight.requires_grad_(True)
        it.train(4, first=4)
        for model in (it.dense, it.model):
            model.blocks[2].requires_grad_(False)
            model.head.weight.requires_grad_(False)
        it.train(2, first=8)

    run_ranks(ranks, body, bed)


def test_adapters_beside_frozen_matrices(bed: Any, ranks: int) -> None:
    """The frozen matrix's backward runs after all trained parameters of the unit have their gradients (LoRA)."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(6, 6)
            self.base.requires_grad_(False)
            self.down = nn.Linear(6, 2, bias=False)
            self.up = nn.Linear(2, 6, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.base(x) + self.up(self.down(x)))

    def build() -> nn.Module:
        net = bed.Net(blocks=0)
        net.blocks = nn.ModuleList(Adapted() for _ in range(3))
        return net

    run_ranks(ranks, lambda bed: bed(build=build).train(), bed)


def test_a_frozen_model_over_a_trained_input(bed: Any, ranks: int) -> None:
    """Prompt tuning: units without gradients of their own are gathered for the backward, and freed in it."""

    def body(bed: Any) -> None:
        it = bed(prepare=lambda model: [block.requires_grad_(False) for block in model.blocks])
        it.train(5)
        assert not it.held_whole()

    run_ranks(ranks, body, bed)


@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_replicated_and_ignored_parameters(bed: Any, ranks: int, kind: str) -> None:
    """Replicated ones have a plain gradient that is averaged; ignored ones are left alone, here frozen."""

    def shard(model: Any, mesh: Any) -> None:
        model.head.weight.requires_grad_(False)
        norms = [one for name, one in model.named_parameters() if "norm" in name]
        bed.shard_blocks(model, mesh, replicate_params=norms, ignored_params=[model.head.weight])
        assert type(model.head.weight) is nn.Parameter
        assert model.norm.weight is norms[-2]

    def body(bed: Any) -> None:
        it = bed(kind, prepare=lambda model: model.head.weight.requires_grad_(False), shard=shard)
        it.optimize(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        it.train()

    run_ranks(ranks, body, bed)


def test_a_unit_of_replicated_parameters_only(bed: Any, ranks: int) -> None:
    def shard(model: Any, mesh: Any) -> None:
        fully_shard(model.blocks[1], mesh=mesh, replicate_params=list(model.blocks[1].parameters()))
        fully_shard(model, mesh=mesh)

    def body(bed: Any) -> None:
        it = bed(shard=shard)
        it.optimize(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        it.train(5)

    run_ranks(ranks, body, bed)


@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_cpu_offload(bed: Any, ranks: int, kind: str) -> None:
    """Shards on the host: on a CPU that is refused, so the refusal is taken out; the copies run all the same."""

    def body(bed: Any) -> None:
        import importlib

        module = importlib.import_module("hp_fsdp.sharding")
        refusal, module._offload = module._offload, lambda policy, data: policy
        try:
            it = bed(kind, offload_policy=CPUOffloadPolicy())
        finally:
            module._offload = refusal
        it.train()

    run_ranks(ranks, body, bed)


def test_a_list_of_modules_makes_one_unit(bed: Any, ranks: int) -> None:
    def shard(model: Any, mesh: Any) -> None:
        fully_shard([model.norm, model.head], mesh=mesh)
        fully_shard([model.blocks[0], model.blocks[1]], mesh=mesh)
        fully_shard(model, mesh=mesh)

    run_ranks(ranks, lambda bed: bed(shard=shard).train(), bed)


@FOUR
def test_averaged_or_added_and_scaled(bed: Any, ranks: int) -> None:
    def body(bed: Any) -> None:
        it = bed("hsdp")
        it.model.set_reduce_op_type("sum")
        it.model.set_gradient_scaling_factor(0.125)
        it.dense_backward(share=0.125 * it.size)
        bed.loss_of(it.model, it.rank, 0).backward()
        it.check_gradients()

    run_ranks(ranks, body, bed)
