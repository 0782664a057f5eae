"""A DTensor is a tensor: metadata and Python's protocols mean the global one; modules, copies and files hold it."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

from hp_core import (
    DeviceMesh,
    DTensor,
    Layout,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    ShardingPlan,
    distribute_tensor,
    init_device_mesh,
    plan_redistribute,
)
from hp_core.errors import LayoutError, ShardingRuleError
from hp_core.testing import assert_same_error, record_collectives, run_ranks

VALUE = torch.arange(15, dtype=torch.float64).view(5, 3)


def mesh2(name: str = "tp") -> Any:
    return init_device_mesh("cpu", (2,), mesh_dim_names=(name,))


def lay(value: torch.Tensor, *placements: Any) -> Any:
    return distribute_tensor(value, mesh2(), placements, src_data_rank=None)


def metadata() -> None:
    for placement in (Replicate(), Shard(0), Shard(1)):
        x = lay(VALUE, placement)
        assert isinstance(x, torch.Tensor)
        assert isinstance(x, DTensor)
        assert isinstance(x.shape, torch.Size)
        assert x.shape == x.size() == (5, 3)
        assert (x.size(0), x.size(-1), x.ndim, x.dim(), x.ndimension()) == (5, 3, 2, 2, 2)
        assert x.numel() == x.nelement() == torch.numel(x) == 15
        assert x.stride() == (3, 1)
        assert x.stride(0) == 3
        assert x.is_contiguous()
        assert len(x) == 5
        assert (x.dtype, x.device.type, x.element_size(), x.nbytes) == (torch.float64, "cpu", 8, 120)
        assert x.is_floating_point()
        assert torch.is_tensor(x)
        assert not x.is_complex()
        assert x.layout is Layout.from_device_mesh(mesh2())(placement)
        assert x.placements == (placement,)
        assert x.device_mesh is mesh2()
        assert x.local_shape == x.layout.local_shape((5, 3)) == tuple(x.to_local().shape)
        assert not x.is_partial()
        square = lay(torch.ones(4, 6), placement)
        assert square.T.stride() == (1, 6)
        assert not square.T.is_contiguous()
        assert square.T.contiguous().is_contiguous()
        text = repr(x)
        assert "DTensor" in text
        assert "(5, 3)" in text
        assert "requires_grad" not in text
        assert str(x.layout) in text
        assert "requires_grad" in repr(x.requires_grad_())
    with pytest.raises(TypeError):
        len(lay(VALUE, Shard(0)).sum())


def test_metadata_is_global() -> None:
    run_ranks(2, metadata)


def values() -> None:
    x = lay(VALUE, Shard(0))
    total = x.sum()
    assert total.is_partial()
    assert total.item() == 105.0
    assert float(total) == 105.0
    assert int(total) == 105
    assert f"{total:.1f}" == "105.0"
    assert bool(total > 100)
    assert not (x.amax() > 100)
    assert x.tolist() == VALUE.tolist()
    assert [row.tolist() for row in x] == VALUE.tolist()
    assert [list(range(10))[lay(torch.tensor(3), Replicate())]] == [3]
    assert torch.is_nonzero(total)
    rows = list(x)
    assert len(rows) == 5
    assert all(isinstance(row, DTensor) for row in rows)
    assert torch.equal(x.full_tensor(), VALUE)
    assert torch.allclose(x, x + 1e-12)
    assert not torch.allclose(x, lay(VALUE, Shard(1)) + x)
    assert torch.equal(x, x)
    assert x.type() == "torch.DoubleTensor"
    assert x.type("torch.LongTensor").dtype is torch.int64
    with pytest.raises(LayoutError, match="full_tensor"):
        x.numpy()
    with pytest.raises(LayoutError, match="full_tensor"):
        np.asarray(x)
    for export in (torch.from_dlpack, np.from_dlpack):
        with pytest.raises(LayoutError, match="DLPack"):
            export(x)
    with pytest.raises(ValueError, match="does not support"):  # or it would write memory that isn't there
        safetensors.torch.save({"x": x})
    assert x.data_ptr() == 0
    with pytest.raises((RuntimeError, ValueError)):
        bool(x)


def test_values_are_global() -> None:
    run_ranks(2, values)


def parameter() -> None:
    weight = nn.Parameter(lay(VALUE, Shard(0)))
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, DTensor)
    assert weight.requires_grad
    assert weight.is_leaf
    assert weight.layout is Layout.from_device_mesh(mesh2())("tp")
    assert not nn.Parameter(lay(VALUE, Shard(0)), requires_grad=False).requires_grad
    layer = nn.Linear(3, 5, bias=False, dtype=torch.float64)
    layer.weight = weight
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    x = lay(VALUE, Replicate())
    layer(x).sum().backward()
    assert weight.grad.layout is weight.layout
    layer.zero_grad()
    assert weight.grad is None
    layer.requires_grad_(False)
    assert not weight.requires_grad
    layer.to(torch.bfloat16)
    assert layer.weight.dtype is torch.bfloat16
    assert layer.weight.layout is weight.layout
    assert layer.weight.to_local().dtype is torch.bfloat16
    assert isinstance(layer.weight, nn.Parameter)
    layer.double()
    assert layer.weight.dtype is torch.float64
    state = layer.state_dict()
    assert isinstance(state["weight"], DTensor)
    layer.load_state_dict({"weight": lay(VALUE * 2, Shard(0))})
    assert torch.equal(layer.weight.full_tensor().detach(), VALUE * 2)


def test_parameters_and_modules() -> None:
    run_ranks(2, parameter)


def copies() -> None:
    weight = nn.Parameter(lay(VALUE, Shard(0)))
    layer = nn.Linear(3, 5, bias=False, dtype=torch.float64)
    layer.weight = weight
    twin = copy.deepcopy(layer)
    assert isinstance(twin.weight, nn.Parameter)
    assert twin.weight is not weight
    assert twin.weight.layout is weight.layout
    with torch.no_grad():
        twin.weight.add_(1)
    assert torch.equal(weight.full_tensor().detach(), VALUE)
    assert torch.equal(twin.weight.full_tensor().detach(), VALUE + 1)
    tied = nn.ModuleList([layer, layer])
    assert len(list(copy.deepcopy(tied).parameters())) == 1
    with pytest.raises(RuntimeError, match="deep-copied"):
        copy.deepcopy(weight * 2)
    assert torch.equal(copy.copy(weight).full_tensor().detach(), VALUE)


def test_deep_copies() -> None:
    run_ranks(2, copies)


def saved() -> bytes:
    weight = nn.Parameter(lay(VALUE, Shard(0)))
    again = pickle.loads(pickle.dumps(weight))
    assert isinstance(again, nn.Parameter)
    assert again.layout is weight.layout
    assert again.requires_grad
    assert torch.equal(again.to_local(), weight.to_local())
    uneven = lay(VALUE, RaggedShard((4, 1)))
    for weights_only in (False, True):  # the file has this rank's piece, and says so
        buffer = io.BytesIO()
        torch.save({"x": weight.detach(), "weight": weight, "uneven": uneven}, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=weights_only)
        assert isinstance(loaded["weight"], nn.Parameter)
        for name, tensor in (("x", weight), ("weight", weight), ("uneven", uneven)):
            assert loaded[name].layout is tensor.layout
            assert loaded[name].shape == (5, 3)
            assert torch.equal(loaded[name].to_local(), tensor.to_local())
    return pickle.dumps(weight)


def load(pickled: bytes) -> None:
    pickle.loads(pickled)


def values_of_the_design() -> list[Any]:
    base = Layout((2, 2), ("dp", "tp"), (3, 1, 2, 0))
    return [
        base.mesh,
        base,
        base(("tp", "dp"), None),
        base(Shard(1), Partial("max")),
        Layout((2,), ("tp",))(RaggedShard((3, 0))),
        [Shard(-1), Replicate(), Partial("avg"), RaggedShard((1, 2))],
        ShardingPlan({"*.weight": base("tp")}, output_plan={"": [Shard(0)]}),
        plan_redistribute(base("tp"), base(), (8, 4), 4),
    ]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_values_survive_pickling(protocol: int) -> None:
    for value in values_of_the_design():
        again = pickle.loads(pickle.dumps(value, protocol))
        assert again == value
        assert copy.deepcopy(value) == value
        if isinstance(value, (Layout, DeviceMesh)):
            assert again is value
            assert copy.deepcopy(value) is value


SPAWNED = """
import pickle, sys
import torch.multiprocessing

def child(queue, value):
    layout, tensor = value
    queue.put((repr(layout), tensor.layout is layout, tensor.to_local().tolist()))

if __name__ == "__main__":
    import torch
    from hp_core import Layout, distribute_tensor
    layout = Layout((1,), ("tp",))("tp")
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue, (layout, distribute_tensor(torch.arange(3.0), layout))))
    process.start()
    print(queue.get())
    process.join()
    sys.exit(process.exitcode)
"""


def test_layouts_and_tensors_reach_a_spawned_process(tmp_path: Path) -> None:
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "('Layout[tp=1](tp)', True, [0.0, 1.0, 2.0])"


def test_reprs_say_what_a_person_asks() -> None:
    base = Layout((2, 4), ("dp", "tp"))
    assert repr(base) == "Layout[dp=2, tp=4] replicated"
    assert repr(base(("tp", "dp"), None, None)) == "Layout[dp=2, tp=4](tp*dp)"
    assert repr(base(None, "dp")) == "Layout[dp=2, tp=4](-, dp)"
    assert repr(base(Partial(), Partial())) == "Layout[dp=2, tp=4] P(sum):dp P(sum):tp"
    assert repr(base(Shard(0), Partial("avg"))) == "Layout[dp=2, tp=4](dp) P(avg):tp"
    assert repr(Layout((2,), ("ep",))(RaggedShard((3, 0)))) == "Layout[ep=2](ep) ragged(3, 0)"
    assert repr(base.mesh) == "DeviceMesh(dp=2, tp=4)"
    assert repr(Layout((2,), ("tp",), (5, 3)).mesh) == "DeviceMesh(tp=2, ranks=[5, 3])"
    one = distribute_tensor(torch.arange(4.0).view(2, 2), Layout((1,), ("tp",))("tp"))
    assert repr(one) == (
        "DTensor(shape=(2, 2), Layout[tp=1](tp),\n  local=tensor([[0., 1.],\n                [2., 3.]]))"
    )
    weight = nn.Parameter(one)
    assert repr(weight).startswith("Parameter(shape=(2, 2), Layout[tp=1](tp), requires_grad=True,\n")
    assert "grad_fn=MulBackward0,\n" in repr(weight * 2)


def test_a_piece_is_loaded_only_where_it_belongs() -> None:
    pickled = run_ranks(2, saved)

    def on_the_wrong_rank() -> None:
        load(pickled[1 - mesh2().get_local_rank("tp")])

    assert_same_error(2, on_the_wrong_rank, LayoutError, "torch.distributed.checkpoint")


def attributes() -> None:
    x = lay(VALUE, Shard(0)).requires_grad_()
    assert x.is_leaf
    assert x.grad_fn is None
    assert (x * 2).grad_fn is not None
    assert not x.detach().requires_grad
    assert x.data.layout is x.layout
    x.data = lay(VALUE * 3, Shard(0))
    assert torch.equal(x.full_tensor().detach(), VALUE * 3)
    x.grad = lay(VALUE, Shard(0))
    assert torch.equal(x.grad.full_tensor(), VALUE)
    with pytest.raises(LayoutError, match="law of gradients"):
        x.grad = lay(VALUE, Replicate())
    with pytest.raises(LayoutError, match="must be a DTensor"):
        x.grad = VALUE
    x.grad = None
    with torch.no_grad():
        assert not (x * 2).requires_grad
    with torch.inference_mode():
        assert torch.equal((x * 2).full_tensor(), VALUE * 6)
    assert torch.equal(torch.zeros_like(x).full_tensor(), torch.zeros(5, 3, dtype=torch.float64))


def test_attributes_of_the_graph() -> None:
    run_ranks(2, attributes)


def local_of_uneven(ranks: int) -> list[int]:
    x = lay(torch.arange(5.0), Shard(0))
    assert torch.equal((x + 1).full_tensor(), torch.arange(5.0) + 1)
    return list(x.local_shape)


def test_uneven_pieces_are_those_of_torch_chunk() -> None:
    assert run_ranks(2, local_of_uneven, 2) == [[3], [2]]


PLAIN = torch.ones(3, dtype=torch.float64)


@pytest.mark.parametrize(
    ("function", "error", "match"),
    [
        (lambda x: x + PLAIN, LayoutError, "plain tensor of shape .3,.*distribute_tensor"),
        (lambda x: PLAIN * x, LayoutError, "plain tensor"),
        (lambda x: F.linear(x, torch.ones(4, 3, dtype=torch.float64)), LayoutError, "distribute_module"),
        (lambda x: torch.cat([x, torch.ones(5, 3, dtype=torch.float64)]), LayoutError, "plain tensor"),
        (lambda x: x.copy_(VALUE), LayoutError, "plain tensor"),
        (lambda x: F.layer_norm(x, (3,), PLAIN, PLAIN), LayoutError, "plain tensor"),
        (
            lambda x: x + distribute_tensor(VALUE, mesh2("other"), [Shard(0)], src_data_rank=None),
            ShardingRuleError,
            "different meshes",
        ),
        (
            lambda x: torch.cat([x, distribute_tensor(VALUE, mesh2("other"), src_data_rank=None)]),
            ShardingRuleError,
            "meshes",
        ),
        (lambda x: x.view(4, 4), ShardingRuleError, "15 elements"),
        (lambda x: x.sum(5), ShardingRuleError, "out of range"),
        (lambda x: x.transpose(0, 2), ShardingRuleError, "out of range"),
        (lambda x: x @ x, ShardingRuleError, "contracted dims"),
        (lambda x: torch.stack([x, x.T]), ShardingRuleError, "shapes differ"),
        (lambda x: x + lay(torch.ones(4, 3, dtype=torch.float64), Shard(0)), ShardingRuleError, "5 meets 4"),
        (lambda x: F.linear(x, x, lay(VALUE[0], Shard(0))), ShardingRuleError, "5 meets 3"),
        (lambda x: torch.bmm(x[None].expand(2, 5, 3), x.T[None].expand(3, 3, 5)), ShardingRuleError, "don't broadcast"),
        (
            lambda x: F.cross_entropy(x, lay(torch.zeros(4, dtype=torch.int64), Replicate())),
            ShardingRuleError,
            "5 meets 4",
        ),
        (lambda x: F.embedding(lay(torch.tensor([0]), Replicate()), x, max_norm=1.0), ShardingRuleError, "max_norm"),
        (lambda x: x[7], IndexError, "out of bounds"),
        (lambda x: x[1, 2, 3], ShardingRuleError, "too many indices"),
        (lambda x: DTensor.from_local(x, mesh2(), [Shard(0)]), LayoutError, "plain tensor"),
        (lambda x: DTensor.from_local(VALUE, mesh2(), [Shard(0)], shape=(5, 3)), LayoutError, "its part is"),
        (lambda x: DTensor.from_local(PLAIN, mesh2(), [Shard(1)]), LayoutError, "1 dims"),
        (lambda x: DTensor.from_local(PLAIN, mesh2(), [Shard(0), Shard(0)]), LayoutError, "one per axis"),
        (lambda x: F.embedding(lay(torch.tensor([0, 9]), Replicate()), x), (IndexError, RuntimeError), "out of range"),
        (lambda x: distribute_tensor(x, mesh2(), [Shard(1)]), LayoutError, "redistribute"),
        (lambda x: x.redistribute(placements=[Partial("median")]), LayoutError, "unknown reduce op"),
    ],
)
def test_bad_input_is_refused_alike_on_all_ranks(function: Any, error: Any, match: str) -> None:
    def refused() -> None:
        x = lay(VALUE, Shard(0))
        with record_collectives() as log:
            try:
                function(x)
            finally:
                assert not log, log.summary()

    assert_same_error(2, refused, error, match)
