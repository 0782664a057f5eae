"""Cells built without memory, laid out, and filled piece by piece: equal values in every layout and in one process."""

from __future__ import annotations

import threading
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common.initializer import Normal, TruncatedNormal, initializer

from hp_core import (
    ColwiseParallel,
    DTensor,
    Replicate,
    RowwiseParallel,
    init_device_mesh,
    init_empty_weights,
    init_on_device,
    init_parameters,
    manual_seed,
    parallelize_module,
    record_collectives,
    shard_module,
)
from hp_core.errors import PlanError, PlatformError
from hp_core.testing import run_ranks


class Model(nn.Cell):
    """An embedding tied to the head, a norm, layers with initializers of all kinds, a buffer, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm((8,))
        self.up = nn.Dense(8, 12, weight_init=Normal(0.5), bias_init="ones")
        self.down = mint.nn.Linear(12, 8)
        self.head = nn.Dense(8, 11, has_bias=False)
        self.head.weight = self.embed.embedding_table
        self.gain = Parameter(Tensor(np.full(8, 3.0, np.float32)), name="gain")
        self.register_buffer("scale", Tensor(np.full(8, 2.0, np.float32)))

    def reset_parameters(self) -> None:
        self.gain.set_data(initializer("ones", (8,), ms.float32))

    def construct(self, ids: Any) -> Any:
        x = self.norm(self.embed(ids)) * self.scale * self.gain
        return self.head(x + self.down(ops.relu(self.up(x))))


PLAN = {
    "embed": RowwiseParallel(input_layouts=Replicate()),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


def _values(cell: nn.Cell) -> dict[str, Any]:
    found = {}
    for path, part in cell.cells_and_names():
        for name in part._params:
            value = getattr(part, name)
            found[f"{path}.{name}"] = (value.full_tensor() if isinstance(value, DTensor) else value).asnumpy().tolist()
    return found


# -- building -------------------------------------------------------------------------------------------------------


def test_parameters_have_no_memory_and_buffers_are_real() -> None:
    with init_empty_weights():
        model = Model()
    assert all(parameter.is_meta for parameter in model.get_parameters())
    assert model.head.weight is model.embed.embedding_table
    assert "embed.embedding_table" in [parameter.name for parameter in model.get_parameters()]
    assert model.scale.asnumpy().tolist() == [2.0] * 8
    with init_empty_weights(include_buffers=True):
        assert Model().scale.is_meta
    assert not any(parameter.is_meta or parameter.has_init for parameter in Model().get_parameters())


def test_contexts_nest_and_end_with_an_exception() -> None:
    with init_empty_weights():
        with init_on_device("cpu"):
            inner = nn.Dense(2, 2)
        outer = nn.Dense(2, 2)
    assert not inner.weight.is_meta
    assert inner.weight.asnumpy().shape == (2, 2)
    assert outer.weight.is_meta
    with pytest.raises(KeyError), init_empty_weights():
        raise KeyError
    assert not nn.Dense(2, 2).weight.is_meta
    with pytest.raises(PlatformError, match="set_device"), init_on_device("cuda"):
        pass


def test_other_threads_build_as_before() -> None:
    found: list[Any] = []
    with init_empty_weights():
        thread = threading.Thread(target=lambda: found.append(nn.Dense(2, 2).weight))
        thread.start()
        thread.join()
    assert not found[0].is_meta
    assert found[0].asnumpy().shape == (2, 2)


# -- filling --------------------------------------------------------------------------------------------------------


def _filled(ranks: int, how: str) -> dict[str, Any]:
    manual_seed(5)
    with init_empty_weights():
        model = Model()
    with record_collectives() as log:
        if how == "styles":
            parallelize_module(model, init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",)), PLAN)
        elif how == "plan":
            mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "tp"))
            shard_module(model, mesh, {"*.weight": (("tp", "dp"),), "embed.embedding_table": (("tp", "dp"),)})
        assert init_parameters(model) is model
    assert not log, log.summary()
    assert model.head._params["weight"] is model.embed._params["embedding_table"]
    parameters = list(model.get_parameters())
    assert all(parameter.requires_grad and not parameter.is_meta for parameter in parameters)
    names = [parameter.name for parameter in parameters]
    assert len(set(names)) == len(names)
    assert "down.weight" in names
    assert how == "plain" or isinstance(model.up.weight, DTensor)
    return _values(model)


def test_values_do_not_depend_on_the_layout_or_the_world() -> None:
    dense = _filled(0, "plain")
    assert dense["norm.gamma"] == [1.0] * 8
    assert dense["up.bias"] == [1.0] * 12
    assert dense[".gain"] == [1.0] * 8
    assert 0.3 < np.std(dense["up.weight"]) < 0.7
    bound = np.abs(dense["down.weight"]).max()
    assert 12**-0.5 / 2 < bound <= 12**-0.5 * 1.0001  # He's for a slope of sqrt(5), of the global fan
    for ranks, how in ((1, "styles"), (2, "styles"), (2, "plan"), (4, "plan")):
        assert all(result == dense for result in run_ranks(ranks, _filled, ranks, how)), (ranks, how)


def test_what_nothing_fills_is_named() -> None:
    class Bare(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.own = Parameter(Tensor(np.ones(3, np.float32)))

    with init_empty_weights():
        cell = Bare()
    with pytest.raises(PlanError, match="nothing gives values to own"):
        init_parameters(cell)
    assert cell.own.is_meta
    init_parameters(cell, init_fn=lambda it: it.own.set_data(Tensor(np.arange(3, dtype=np.float32))))
    assert cell.own.asnumpy().tolist() == [0.0, 1.0, 2.0]


def test_an_initializer_that_needs_the_whole_tensor_is_refused() -> None:
    with init_empty_weights():
        cell = nn.Dense(2, 2, weight_init=TruncatedNormal())
    with pytest.raises(PlanError, match=r"TruncatedNormal\(\) can't be drawn piece by piece; these can: Constant"):
        init_parameters(cell)
