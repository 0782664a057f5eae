"""torch's own DTensor and DeviceMesh: there and back without a copy, in the graph, exactly or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor import distribute_tensor as torch_distribute
from torch.distributed.tensor.placement_types import _StridedShard

import hp_core
from hp_core import (
    ColwiseParallel,
    DeviceMesh,
    DTensor,
    Layout,
    Partial,
    RaggedShard,
    Shard,
    custom_shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    parallelize_module,
    record_collectives,
    shard_module,
)
from hp_core.errors import LayoutError
from hp_core.platform.torch.interop import placements_to_native
from hp_core.testing import assert_same_error, close_ranks, run_ranks


def grid() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def value(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


ENTRIES: list[tuple[Any, ...]] = [
    (),
    ("dp",),
    ("dp", "tp"),
    ("tp", "dp"),
    (("dp", "tp"),),
    (("tp", "dp"),),
    (None, ("tp", "dp")),
    (Shard(1), Partial()),
    (Partial(), Partial()),
]
SHAPES = [(8, 4), (5, 3), (7, 9), (2, 1), (1, 6)]


def there_and_back() -> None:
    mesh = grid()
    for entries in ENTRIES:
        layout = Layout.from_device_mesh(mesh)(*entries)
        for shape in SHAPES:
            dense = value(*shape)
            x = distribute_tensor(dense, layout, src_data_rank=None).requires_grad_()
            with record_collectives() as log:
                theirs = x.to_torch()
                again = DTensor.from_torch(theirs)
            assert not log
            assert type(theirs) is TorchDTensor
            assert theirs.to_local().data_ptr() == x.to_local().data_ptr() == again.to_local().data_ptr()
            assert again.layout is layout
            assert again.shape == theirs.shape == shape
            torch.testing.assert_close(theirs.full_tensor(), dense)
            (again * 2).square().sum().backward()
            assert x.grad.layout is layout.gradient
            torch.testing.assert_close(x.grad.full_tensor(), 8 * dense)


def test_conversion_is_exact_and_differentiable() -> None:
    run_ranks(4, there_and_back)


def through_torch() -> None:
    x = distribute_tensor(value(5, 3), grid(), [Shard(0), Shard(1)], src_data_rank=None).requires_grad_()
    theirs = x.to_torch()
    DTensor.from_torch(torch.nn.functional.gelu(theirs)).sum().backward()
    dense = value(5, 3).requires_grad_()
    torch.nn.functional.gelu(dense).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), dense.grad)


def test_gradients_pass_through_torch_ops() -> None:
    run_ranks(4, through_torch)


def made_by_torch() -> None:
    mesh = grid().to_torch()
    strided = [_StridedShard(0, split_factor=2), TorchShard(0)]
    for shape in ((8, 3), (5, 3)):
        theirs = torch_distribute(value(*shape), mesh, strided, src_data_rank=None)
        ours = DTensor.from_torch(theirs)
        assert ours.layout is Layout.from_device_mesh(grid())(("tp", "dp"))
        assert torch.equal(ours.full_tensor(), value(*shape))
    assert DTensor.from_torch(torch_distribute(value(5, 3), mesh, [TorchReplicate(), TorchShard(1)])).placements == (
        hp_core.Replicate(),
        Shard(1),
    )


def test_what_torch_made_is_taken_as_it_lies() -> None:
    run_ranks(4, made_by_torch)


def pieces() -> list[int]:
    theirs = distribute_tensor(torch.arange(5), Layout.from_device_mesh(grid())(("tp", "dp")), src_data_rank=None)
    local = theirs.to_torch().to_local().tolist()
    assert local == torch.arange(5).chunk(2)[grid().get_local_rank("tp")].chunk(2)[grid().get_local_rank("dp")].tolist()
    return local


def test_strided_shards_hold_pieces_of_the_tensor_parallel_shards() -> None:
    """Public report case 2: what FSDP after tensor parallelism makes of five elements."""
    assert run_ranks(4, pieces) == [[0, 1], [3], [2], [4]]


@pytest.mark.parametrize(
    ("size", "same"), [(64, True), (8, True), (5, True), (1, True), (9, False), (17, False), (10, True)]
)
def test_an_order_that_torch_reads_differently_is_refused(size: int, same: bool) -> None:
    layout = Layout((4, 2), ("dp", "tp"))(("tp", "dp"))
    if same:
        assert placements_to_native(layout, (size,)) == (_StridedShard(0, split_factor=2), TorchShard(0))
    else:
        with pytest.raises(LayoutError, match=f"shape .{size},. .*uneven size.*order of the mesh"):
            placements_to_native(layout, (size,))


def refused(which: str) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    if which == "ragged":
        distribute_tensor(value(4), mesh, [RaggedShard((3, 1))]).to_torch()
    elif which == "strided":
        local = value(4)
        DTensor.from_torch(TorchDTensor.from_local(local, mesh.to_torch(), [_StridedShard(0, split_factor=2)]))
    else:
        DTensor.from_torch(value(4))


@pytest.mark.parametrize(
    ("which", "match"),
    [
        ("ragged", "ragged shares, which torch's placements can't express"),
        ("strided", "pieces that no order of mesh axes makes"),
        ("plain", "takes a torch.distributed.tensor.DTensor, got a Tensor"),
    ],
)
def test_what_can_not_be_said_is_refused_alike(which: str, match: str) -> None:
    assert_same_error(2, refused, LayoutError, match, which)


def meshes() -> None:
    ours = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    theirs = torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    assert DeviceMesh.from_torch(theirs) is ours
    assert DeviceMesh.from_torch(ours.to_torch()) is ours
    assert ours.to_torch() == theirs
    assert ours.to_torch() is ours.to_torch()
    layout = Layout.from_device_mesh(theirs)("tp")
    assert layout.mesh is ours
    x = distribute_tensor(value(4, 4), theirs, [TorchShard(0)])
    assert x.layout is layout
    assert x.redistribute(theirs, [TorchReplicate()]).layout is layout.replicated
    assert DTensor.from_local(value(2, 4), theirs, [TorchShard(0)]).layout is layout
    assert hp_core.zeros(4, 4, device_mesh=theirs, placements=[TorchShard(0)]).layout is layout
    linear = torch.nn.Linear
    assert parallelize_module(linear(4, 4), theirs, ColwiseParallel()).weight.layout is layout
    assert distribute_module(linear(4, 4), theirs).weight.layout is layout.replicated
    assert shard_module(linear(4, 4), theirs, {"weight": [TorchShard(0)]}).weight.layout is layout
    assert custom_shard(torch.neg, theirs, [TorchShard(0)])(x).layout is layout


def test_every_door_that_takes_a_mesh_takes_torchs() -> None:
    run_ranks(2, meshes)


def again(folder: str) -> None:
    rank = hp_core.get_rank()
    before = grid().to_torch()
    hp_core.destroy_process_group()
    hp_core.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=4)
    assert grid().to_torch() is not before
    x = distribute_tensor(value(5, 3), grid(), [Shard(0), Shard(1)])
    torch.testing.assert_close(x.to_torch().full_tensor(), value(5, 3))


def test_a_new_world_has_new_meshes(tmp_path: Path) -> None:
    close_ranks()
    try:
        run_ranks(4, again, str(tmp_path))
    finally:
        close_ranks()
