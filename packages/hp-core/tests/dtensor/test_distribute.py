"""From plain tensors and modules to distributed ones, and DTensors made new: values, layouts, ties, bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hp_core
from hp_core import (
    DTensor,
    Layout,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from hp_core.errors import HyperParallelError, LayoutError
from hp_core.testing import assert_same_error, record_collectives, run_ranks


def mesh_of(ranks: int) -> Any:
    shape, names = ((2, 2), ("dp", "tp")) if ranks == 4 else ((ranks,), ("tp",))
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def own_part(value: torch.Tensor, layout: Layout) -> torch.Tensor:
    for dim, (start, stop) in enumerate(layout.bounds(tuple(value.shape))):
        value = value.narrow(dim, start, stop - start)
    return value


def layouts(mesh: Any) -> list[Layout]:
    base = Layout.from_device_mesh(mesh)
    if mesh.ndim == 1:
        ragged = [base(RaggedShard((1, 4)))] if mesh.size() == 2 else []
        return [base(), base(Shard(0)), base(Shard(1)), base(Partial()), *ragged]
    both = [base(("dp", "tp")), base(("tp", "dp")), base("tp", "dp"), base(None, ("dp", "tp")), base("dp")]
    return [base(), *both, base(Shard(0), Partial()), base(Partial("avg"), Partial("avg"))]


def from_one_rank(ranks: int, source: int) -> None:
    mesh = mesh_of(ranks)
    rank = torch.distributed.get_rank()
    for dtype in (torch.float64, torch.int64, torch.bfloat16):
        for shape in ((5, 3), (1, 4), (10, 2)):
            if shape[0] % 5:
                layouts_here = [layout for layout in layouts(mesh) if layout.ragged is None]
            else:
                layouts_here = layouts(mesh)
            mine = (torch.arange(shape[0] * shape[1]).view(shape) + 100 * rank).to(dtype)
            wanted = (torch.arange(shape[0] * shape[1]).view(shape) + 100 * source).to(dtype)
            for layout in layouts_here:
                if layout.is_partial() and not dtype.is_floating_point:
                    continue
                with record_collectives() as log:
                    x = distribute_tensor(mine, layout, src_data_rank=source)
                assert len(log) == 1, (layout, log.summary())
                assert x.layout is layout
                assert x.to_local().is_contiguous()
                assert tuple(x.to_local().shape) == layout.local_shape(shape)
                assert torch.equal(x.full_tensor(), wanted), (layout, shape, dtype)
                if not layout.is_partial():
                    assert torch.equal(x.to_local(), own_part(wanted, layout))


@pytest.mark.parametrize(("ranks", "source"), [(2, 0), (2, 1), (4, 0), (4, 3)])
def test_values_come_from_one_rank_in_one_collective(ranks: int, source: int) -> None:
    run_ranks(ranks, from_one_rank, ranks, source)


def trusted() -> None:
    mesh = mesh_of(2)
    rank = torch.distributed.get_rank()
    value = torch.arange(15.0).view(5, 3) + 100 * rank
    for layout in layouts(mesh):
        with record_collectives() as log:
            x = distribute_tensor(value, layout, src_data_rank=None)
        assert not log
        assert x.layout is layout
        if not layout.is_partial():
            assert torch.equal(x.to_local(), own_part(value, layout))
    x = distribute_tensor(value.requires_grad_(), mesh, [Shard(0)], src_data_rank=None)
    assert x.requires_grad
    assert x.is_leaf
    with torch.no_grad():
        x.add_(1)
    assert torch.equal(value, torch.arange(15.0).view(5, 3) + 100 * rank)  # the piece is a copy


def test_each_rank_may_be_trusted() -> None:
    run_ranks(2, trusted)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, ids: Any) -> Any:
        return self.head(self.norm(self.embed(ids) * self.scale))


def module() -> None:
    mesh = mesh_of(2)
    torch.manual_seed(torch.distributed.get_rank())  # ranks start from different weights
    model = Tied().double()
    reference = Tied().double()

    def cut(name: str, child: nn.Module, mesh: Any) -> None:
        if name == "embed":
            child.weight = nn.Parameter(distribute_tensor(child.weight.detach(), mesh, [Shard(0)]))

    untied = distribute_module(model, mesh)
    assert untied is model
    assert model.head.weight is model.embed.weight
    assert isinstance(model.scale, DTensor)
    assert len(list(model.parameters())) == 3
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert isinstance(parameter, nn.Parameter)
        assert parameter.placements == (Replicate(),)
        pieces = [torch.empty_like(parameter.to_local()) for _ in range(2)]
        torch.distributed.all_gather(pieces, parameter.to_local().detach())
        assert torch.equal(*pieces)  # rank 0's
    reference.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    ids = torch.tensor([[0, 6, 3], [1, 1, 5]])
    result = model(distribute_tensor(ids, mesh, [Shard(0)]))
    expected = reference(ids)
    torch.testing.assert_close(result.full_tensor(), expected)
    result.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(model.embed.weight.grad.full_tensor(), reference.embed.weight.grad)
    torch.testing.assert_close(model.norm.weight.grad.full_tensor(), reference.norm.weight.grad)

    embedding = nn.Sequential(nn.Embedding(7, 4)).double()
    cut_module = distribute_module(
        nn.ModuleDict({"embed": embedding[0]}),
        mesh,
        cut,
    )
    assert cut_module["embed"].weight.placements == (Shard(0),)
    hooked = distribute_module(
        nn.Linear(4, 4).double(),
        mesh,
        input_fn=lambda _, args, mesh: (DTensor.from_local(args[0], mesh, [Shard(0)]),),
        output_fn=lambda _, output, mesh: output.full_tensor(),
    )
    plain = hooked(torch.ones(2, 4, dtype=torch.float64))
    assert type(plain) is torch.Tensor
    assert plain.shape == (4, 4)


def test_modules_with_tied_parameters() -> None:
    run_ranks(2, module)


def made_new(ranks: int) -> list[Any]:
    mesh = mesh_of(ranks)
    drawn = []
    for layout in layouts(mesh):
        with record_collectives() as log:
            assert torch.equal(hp_core.zeros(5, 3, layout=layout).full_tensor(), torch.zeros(5, 3))
            ones = hp_core.ones((5, 3), dtype=torch.int64, layout=layout.gradient, requires_grad=False)
            full = hp_core.full((5, 3), 2.5, layout=layout, dtype=torch.float64, requires_grad=True)
            empty = hp_core.empty(5, 3, layout=layout)
        assert len(log) <= (1 if layout.partials or layout.sharded_axes else 0)  # only full_tensor() above
        assert torch.equal(ones.full_tensor(), torch.ones(5, 3, dtype=torch.int64))
        assert full.requires_grad
        assert full.is_leaf
        assert torch.equal(full.full_tensor().detach(), torch.full((5, 3), 2.5, dtype=torch.float64))
        assert tuple(empty.to_local().shape) == layout.local_shape((5, 3))
    for layout in [None, *layouts(mesh)]:
        hp_core.manual_seed(7)
        with mesh:
            where = {} if layout is None else {"layout": layout}
            first = hp_core.rand(5, 3, dtype=torch.float64, **where)
            second = hp_core.randn(5, 3, dtype=torch.float64, **where)
        drawn.append((first.full_tensor(), second.full_tensor()))
    for uniform, normal in drawn[1:]:
        torch.testing.assert_close(uniform, drawn[0][0], rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(normal, drawn[0][1], rtol=1e-14, atol=1e-14)
    return [drawn[0][0].tolist(), drawn[0][1].tolist()]


def test_new_tensors_do_not_depend_on_the_layout_or_the_world() -> None:
    results = [result for ranks in (1, 2, 4) for result in run_ranks(ranks, made_new, ranks)]
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize(
    ("function", "error", "match"),
    [
        (lambda mesh: distribute_tensor(torch.ones(4), mesh, [Shard(1)]), LayoutError, "1 dims"),
        (lambda mesh: distribute_tensor(torch.ones(4), mesh, [Shard(0), Shard(0)]), LayoutError, "one per axis"),
        (
            lambda mesh: distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=5),
            LayoutError,
            "src_data_rank=5",
        ),
        (lambda mesh: distribute_tensor(torch.ones(5), mesh, [RaggedShard((1, 2))]), LayoutError, "doesn't divide"),
        (lambda mesh: distribute_tensor(torch.ones(4), mesh, [RaggedShard((1, 2, 3))]), LayoutError, "2 ranks"),
        (lambda mesh: distribute_tensor(torch.ones(4)), LayoutError, "no mesh"),
        (lambda mesh: hp_core.zeros(4, device_mesh=mesh, placements=[Shard(2)]), LayoutError, "1 dims"),
        (lambda mesh: distribute_tensor(torch.ones(4), Layout.from_device_mesh(mesh)("dp")), HyperParallelError, "dp"),
    ],
)
def test_bad_input_is_refused_alike(function: Any, error: Any, match: str) -> None:
    assert_same_error(2, lambda: function(mesh_of(2)), error, match)
