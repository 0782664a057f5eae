"""Faults that users of other libraries have reported in public, by number. Others stand beside what they concern: 30, 31 and 33
in `test_accumulation`, 40, 101, 102 and 104 in `test_state`, 57 to 62 in `test_clip`, 105 to 109 in `optim`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hp_core import init_device_mesh, init_empty_weights, record_collectives
from hp_core.testing import run_ranks
from hp_fsdp import MixedPrecisionPolicy, fully_shard


def data_parallel() -> Any:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("dp",))


class Tied(nn.Module):
    """An embedding of five words, and a head that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embed(tokens)))  # type: ignore[no-any-return]


def step_equals_dense(model: nn.Module, dense: nn.Module, x: torch.Tensor) -> None:
    """One step of SGD; all ranks have the same rows."""
    for one in (model, dense):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        one(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for (name, got), expected in zip(model.named_parameters(), dense.parameters(), strict=True):
        whole = got.detach().full_tensor() if hasattr(got, "full_tensor") else got.detach()
        torch.testing.assert_close(
            whole, expected.detach(), rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_24_rows_of_a_tied_embedding_of_uneven_vocabulary_are_all_updated() -> None:
    def body(make: Any, step: Any, mesh: Any) -> None:
        torch.manual_seed(0)
        dense = make()
        model = make()
        model.load_state_dict(dense.state_dict())
        fully_shard(model, mesh=mesh(), shard_granularity=lambda name, parameter: "row")
        before = dense.embed.weight.detach().clone()
        step(model, dense, torch.arange(5))
        assert (dense.embed.weight != before).any(1).all()

    run_ranks(4, body, Tied, step_equals_dense, data_parallel)


def test_25_a_weight_tied_across_two_units_has_one_owner_and_one_gradient() -> None:
    def body(make: Any, step: Any, mesh: Any) -> None:
        torch.manual_seed(0)
        dense, model = make(), make()
        model.load_state_dict(dense.state_dict())
        fully_shard(model.embed, mesh=mesh())
        fully_shard(model, mesh=mesh())
        for _ in range(3):
            step(model, dense, torch.arange(5))
        assert model.head.weight is model.embed.weight

    run_ranks(2, body, Tied, step_equals_dense, data_parallel)


def test_26_what_was_tied_is_tied_after_to_empty_and_loading() -> None:
    def body(make: Any, step: Any, mesh: Any) -> None:
        torch.manual_seed(0)
        dense = make()
        with init_empty_weights():
            model = make()
        fully_shard(model, mesh=mesh())
        model.to_empty(device="cpu")
        model.load_state_dict(dense.state_dict())
        step(model, dense, torch.arange(5))
        assert model.head.weight is model.embed.weight

    run_ranks(2, body, Tied, step_equals_dense, data_parallel)


def test_27_unfreezing_under_mixed_precision_reduces_in_float32() -> None:
    def body(mesh: Any) -> None:
        torch.manual_seed(0)
        layer = nn.Linear(4, 4)
        layer.requires_grad_(False)
        fully_shard(layer, mesh=mesh(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        x = torch.randn(3, 4)
        layer(x)
        layer.requires_grad_(True)
        with record_collectives() as log:
            layer(x).float().sum().backward()
        assert [record.dtype for record in log if record.kind == "reduce_scatter"] == ["float32"]
        assert layer.weight.grad.dtype == torch.float32
        expected = x.bfloat16().float().sum(0).expand(4, 4)
        torch.testing.assert_close(layer.weight.grad.full_tensor(), expected, rtol=1e-2, atol=1e-2)

    run_ranks(2, body, data_parallel)


def test_34_a_frozen_module_that_ignores_an_input_that_needs_a_gradient() -> None:
    def body(mesh: Any) -> None:
        class Ignores(nn.Linear):
            def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
                return super().forward(x)

        layer = Ignores(4, 4)
        layer.requires_grad_(False)
        fully_shard(layer, mesh=mesh())
        x, unused = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
        for _ in range(2):
            layer(x, unused).sum().backward()
        assert x.grad is not None
        assert unused.grad is None

    run_ranks(2, body, data_parallel)


def test_35_a_frozen_layer_stays_frozen() -> None:
    def body(mesh: Any) -> None:
        layer = nn.Linear(4, 4)
        layer.requires_grad_(False)
        fully_shard(layer, mesh=mesh())
        layer(torch.randn(2, 4, requires_grad=True)).sum().backward()
        layer.unshard()
        assert not any(parameter.requires_grad for parameter in layer.parameters())
        layer.requires_grad_(False)
        layer.reshard()
        assert not any(parameter.requires_grad for parameter in layer.parameters())
        assert all(parameter.grad is None for parameter in layer.parameters())

    run_ranks(2, body, data_parallel)


def test_37_frozen_parameters_in_a_unit_are_not_reduced() -> None:
    def body(mesh: Any) -> None:
        layer = nn.Linear(64, 64)
        layer.weight.requires_grad_(False)
        fully_shard(layer, mesh=mesh())
        with record_collectives() as log:
            layer(torch.randn(2, 64)).sum().backward()
        [reduction] = [record for record in log if record.kind == "reduce_scatter"]
        assert reduction.nbytes == 64 * 4 // 2  # the bias alone: half of it to the other rank
        assert layer.weight.grad is None
        assert layer.bias.grad is not None

    run_ranks(2, body, data_parallel)


def test_39_kept_parameters_are_gathered_once_under_recomputation() -> None:
    def body(mesh: Any, run: Any) -> None:
        layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        for layer in layers:
            fully_shard(layer, mesh=mesh(), reshard_after_forward=False)
        fully_shard(layers, mesh=mesh())
        x = torch.randn(2, 4, requires_grad=True)

        def step() -> None:
            y = x
            for layer in layers:
                y = run(layer, y, use_reentrant=False)
            y.sum().backward()

        step()
        with record_collectives() as log:
            step()
        assert sum(record.kind == "all_gather" for record in log) == 3
        assert sum(record.kind == "reduce_scatter" for record in log) == 3

    run_ranks(2, body, data_parallel, checkpoint)


def test_42_only_floating_point_inputs_are_cast_and_containers_keep_their_structure() -> None:
    def body(mesh: Any) -> None:
        seen = {}

        class Looks(nn.Linear):
            def forward(self, batch: Any, *, scale: Any = None) -> torch.Tensor:  # type: ignore[override]
                seen.update(batch=batch, scale=scale)
                return super().forward(batch["features"][0])

        layer = fully_shard(
            Looks(4, 4), mesh=mesh(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
        )
        output = layer(
            {"features": [torch.randn(2, 4)], "ids": torch.arange(2), "name": "x"}, scale=(torch.ones(1), None)
        )
        assert seen["batch"]["features"][0].dtype == torch.bfloat16
        assert seen["batch"]["ids"].dtype == torch.int64
        assert seen["batch"]["name"] == "x"
        assert isinstance(seen["batch"]["features"], list)
        assert seen["scale"][0].dtype == torch.bfloat16
        assert seen["scale"][1] is None
        assert output.dtype == torch.float32

    run_ranks(2, body, data_parallel)


def test_43_an_embedding_is_not_gathered_for_its_backward() -> None:
    def body(mesh: Any) -> None:
        model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4))
        for one in model:
            fully_shard(one, mesh=mesh())
        fully_shard(model, mesh=mesh())
        tokens = torch.tensor([1, 6, 3])
        model(tokens).sum().backward()
        with record_collectives() as forward:
            loss = model(tokens).sum()
        with record_collectives() as backward:
            loss.backward()
        assert sum(record.kind == "all_gather" for record in forward) == 2
        assert sum(record.kind == "all_gather" for record in backward) == 0
        assert sum(record.kind == "reduce_scatter" for record in backward) == 2

    run_ranks(2, body, data_parallel)
