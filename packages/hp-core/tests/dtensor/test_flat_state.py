"""Making, filling, copying, saving and loading DTensors in flat layouts: views of a buffer, and values of the dense tensor."""

from __future__ import annotations

import copy
import io
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

import hp_core
from hp_core import (
    DTensor,
    FlatShard,
    Layout,
    Replicate,
    Shard,
    custom_shard,
    distribute_tensor,
    init_device_mesh,
    init_empty_weights,
    init_parameters,
    manual_seed,
    record_collectives,
    shard_module,
)
from hp_core.errors import LayoutError
from hp_core.testing import assert_same_error, run_ranks


def square() -> Layout:
    return Layout.from_device_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))


def own_part(value: torch.Tensor, layout: Layout) -> torch.Tensor:
    shape = tuple(value.shape)
    piece = value[tuple(slice(*interval) for interval in layout.unflat.bounds(shape))]
    return piece.reshape(-1)[slice(*layout.flat_interval(shape))].clone()


# -- a buffer and its parameters ----------------------------------------------------------------------------------------


def buffer_of_a_unit() -> None:
    """Three parameters one after another in a buffer of two chunks; each is a view of what this rank has of it."""
    base = square()
    shapes, tensor_parallel = [(4, 6), (3,), (5, 2)], [Shard(0), Replicate(), Shard(1)]
    numels = [
        prod(base(Replicate(), cut).largest_local_shape(s)) for s, cut in zip(shapes, tensor_parallel, strict=True)
    ]
    chunk = -(-sum(numels) // 2)
    buffer = torch.zeros(chunk)
    index = base.mesh.get_local_rank("dp")
    parameters, dense = [], []
    offset = 0
    for number, (shape, cut, numel) in enumerate(zip(shapes, tensor_parallel, numels, strict=True)):
        layout = base(FlatShard(chunk, offset), cut)
        start, stop = (min(max(offset + end - index * chunk, 0), chunk) for end in (0, numel))
        view = buffer[start:stop]
        mesh_and_placements = (base.mesh, [FlatShard(chunk, offset), cut])
        with record_collectives() as log:
            x = DTensor.from_local(view, *mesh_and_placements, shape=shape)
            assert x.layout is layout
            assert x.to_local().data_ptr() == view.data_ptr()
            parameters.append(nn.Parameter(x))
            assert parameters[-1].to_local().data_ptr() == view.data_ptr()
        assert not log
        dense.append(torch.randn(shape, generator=torch.Generator().manual_seed(number)))
        with torch.no_grad():
            parameters[-1].copy_(distribute_tensor(dense[-1], base(), src_data_rank=None))
        assert torch.equal(view, own_part(dense[-1], layout))
        offset += numel
    # a step on the buffer is a step on the parameters, and the other way round
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(parameters, lr=0.5).step()
    buffer.mul_(2)
    for parameter, value in zip(parameters, dense, strict=True):
        assert torch.equal(parameter.full_tensor(), (value - 0.5) * 2)


def test_parameters_are_views_of_a_buffer() -> None:
    run_ranks(4, buffer_of_a_unit)


def leaves() -> None:
    base = square()
    dense = torch.arange(15.0).view(5, 3)
    layout = base(FlatShard(6, 2), Shard(1))
    for source in (0, 3, None):
        given = (
            dense
            if source is None or base.mesh.get_local_rank("dp") * 2 + base.mesh.get_local_rank("tp") == source
            else dense * 0
        )
        with record_collectives() as log:
            x = distribute_tensor(given.clone().requires_grad_(), layout, src_data_rank=source)
        assert log.counts == ({} if source is None else {"scatter": 1})
        assert x.is_leaf
        assert x.requires_grad
        assert torch.equal(x.to_local(), own_part(dense, layout))
    parameter = nn.Parameter(x)
    (parameter.full_tensor() * dense).sum().backward()
    assert parameter.grad.layout is layout
    assert torch.equal(parameter.grad.to_local(), own_part(dense, layout))
    parameter.grad = None
    seen = []
    parameter.register_hook(lambda gradient: seen.append(gradient.layout))
    parameter.square().sum().backward()
    assert seen == [layout]
    assert torch.equal(parameter.grad.full_tensor(), dense * 2)
    assert repr(parameter).startswith("Parameter(shape=(5, 3), Layout[dp=2, tp=2](-, tp) flat(6+2):dp")
    assert (tuple(x.shape), x.stride(), x.numel(), x.local_shape) == ((5, 3), (3, 1), 15, layout.local_shape((5, 3)))
    # on an axis of one rank the local tensor has one dim as well
    single = Layout.from_device_mesh(init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp")))
    for cut in (Replicate(), Shard(0)):
        for source in (0, None):
            alone = distribute_tensor(dense, single(FlatShard(20, 1), cut), src_data_rank=source)
            assert alone.to_local().ndim == 1
            assert torch.equal((alone + alone).full_tensor(), dense * 2)
            assert alone.sum().item() == dense.sum()


def test_leaves_gradients_and_axes_of_one_rank() -> None:
    run_ranks(4, leaves)


def copies() -> None:
    base = square()
    dense = torch.arange(15.0).view(5, 3)
    x = nn.Parameter(distribute_tensor(dense, base(FlatShard(6, 2), Shard(1)), src_data_rank=None))
    file = io.BytesIO()
    torch.save({"x": x, "plain": x.detach()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for twin in (copy.deepcopy(x), loaded["x"], loaded["plain"]):
        assert twin.layout is x.layout
        assert torch.equal(twin.to_local(), x.to_local())
        assert twin.to_local().data_ptr() != x.to_local().data_ptr() or not x.to_local().numel()
    assert isinstance(loaded["x"], nn.Parameter)
    assert copy.deepcopy(x).requires_grad


def test_copies_and_pickles() -> None:
    run_ranks(4, copies)


def parts() -> None:
    """A function of shares, whose output is flat again: its global shape must be said."""
    base = square()
    layout = base(FlatShard(6, 2), Shard(1))
    x = distribute_tensor(torch.arange(15.0).view(5, 3), layout, src_data_rank=None).requires_grad_()
    double = custom_shard(lambda t: t * 2, out_placements=layout, in_placements=(layout,), out_shapes=[(5, 3)])
    result = double(x)
    assert result.layout is layout
    result.sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.full((5, 3), 2.0))
    custom_shard(lambda t: t * 2, out_placements=layout)(x)


def test_custom_functions_of_shares() -> None:
    assert_same_error(4, parts, LayoutError, "ranks hold unequal shares.*pass shape=")


# -- values by global index ---------------------------------------------------------------------------------------------

DRAWS = {
    "factory": lambda like, where: hp_core.randn(*like.shape, **where),
    "integers": lambda like, where: hp_core.randint(0, 1000, tuple(like.shape), **where),
    "like": lambda like, where: torch.rand_like(like),
    "in place": lambda like, where: torch.empty_like(like).normal_(1.0, 2.0),
    "init": lambda like, where: nn.init.kaiming_uniform_(torch.empty_like(like)),
    "truncated": lambda like, where: nn.init.trunc_normal_(torch.empty_like(like)),
    "orthogonal": lambda like, where: nn.init.orthogonal_(torch.empty_like(like)),
    "identity": lambda like, where: nn.init.eye_(torch.empty_like(like)),
    "dropout": lambda like, where: torch.dropout(torch.ones_like(like), 0.5, True),
    "dropout in place": lambda like, where: nn.functional.dropout(torch.ones_like(like), 0.5, True, inplace=True),
    "coins": lambda like, where: torch.empty_like(like).bernoulli_(0.3),
}


def drawn(placements: list[Any], ranks: int) -> dict[str, list[Any]]:
    shape, names = ((2, 2), ("dp", "tp")) if ranks == 4 else ((ranks,), ("dp",))
    layout = Layout.from_device_mesh(init_device_mesh("cpu", shape, mesh_dim_names=names))(*placements)
    result = {}
    for name, draw in DRAWS.items():
        manual_seed(11)
        x = draw(distribute_tensor(torch.zeros(7, 5), layout, src_data_rank=None), {"layout": layout})
        assert x.layout is layout, name
        result[name] = x.full_tensor().tolist()
    return result


def test_random_values_are_those_of_any_layout() -> None:
    dense = run_ranks(1, drawn, [Replicate()], 1)[0]
    assert dense["factory"] != dense["in place"]
    for ranks, placements in (
        (2, [FlatShard(20, 3)]),
        (4, [FlatShard(11, 1), Shard(0)]),
        (4, [FlatShard(12), Shard(1)]),
        (4, [Replicate(), FlatShard(50)]),
    ):
        for result in run_ranks(ranks, drawn, placements, ranks):
            for name, values in result.items():
                if name == "orthogonal":  # a decomposition of equal values
                    assert torch.allclose(torch.tensor(values), torch.tensor(dense[name]), atol=1e-6)
                else:
                    assert values == dense[name], (name, placements)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4, padding_idx=7)
        self.linear = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)


def flat_plan(base: Layout) -> dict[str, Any]:
    """Where each parameter lies in one buffer; rows of the embedding are cut by tp first, where there is one."""
    cut = [Shard(0)] if base.mesh.ndim == 2 else []
    whole = [Replicate()] if base.mesh.ndim == 2 else []
    size = base.mesh.shape[0]
    numels = {
        "embed.weight": 40 // 2 ** len(cut),
        "linear.weight": 12,
        "linear.bias": 3,
        "norm.weight": 3,
        "norm.bias": 3,
    }
    chunk = -(-sum(numels.values()) // size)
    plan, offset = {}, 0
    for name, numel in numels.items():
        plan[name] = [FlatShard(chunk, offset), *(cut if name == "embed.weight" else whole)]
        offset += numel
    return plan


def values(model: nn.Module) -> dict[str, Any]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).tolist()
        for name, value in model.state_dict().items()
    }


def filled(ranks: int) -> dict[str, Any]:
    manual_seed(5)
    with init_empty_weights():
        model = Model()
    if ranks:
        base = (
            square()
            if ranks == 4
            else Layout.from_device_mesh(init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",)))
        )
        with record_collectives() as log:
            shard_module(model, base.mesh, flat_plan(base))
            init_parameters(model)
        assert not log, log.summary()
        assert model.linear.weight.layout.flat is not None
        assert model.embed.weight.to_local().ndim == 1
    else:
        init_parameters(model)
    assert all(parameter.requires_grad for parameter in model.parameters())
    return values(model)


def test_a_model_on_meta_gets_the_bits_of_the_dense_one() -> None:
    dense = filled(0)
    assert dense["embed.weight"][7] == [0.0] * 4
    for ranks in (1, 2, 4):
        assert all(result == dense for result in run_ranks(ranks, filled, ranks)), ranks


# -- state dicts and checkpoints ------------------------------------------------------------------------------------------


def load_plain() -> None:
    torch.manual_seed(0)
    base = square()
    model = shard_module(Model(), base.mesh, flat_plan(base))
    dense = Model()
    with record_collectives() as log:
        model.load_state_dict(dense.state_dict())
    assert not log
    assert values(model) == values(dense)
    twin = shard_module(Model(), base.mesh, flat_plan(base))
    twin.load_state_dict(model.state_dict())
    assert values(twin) == values(dense)
    assert [p.layout for p in twin.parameters()] == [p.layout for p in model.parameters()]


def test_a_plain_state_dict_is_the_global_values() -> None:
    run_ranks(4, load_plain)


SHAPES = {"even": (4, 6), "uneven": (5, 3), "cube": (3, 2, 5), "vector": (7,), "short": (2,), "scalar": ()}


def dense_value(name: str) -> torch.Tensor:
    return torch.randn(SHAPES[name], dtype=torch.float64, generator=torch.Generator().manual_seed(len(name)))


def arrangements(ranks: int) -> dict[str, Any]:
    """Ways to lay out a tensor of so many elements and dims on so many ranks, by name."""
    line = Layout.from_device_mesh(init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",)))
    ways: dict[str, Any] = {
        "flat line": lambda n, ndim: line(FlatShard(-(-(n + 3) // ranks), 3)),
        "rows": lambda n, ndim: line(*["dp"] * min(ndim, 1)),
        "whole": lambda n, ndim: line(),
    }
    if ranks == 4:
        base = square()
        ways["flat rows"] = lambda n, ndim: base(FlatShard(-(-(n + 1) // 2), 1), Shard(0) if ndim else Replicate())
        ways["flat columns"] = lambda n, ndim: base(FlatShard(n), Shard(1) if ndim > 1 else Replicate())
        ways["flat inside"] = lambda n, ndim: base(Shard(0) if ndim else Replicate(), FlatShard(-(-n // 2)))
        ways["tensor parallel"] = lambda n, ndim: base(*[None, "tp"][-ndim:] if ndim else [])
    return ways


def state(ranks: int, way: str, zero: bool) -> dict[str, Any]:
    arrange = arrangements(ranks)[way]
    return {
        name: nn.Parameter(
            distribute_tensor(dense_value(name) * (not zero), arrange(prod(shape), len(shape)), src_data_rank=None)
        )
        for name, shape in SHAPES.items()
    }


def save(folder: str, ranks: int, way: str) -> None:
    saved = state(ranks, way, False)
    for tensor in saved.values():
        assert len(tensor.__create_chunk_list__()) <= max(2 * tensor.ndim - 1, 1)
    dcp.save(saved, checkpoint_id=folder)


def load(folder: str, ranks: int) -> None:
    for way in arrangements(ranks):
        loaded = state(ranks, way, True)
        locals_ = {name: tensor.to_local() for name, tensor in loaded.items()}
        dcp.load(loaded, checkpoint_id=folder)
        for name, tensor in loaded.items():
            assert tensor.to_local().data_ptr() == locals_[name].data_ptr()  # loading wrote into what was there
            assert torch.equal(tensor.detach().full_tensor(), dense_value(name)), (way, name)


@pytest.mark.parametrize(
    ("ranks", "way"),
    [
        (4, "flat rows"),
        (4, "flat columns"),
        (4, "flat inside"),
        (4, "flat line"),
        (2, "flat line"),
        (4, "tensor parallel"),
    ],
)
def test_checkpoints_go_from_any_layout_to_any_layout(tmp_path: Path, ranks: int, way: str) -> None:
    """Saved by flat shares and loaded into flat shares on 4, 2 and 1 ranks, into rows, columns and whole tensors; and back."""
    run_ranks(ranks, save, str(tmp_path), ranks, way)
    stored = FileSystemReader(str(tmp_path)).read_metadata().state_dict_metadata
    for name, shape in SHAPES.items():
        assert sum(prod(chunk.sizes) for chunk in stored[name].chunks) == prod(shape), name
    for others in (4, 2, 1):
        run_ranks(others, load, str(tmp_path), others)


def save_training(folder: str) -> list[Any]:
    model, optimizer = trained(4, 0)
    dcp.save({"model": model.state_dict(), "moments": moments(model, optimizer)}, checkpoint_id=folder)
    return contents(model, optimizer)


def load_training(folder: str, ranks: int) -> list[Any]:
    model, optimizer = trained(ranks, 1)
    dcp.load({"model": model.state_dict(), "moments": moments(model, optimizer)}, checkpoint_id=folder)
    return contents(model, optimizer)


def trained(ranks: int, seed: int) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    base = (
        square() if ranks == 4 else Layout.from_device_mesh(init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",)))
    )
    model = shard_module(Model(), base.mesh, flat_plan(base))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    return model, optimizer


def moments(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: optimizer.state[parameter]["exp_avg_sq"] for name, parameter in model.named_parameters()}


def contents(model: Model, optimizer: torch.optim.Optimizer) -> list[Any]:
    return [values(model), {name: value.full_tensor().tolist() for name, value in moments(model, optimizer).items()}]


def test_models_and_moments_are_loaded_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    saved = run_ranks(4, save_training, str(tmp_path))
    for ranks in (4, 2, 1):
        assert run_ranks(ranks, load_training, str(tmp_path), ranks) == saved[:ranks]


def foreign_box() -> None:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    x = distribute_tensor(torch.ones(5, 3), square()(FlatShard(8), Replicate()), src_data_rank=None)
    x.__get_tensor_shard__(MetadataIndex("weight", torch.Size([4, 2])))


def test_a_box_that_is_not_here_is_not_given() -> None:
    assert_same_error(4, foreign_box, LayoutError, r"weight: no box of this rank's flat share begins at \(4, 2\)")
