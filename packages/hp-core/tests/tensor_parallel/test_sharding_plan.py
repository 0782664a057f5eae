"""`shard_module`: layouts of parameters, inputs and outputs by name; equal to the dense module, or refused with near names."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from hp_core import (
    DTensor,
    Layout,
    Replicate,
    Shard,
    ShardingPlan,
    distribute_tensor,
    init_device_mesh,
    record_collectives,
    shard_module,
)
from hp_core.errors import HyperParallelError, LayoutError, PlanError
from hp_core.testing import assert_same_error, run_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)
        self.register_buffer("scale", torch.linspace(1, 2, 4))

    def forward(self, x: Any, *, bias: Any = None) -> Any:
        y = self.down(self.up(x).relu()) * self.scale
        return y if bias is None else y + bias


class Both(NamedTuple):
    logits: Any
    hidden: Any


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Any, bias: Any = None) -> Both:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, bias=bias)
        return Both(self.head(x), x)


def plan_for(axes: int) -> ShardingPlan:
    batch = ("dp",) if axes == 2 else ()
    return ShardingPlan(
        plan={
            "embed.weight": ("tp",),
            "blocks.*.up.*": ("tp",),
            "blocks.*.down.weight": (None, "tp"),
        },
        input_plan={"": {"ids": batch, "bias": ()}},
        output_plan={"blocks.*": batch, "": [(*batch, None, "tp") if axes == 2 else (None, None, "tp"), None]},
    )


def mesh_of(ranks: int) -> Any:
    shape, names = ((2, 2), ("dp", "tp")) if ranks == 4 else ((ranks,), ("tp",))
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def pair() -> tuple[Model, Model]:
    torch.manual_seed(0)
    model, dense = Model().double(), Model().double()
    dense.load_state_dict(model.state_dict())
    return model, dense


IDS = torch.tensor([[0, 6, 3], [1, 1, 5], [2, 4, 0], [5, 5, 6]])


def compare(ranks: int, keyword: bool) -> None:
    mesh = mesh_of(ranks)
    model, dense = pair()
    assert shard_module(model, mesh, plan_for(mesh.ndim)) is model
    layout = Layout.from_device_mesh(mesh)
    assert model.embed.weight is model.head.weight
    assert model.embed.weight.layout is layout("tp")
    assert model.blocks[1].up.bias.layout is layout("tp")
    assert model.blocks[0].down.bias.layout is layout()
    bias = torch.ones(4, dtype=torch.float64, requires_grad=True)
    dense_bias = bias.detach().clone().requires_grad_()
    # plain tensors are the global values, passed by position or by name
    result = model(ids=IDS, bias=bias) if keyword else model(IDS, bias)
    expected = dense(IDS, dense_bias)
    assert isinstance(result, Both)
    assert result.logits.layout is layout("dp", None, "tp") if mesh.ndim == 2 else layout(None, None, "tp")
    torch.testing.assert_close(result.logits.full_tensor(), expected.logits)
    result.logits.square().sum().backward()
    expected.logits.square().sum().backward()
    for (name, parameter), other in zip(model.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), other.grad, msg=name)
    torch.testing.assert_close(bias.grad, dense_bias.grad)


@pytest.mark.parametrize(("ranks", "keyword"), [(1, False), (2, False), (2, True), (4, True)])
def test_a_sharded_module_equals_the_dense_one(ranks: int, keyword: bool) -> None:
    run_ranks(ranks, compare, ranks, keyword)


def without_a_world() -> None:
    model, dense = pair()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    assert shard_module(model, mesh, plan_for(1)) is model
    torch.testing.assert_close(model(IDS).logits.full_tensor(), dense(IDS).logits)


def test_one_process_needs_no_world() -> None:
    run_ranks(1, without_a_world, init=False)


def local_outputs() -> None:
    mesh = mesh_of(2)
    model, dense = pair()
    plan = ShardingPlan({"*.weight": [Shard(0)]}, return_local_tensor=["blocks.1", "head"], input_plan={"head": ()})
    shard_module(model, mesh, plan)
    result = model(distribute_tensor(IDS, mesh, [Replicate()]))
    expected = dense(IDS)
    rows = slice(0, 4) if mesh.get_local_rank("tp") == 0 else slice(4, 7)
    assert type(result.hidden) is torch.Tensor
    assert type(result.logits) is torch.Tensor
    torch.testing.assert_close(result.hidden, expected.hidden)
    torch.testing.assert_close(result.logits, expected.logits[..., rows])


def test_outputs_may_become_plain() -> None:
    run_ranks(2, local_outputs)


class Mapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Any, **more: Any) -> dict[str, Any]:
        return {"y": self.linear(x), "more": more}


def mappings() -> None:
    mesh = mesh_of(2)
    layout = Layout.from_device_mesh(mesh)
    plan = ShardingPlan(input_plan={"": {"extra": ("tp",)}}, output_plan={"": {"y": ("tp",)}})
    module = shard_module(Mapping(), mesh, plan)
    result = module(distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]), extra=torch.ones(2), count=3)
    assert result["y"].layout is layout("tp")
    assert result["more"]["extra"].layout is layout("tp")
    assert result["more"]["count"] == 3


def test_inputs_and_outputs_by_name() -> None:
    run_ranks(2, mappings)


def buffers() -> None:
    mesh = mesh_of(2)
    block = shard_module(Block().double(), mesh, ShardingPlan())
    memory = block.scale.data_ptr()
    x = torch.ones(2, 4, dtype=torch.float64)
    block(distribute_tensor(x, mesh, [Shard(0)]))
    assert isinstance(block.scale, DTensor)
    assert block.scale.to_local().data_ptr() == memory
    block.up.forward = lambda x: torch.ones(2, 6)  # type: ignore[method-assign]
    block.down.forward = lambda x: torch.ones(2, 4)  # type: ignore[method-assign]
    assert type(block(x)) is torch.Tensor
    assert type(block.scale) is torch.Tensor
    assert block.scale.data_ptr() == memory


def test_buffers_follow_the_inputs() -> None:
    run_ranks(2, buffers)


def one_collective() -> None:
    mesh = mesh_of(2)
    plan = ShardingPlan({"up.*": ("tp",), "down.weight": (None, "tp")}, output_plan={"down": ()})
    block = shard_module(Block().double(), mesh, plan)
    x = distribute_tensor(torch.ones(2, 4, dtype=torch.float64), mesh, [Replicate()])
    with record_collectives() as log:
        block(x)
    assert [record.kind for record in log] == ["all_reduce"]


def test_the_output_of_a_row_wise_layer_is_reduced_once() -> None:
    run_ranks(2, one_collective)


def test_a_plan_is_a_value() -> None:
    plan = ShardingPlan({"weight": [Shard(0)]}, output_plan={"": ("tp",)}, return_local_tensor=("head",))
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert plan != ShardingPlan()
    assert "Shard(dim=0)" in repr(plan)


WRONG: dict[str, tuple[Any, type[HyperParallelError], str]] = {
    "parameter": (
        {"blocks.*.upp.weight": ("tp",)},
        PlanError,
        r"matches no parameter of Model; near names: .*up\.weight",
    ),
    "input": (
        ShardingPlan(input_plan={"blocks.7": ()}),
        PlanError,
        r"input_plan\['blocks\.7'\].*near names: .*blocks\.0",
    ),
    "output": (ShardingPlan(output_plan={"heat": ()}), PlanError, r"output_plan\['heat'\].*near names: .*head"),
    "local": (ShardingPlan(return_local_tensor=["hed"]), PlanError, r"return_local_tensor\['hed'\].*near names: head"),
    "twice": ({"embed.*": ("tp",), "embed.weight": ("tp",)}, PlanError, "'embed.weight' is matched by 'embed.*' and"),
    "submodule twice": (
        ShardingPlan(output_plan={"blocks.*": (), "blocks.0": ()}),
        PlanError,
        "'blocks.0' is matched by",
    ),
    "tied": (
        {"embed.weight": ("tp",), "head.weight": (None, "tp")},
        PlanError,
        "'head.weight' is tied to 'embed.weight'.*can't be",
    ),
    "axis": ({"embed.weight": ("ep",)}, LayoutError, "no mesh axis 'ep'"),
    "dims": ({"blocks.*.up.bias": (None, "tp")}, LayoutError, "only 1 dims"),
    "no layout": ({"embed.weight": "tp"}, LayoutError, "'tp' is no layout"),
    "name": (
        ShardingPlan(input_plan={"head": {"x": ()}}),
        PlanError,
        r"names \['x'\], but Linear\.forward has \['input'\]",
    ),
}


@pytest.mark.parametrize("which", WRONG)
def test_a_wrong_plan_is_refused_alike_and_changes_nothing(which: str) -> None:
    plan, error, match = WRONG[which]

    def refused() -> None:
        model = Model()
        try:
            shard_module(model, mesh_of(2), plan)
        finally:
            assert not any(isinstance(value, DTensor) for value in model.state_dict().values())

    assert_same_error(2, refused, error, match)


CALLS: dict[str, tuple[Any, str]] = {
    "inputs": (ShardingPlan(input_plan={"": [(), ()]}), "tells of 2 positional inputs, but .* called with 1"),
    "outputs": (ShardingPlan(output_plan={"": [(), (), ()]}), "tells of 3 outputs, but the module gave 2"),
    "one output": (ShardingPlan(output_plan={"head": [(), ()]}), "tells of 2 outputs, but the module gave one"),
    "mapping": (
        ShardingPlan(output_plan={"head": {"y": ()}}),
        "names the outputs .*'y'.*, but the module gave DTensor",
    ),
}


@pytest.mark.parametrize("which", CALLS)
def test_a_plan_that_does_not_fit_the_call_is_refused_alike(which: str) -> None:
    plan, match = CALLS[which]

    def refused() -> None:
        mesh = mesh_of(2)
        shard_module(Model(), mesh, plan)(distribute_tensor(IDS, mesh, [Replicate()]))

    assert_same_error(2, refused, PlanError, match)
