"""Models built without memory, laid out, and filled piece by piece: equal values in every layout and in one process."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hp_core import (
    ColwiseParallel,
    DTensor,
    Layout,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    init_device_mesh,
    init_empty_weights,
    init_on_device,
    init_parameters,
    manual_seed,
    parallelize_module,
    record_collectives,
    shard_module,
)
from hp_core.errors import PlanError
from hp_core.testing import assert_same_error, run_ranks


class Model(nn.Module):
    """An embedding tied to the head, norms, a buffer, and a parameter of its own class's making."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=9)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.batch = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((8,), 2.0))

    def forward(self, ids: Any) -> Any:
        x = self.norm(self.embed(ids)) * self.scale
        return self.head(x + self.down(self.up(x).relu()))


PLAN = {
    "embed": RowwiseParallel(input_layouts=Replicate()),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


def values(module: nn.Module) -> dict[str, Any]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().tolist()
        for name, value in module.state_dict().items()
    }


# -- building -------------------------------------------------------------------------------------------------------


def test_parameters_have_no_memory_and_buffers_are_real() -> None:
    with init_empty_weights():
        model = Model()
    assert all(parameter.is_meta and isinstance(parameter, nn.Parameter) for parameter in model.parameters())
    assert model.head.weight is model.embed.weight
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert torch.equal(model.scale, torch.full((8,), 2.0))
    with init_empty_weights(include_buffers=True):
        assert all(tensor.is_meta for tensor in Model().state_dict().values())
    assert not Model().embed.weight.is_meta


def test_contexts_nest_and_the_innermost_wins() -> None:
    with init_empty_weights():
        with init_on_device("cpu"):
            inner = nn.Linear(2, 2)
        with init_empty_weights(include_buffers=True):
            norm = nn.BatchNorm1d(2)
        outer = nn.BatchNorm1d(2)
    assert not inner.weight.is_meta
    assert norm.running_mean.is_meta
    assert outer.weight.is_meta
    assert not outer.running_mean.is_meta


def test_an_exception_ends_the_context() -> None:
    def fail() -> None:
        with init_empty_weights():
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert not nn.Linear(2, 2).weight.is_meta


def test_other_threads_build_as_before() -> None:
    found: list[bool] = []
    with init_empty_weights():
        thread = threading.Thread(target=lambda: found.append(nn.Linear(2, 2).weight.is_meta))
        thread.start()
        thread.join()
    assert found == [False]


def test_one_tensor_registered_under_two_names_stays_one() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = nn.Parameter(torch.empty(3), requires_grad=False)
            weight.note = "kept"  # type: ignore[attr-defined]
            self.first = weight
            self.second = weight

    with init_empty_weights():
        module = Twice()
    assert module.first is module.second
    assert not module.first.requires_grad
    assert module.first.note == "kept"  # type: ignore[attr-defined]


# -- filling --------------------------------------------------------------------------------------------------------


def filled(ranks: int, how: str) -> dict[str, Any]:
    manual_seed(5)
    with init_empty_weights(include_buffers=True):
        model = Model()
    model.register_buffer("scale", torch.full((8,), 2.0))
    with record_collectives() as log:
        if how == "styles":
            parallelize_module(model, init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",)), PLAN)
        elif how == "plan":
            mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "tp"))
            shard_module(model, mesh, {"*.weight": (("tp", "dp"),), "down.bias": ("dp",)})
        assert init_parameters(model) is model
    assert not log, log.summary()
    assert model.head.weight is model.embed.weight
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in model.parameters())
    assert how == "plain" or isinstance(model.up.weight, DTensor)
    assert isinstance(model.up.weight, nn.Parameter)
    return values(model)


def test_values_do_not_depend_on_the_layout_or_the_world() -> None:
    """Public report case 114: tp=1 and tp=2 start from bit-equal weights."""
    dense = filled(0, "plain")
    assert dense["embed.weight"][9] == [0.0] * 8  # the padding row, wherever it lies
    assert dense["norm.weight"] == [1.0] * 8
    assert dense["batch.running_var"] == [1.0] * 8
    assert dense["up.weight"] != dense["down.weight"]
    bound = 1 / math.sqrt(8)
    assert bound / 2 < max(map(max, dense["up.weight"])) <= bound  # kaiming's, of the global fan
    for ranks, how in ((1, "styles"), (2, "styles"), (4, "styles"), (2, "plan"), (4, "plan")):
        assert all(result == dense for result in run_ranks(ranks, filled, ranks, how)), (ranks, how)


def tied() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with init_empty_weights():
        model = Model().double()
    parallelize_module(model, mesh, PLAN)
    init_parameters(model)
    reference = Model().double()
    reference.load_state_dict({name: torch.tensor(value, dtype=torch.float64) for name, value in values(model).items()})
    ids = torch.tensor([[0, 9, 3], [1, 1, 5]])
    model(ids).square().sum().backward()
    reference(ids).square().sum().backward()
    torch.testing.assert_close(model.embed.weight.grad.full_tensor(), reference.embed.weight.grad)
    assert model.head.weight.grad is not None


def test_tied_parameters_stay_tied_and_their_gradient_is_the_sum() -> None:
    """Public report case 26."""
    run_ranks(2, tied)


class Largest(TorchDispatchMode):
    """The number of bytes of the largest storage that an op makes."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if type(value) is torch.Tensor and not value.is_meta:
                self.nbytes = max(self.nbytes, value.untyped_storage().nbytes())
        return result


def memory(ranks: int) -> list[int]:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    with init_empty_weights():
        layer = nn.Linear(512, 1024, bias=False, dtype=torch.float32)
    with Largest() as largest:
        parallelize_module(layer, mesh, ColwiseParallel())
        init_parameters(layer)
    return [largest.nbytes, layer.weight.to_local().nbytes, layer.weight.nbytes]


def test_no_rank_ever_holds_a_whole_parameter() -> None:
    for most, shard, whole in run_ranks(4, memory, 4):
        assert shard == whole // 4
        assert shard <= most < whole, (most, shard, whole)


class Bare(nn.Module):
    """Nothing says how these are filled."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0))


def test_what_nothing_fills_is_named_and_the_module_is_left_as_it_was() -> None:
    with init_empty_weights(include_buffers=True):
        module = Bare()
    before = dict(module.named_parameters())
    with pytest.raises(PlanError, match=r"nothing gives values to gain, table:.*init_fn="):
        init_parameters(module)
    assert all(value is before[name] and value.is_meta for name, value in module.named_parameters())

    def fill(one: nn.Module) -> None:
        if isinstance(one, Bare):
            one.gain.fill_(3.0)
            one.table = torch.arange(4.0)

    init_parameters(module, init_fn=fill)
    assert module.gain.tolist() == [3.0] * 4
    assert module.table.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert module.linear.weight.abs().sum() > 0  # left to its own reset_parameters


def test_a_parameter_that_is_replaced_instead_of_filled_is_refused() -> None:
    with init_empty_weights():
        module = nn.Linear(2, 2)

    def replace(one: Any) -> None:
        one.weight = nn.Parameter(torch.ones(2, 2))

    with pytest.raises(PlanError, match="put another object in place of 'weight'"):
        init_parameters(module, init_fn=replace)
    assert module.weight.is_meta


def test_init_weights_of_a_module_above_comes_first_and_knows_its_children() -> None:
    class Top(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 3), Bare(), nn.Embedding(5, 3, padding_idx=2))

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.constant_(module.weight, 7.0)
            elif isinstance(module, Bare):
                module.gain.fill_(2.0)

    with init_empty_weights():
        top = Top()
    init_parameters(top)
    linear, bare, embedding = top.inner
    assert linear.weight.unique().tolist() == [7.0]
    assert linear.bias.abs().sum() > 0  # what it leaves out is the layer's own to fill, and nothing else
    assert bare.gain.tolist() == [2.0] * 4
    assert bare.linear.weight.unique().tolist() == [7.0]
    assert (
        embedding.weight.count_nonzero() == 4 * 3
    )  # left out as well: filled by its own method, but for the padding row


def test_what_has_memory_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    kept = model[0].weight
    before = kept.detach().clone()
    with init_empty_weights():
        model[1] = nn.Linear(2, 2)
    init_parameters(model)
    assert model[0].weight is kept
    assert torch.equal(kept.detach(), before)
    assert not model[1].weight.is_meta
    with init_empty_weights():
        assert not init_parameters(nn.Linear(2, 2)).weight.is_meta
    with torch.device("meta"), pytest.raises(PlanError, match="on the meta device"), init_empty_weights():
        init_parameters(nn.Linear(2, 2))


def loaded() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    dense = Model()
    with init_empty_weights():
        model = Model()
    with record_collectives() as log:
        x = distribute_tensor(torch.empty(6, 4, device="meta"), mesh, [Shard(0)])
        parallelize_module(model, mesh, PLAN)
        model.load_state_dict(dense.state_dict(), assign=True)
    assert not log, log.summary()
    assert x.is_meta
    assert tuple(x.to_local().shape) == (3, 4)
    assert model.up.weight.layout is Layout.from_device_mesh(mesh)("tp")
    assert torch.equal(model.up.weight.full_tensor(), dense.up.weight)


def test_a_meta_model_is_laid_out_and_loaded_without_communication() -> None:
    run_ranks(2, loaded)


def unfilled() -> None:
    with init_empty_weights():
        module = Bare()
    shard_module(module, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), {"gain": ("tp",)})
    init_parameters(module)


def test_ranks_refuse_alike() -> None:
    assert_same_error(2, unfilled, PlanError, "nothing gives values to gain")
