"""Redistributing DTensors: element types, ragged shares, spellings, and what is refused.

All pairs of layouts run in tests/redistribute/test_execution.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from hp_core import DTensor, Layout, Partial, RaggedShard, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_core.errors import LayoutError
from hp_core.testing import assert_same_error, record_collectives, run_ranks


def make_mesh(ranks: int) -> Any:
    shape, names = ((2,), ("tp",)) if ranks == 2 else ((2, 2), ("dp", "tp"))
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def layouts(mesh: Any, reduce_op: str | None) -> Iterator[Layout]:
    base = Layout.from_device_mesh(mesh)
    options = [Replicate(), Shard(0), Shard(1), *([Partial(reduce_op)] if reduce_op else [])]
    for placements in product(options, repeat=mesh.ndim):
        yield base(*placements)
    if mesh.ndim == 2:
        yield base(("tp", "dp"))
        yield base(None, ("tp", "dp"))


def own_part(value: torch.Tensor, layout: Layout) -> torch.Tensor:
    for dim, (start, stop) in enumerate(layout.bounds(tuple(value.shape))):
        value = value.narrow(dim, start, stop - start)
    return value.contiguous()


def local_of(value: torch.Tensor, layout: Layout) -> torch.Tensor:
    """What this rank holds, so that pending reductions give `value`; ranks hold different numbers."""
    coordinate = layout.mesh.get_coordinate()
    for axis, reduce_op in layout.partials:
        first = coordinate[axis] == 0
        if reduce_op == "sum":
            value = 3 * value if first else -2 * value
        elif reduce_op == "avg":
            value = value + 1 if first else value - 1
        elif reduce_op == "max":
            value = value if first else value - 1
        else:
            value = value + 1 if first else value
    return own_part(value, layout).clone()


def every_dtype() -> None:
    mesh = make_mesh(2)
    for dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
        torch.complex64,
    ):
        value = torch.arange(15).view(5, 3).remainder(7).to(dtype)
        for src, dst in product(layouts(mesh, None), repeat=2):
            result = DTensor.from_local(own_part(value, src).clone(), src, shape=(5, 3)).redistribute(dst)
            assert result.dtype is dtype
            assert torch.equal(result.to_local(), own_part(value, dst)), (dtype, src, dst)
    base = Layout.from_device_mesh(mesh)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        value = torch.arange(15).view(5, 3).to(dtype)
        for dst in layouts(mesh, "sum"):
            pending = DTensor.from_local(local_of(value, base(Partial())), base(Partial()))
            assert torch.equal(pending.redistribute(dst).full_tensor(), value), (dtype, dst)


def test_element_types() -> None:
    run_ranks(2, every_dtype)


def free_moves() -> None:
    mesh = make_mesh(4)
    base = Layout.from_device_mesh(mesh)
    value = torch.arange(15.0).view(5, 3)
    whole = distribute_tensor(value, base(), src_data_rank=None)
    with record_collectives() as log:
        for dst in layouts(mesh, "sum"):
            whole.redistribute(dst)
        pending = DTensor.from_local(value, base(Partial(), Replicate()))
        assert pending.redistribute(base(Partial(), Replicate())) is pending
    assert not log, log.summary()


def test_leaving_replicate_communicates_nothing() -> None:
    run_ranks(4, free_moves)


def ragged_layouts(mesh: Any) -> Iterator[Layout]:
    """Shares along either axis, zero ones too; along the other axis the tensor is whole, cut or pending."""
    base = Layout.from_device_mesh(mesh)
    for units in ((3, 1), (0, 1), (1, 0), (1, 1)):
        share = RaggedShard(units)
        if mesh.ndim == 1:
            yield base(share)
        else:
            for other in (Replicate(), Shard(1), Partial()):
                yield base(share, other)
                yield base(other, share)


def ragged(ranks: int) -> None:
    mesh = make_mesh(ranks)
    value = torch.arange(24.0, dtype=torch.float64).view(8, 3)
    direction = value.flip(0) - 7
    every = [*ragged_layouts(mesh), *layouts(mesh, "sum")]
    for src, dst in product(every, repeat=2):
        if src.ragged is None and dst.ragged is None:
            continue
        local = local_of(value, src).requires_grad_()
        result = DTensor.from_local(local, src, shape=(8, 3)).redistribute(dst)
        assert tuple(result.to_local().shape) == dst.local_shape((8, 3))
        assert torch.equal(result.full_tensor().detach(), value), (src, dst)
        result.backward(distribute_tensor(direction, dst.gradient, src_data_rank=None))
        assert torch.equal(local.grad, own_part(direction, src.gradient)), (src, dst)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ragged_shares_to_and_from_everything(ranks: int) -> None:
    run_ranks(ranks, ragged, ranks)


def other_spellings() -> None:
    mesh = make_mesh(4)
    value = torch.arange(15.0).view(5, 3)
    x = distribute_tensor(value, mesh, [Shard(0), Shard(1)], src_data_rank=None)
    for moved in (
        x.redistribute(mesh, [Replicate(), Shard(-1)]),
        x.redistribute(placements=[Replicate(), Shard(1)]),
        x.redistribute(Layout.from_device_mesh(mesh)(None, "tp")),
    ):
        assert moved.layout is Layout((2, 2), ("dp", "tp"))(None, "tp")
        assert torch.equal(moved.to_local(), own_part(value, moved.layout))
    assert x.reduce_partial() is x
    assert torch.equal(x.full_tensor(), value)


def test_spellings_of_one_layout() -> None:
    run_ranks(4, other_spellings)


def strange(which: str) -> None:
    mesh = make_mesh(2)
    x = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)], src_data_rank=None)
    if which == "dim":
        x.redistribute(placements=[Shard(2)])
    elif which == "count":
        x.redistribute(placements=[Shard(0), Shard(1)])
    else:
        x.redistribute(init_device_mesh("cpu", (2,), mesh_dim_names=("other",)), [Shard(2)])


@pytest.mark.parametrize("which", ["dim", "count", "dim on another mesh"])
def test_what_cannot_be_is_refused_alike(which: str) -> None:
    """What another mesh can be asked for is in test_cross_mesh.py."""
    assert_same_error(2, strange, LayoutError, "", which)
