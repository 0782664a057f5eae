"""Faults that users of other libraries reported in public, as small inputs; each test names its case.

The list of cases is kept with the project's design; numbers left out belong to other components.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hp_core import (
    DTensor,
    Layout,
    Partial,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    init_device_mesh,
    parallelize_module,
)
from hp_core.dtensor.dispatch import dispatch_cache_info
from hp_core.testing import record_collectives, run_ranks


def line(ranks: int) -> Any:
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))


def square() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("p", "q"))


def lay(value: torch.Tensor, mesh: Any, *placements: Any) -> Any:
    return distribute_tensor(value, mesh, placements, src_data_rank=None)


def flattened_gather() -> None:
    value = torch.arange(15.0).view(5, 3)
    mesh = square()
    assert torch.equal(
        lay(value, mesh, Shard(0), Shard(0)).redistribute(mesh, [Replicate(), Replicate()]).to_local(), value
    )
    flat = mesh["p", "q"].flatten("pq")
    assert torch.equal(lay(value, flat, Shard(0)).redistribute(flat, [Replicate()]).to_local(), value)


def test_gather_over_two_axes_of_an_uneven_dim() -> None:
    """Case 1: the all-gather over a flattened (2, 2) mesh lost the last row of an uneven dim."""
    run_ranks(4, flattened_gather)


def nested_order() -> list[float]:
    layout = Layout.from_device_mesh(square())(("q", "p"))
    return distribute_tensor(torch.arange(5.0), layout, src_data_rank=None).to_local().tolist()


def test_pieces_of_a_dim_cut_by_two_axes_are_consistent() -> None:
    """Case 2: a strided shard of 5 elements gave rank 0 [0, 1, 3]. Here outer q halves [0, 3), [3, 5); p cuts each half."""
    by_rank = run_ranks(4, nested_order)
    assert by_rank == [[0.0, 1.0], [3.0], [2.0], [4.0]]  # ranks (p, q) = (0, 0), (0, 1), (1, 0), (1, 1)


def view_flat() -> None:
    value = torch.arange(6.0 * 256).view(6, 256)
    flat = lay(value, line(4), Shard(0)).view(-1)
    assert flat.shape == (6 * 256,)
    assert torch.equal(flat.full_tensor(), value.view(-1))


def test_view_of_an_uneven_dim_is_right_on_all_ranks() -> None:
    """Case 4: view(-1) of (6, 256) cut over 4 failed only on some ranks."""
    run_ranks(4, view_flat)


def uneven_gather() -> None:
    value = torch.arange(50.0).view(5, 10)
    gathered = lay(value, line(4), Shard(0)).redistribute(placements=[Replicate()])
    assert tuple(gathered.to_local().shape) == (5, 10)
    assert torch.equal(gathered.to_local(), value)


def test_gather_of_five_rows_over_four_ranks() -> None:
    """Case 5: (5, 10) gathered over 4 ranks came back with 8 rows."""
    run_ranks(4, uneven_gather)


def narrow_last_piece() -> None:
    layer = parallelize_module(nn.Linear(9, 3), line(2), RowwiseParallel(input_layouts=Replicate()))
    local = layer.weight.to_local()
    assert tuple(local.shape) == ((3, 5), (3, 4))[line(2).get_local_rank("tp")]
    assert local.is_contiguous()
    assert local.stride() == (local.shape[1], 1)
    x = torch.randn(2, 9, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight.full_tensor(), layer.bias.full_tensor()))


def test_local_strides_fit_the_local_shape() -> None:
    """Case 7: the narrower last piece kept the strides of a full one."""
    run_ranks(2, narrow_last_piece)


def through_local() -> None:
    mesh = line(2)

    def gradient(detour: bool) -> torch.Tensor:
        x = DTensor.from_local(torch.tensor([1.0, 2.0]), mesh, [Partial()]).requires_grad_()
        y = x * 1
        if detour:
            y = DTensor.from_local(y.to_local(), mesh, [Partial()])
        y.square().sum().backward()
        assert x.grad.placements == (Replicate(),)
        return x.grad.to_local()

    assert torch.equal(gradient(True), gradient(False))
    assert gradient(True).tolist() == [4.0, 8.0]  # the values are [2, 4]


def test_partial_through_a_local_tensor_has_the_same_gradient() -> None:
    """Case 8: partial -> to_local -> from_local(partial) gave another gradient than the direct way."""
    run_ranks(2, through_local)


def partial_to_partial() -> None:
    mesh = line(2)
    x = DTensor.from_local(torch.tensor([1.0, 2.0]), mesh, [Partial()]).requires_grad_()
    y = x.redistribute(mesh, [Partial()]) * 1
    with record_collectives() as log:
        y.backward(lay(torch.ones(2), mesh, Replicate()))
    assert not log
    assert x.grad.placements == (Replicate(),)
    assert x.grad.to_local().tolist() == [1.0, 1.0]


def test_partial_to_the_same_partial_costs_nothing() -> None:
    """Case 9: its backward labelled the gradient wrongly."""
    run_ranks(2, partial_to_partial)


def to_partial_and_back() -> None:
    mesh = line(2)
    x = lay(torch.tensor([1.0, 2.0]), mesh, Replicate()).requires_grad_()
    with record_collectives() as forward:
        pending = x.redistribute(mesh, [Partial()])
    assert not forward
    assert pending.placements == (Partial(),)
    with record_collectives() as settle:
        whole = pending.redistribute(mesh, [Replicate()])
    assert dict(settle.counts) == {"all_reduce": 1}
    assert whole.to_local().tolist() == [1.0, 2.0]
    with record_collectives() as backward:
        (whole * 3).sum().backward()
    assert not backward  # the gradient is replicated all the way
    assert x.grad.placements == (Replicate(),)
    assert x.grad.to_local().tolist() == [3.0, 3.0]


def test_what_is_recorded_is_what_runs() -> None:
    """Case 11: backward redistribution to partial was skipped, and a debugging tool told of another placement."""
    run_ranks(2, to_partial_and_back)


def reduced_first() -> None:
    mesh = line(2)
    local = torch.tensor([[1.0, -5.0], [2.0, 3.0]])[mesh.get_local_rank("tp")]
    x = DTensor.from_local(local, mesh, [Partial()])  # the values are [3, -2]
    assert x.max().item() == 3.0
    assert x.amin().item() == -2.0
    assert x.abs().max().item() == 3.0
    assert x.norm().item() == torch.tensor([3.0, -2.0]).norm().item()
    assert x.norm(float("inf")).item() == 3.0
    assert x.argmax().item() == 0


def test_nonlinear_reductions_of_a_pending_sum() -> None:
    """Case 12: max, min and norm were taken before the pending sum."""
    run_ranks(2, reduced_first)


def truncated() -> None:
    x = DTensor.from_local(torch.tensor([0.6]), line(4), [Partial()])
    assert x.to(torch.int64).full_tensor().tolist() == [2]
    assert x.int().full_tensor().tolist() == [2]
    assert x.bool().full_tensor().tolist() == [True]


def test_a_cast_to_integers_comes_after_the_pending_sum() -> None:
    """Case 14: four ranks of 0.6 became 0."""
    run_ranks(4, truncated)


def widened() -> None:
    x = DTensor.from_local(torch.tensor([1.0, 2.0**-9]).bfloat16(), line(2), [Partial()])
    with record_collectives() as log:
        wide = x.float()
    assert not log
    assert wide.is_partial()
    with record_collectives() as log:
        result = wide.full_tensor()
    assert [(record.kind, record.dtype.removeprefix("torch.")) for record in log] == [("all_reduce", "float32")]
    assert result.tolist() == [2.0, 2.0**-8]


def test_a_widening_cast_leaves_the_sum_pending() -> None:
    """Case 15: a cast to float32 forced the reduction in bfloat16."""
    run_ranks(2, widened)


def flattened_and_back() -> None:
    value = torch.randn(3, 8, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for layout in (
        Layout.from_device_mesh(square())(None, ("p", "q")),
        Layout.from_device_mesh(square())(None, ("q", "p")),
    ):
        x = distribute_tensor(value, layout, src_data_rank=None).requires_grad_()
        back = x.flatten(0, 1).unflatten(0, (3, 8))
        assert back.shape == x.shape
        assert torch.equal(back.full_tensor().detach(), value)
        last = x.flatten(1, 2).unflatten(1, (8, 2))
        assert last.layout is layout
        assert torch.equal(last.full_tensor().detach(), value)
        (back.square() + last.exp()).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), 2 * value + value.exp())


def test_unflatten_is_the_inverse_of_flatten() -> None:
    """Case 17: with two axes on one dim it picked the wrong dim."""
    run_ranks(4, flattened_and_back)


def local_function() -> None:
    mesh = line(2)
    x = lay(torch.arange(5.0), mesh, Shard(0)).requires_grad_()
    y = DTensor.from_local(x.to_local() * 2, mesh, [Shard(0)], shape=x.shape)
    assert y.shape == (5,)
    assert torch.equal(y.full_tensor().detach(), torch.arange(5.0) * 2)
    y.square().sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.arange(5.0) * 8)


def test_a_local_function_on_uneven_pieces_keeps_the_shape() -> None:
    """Case 18: local_map took the global shape for twice this rank's; from_local(shape=) says it."""
    run_ranks(2, local_function)


def wide_gradient() -> None:
    mesh = line(2)
    x = lay(torch.ones(4).bfloat16(), mesh, Shard(0)).requires_grad_()
    weight = lay(torch.ones(4, 4).bfloat16(), mesh, Shard(1))
    gathered = x.redistribute(mesh, [Replicate()], backward_dtype=torch.float32)
    loss = F.linear(gathered, weight.T).sum()
    with record_collectives() as log:
        loss.backward()
    assert log
    assert {record.dtype.removeprefix("torch.") for record in log} == {"float32"}, log
    assert x.grad.dtype is torch.bfloat16
    assert x.grad.full_tensor().tolist() == [4.0] * 4
    y = DTensor.from_local(torch.ones(4).bfloat16(), mesh, [Replicate()]).requires_grad_()
    with record_collectives() as log:
        y.redistribute(mesh, [Shard(0)], backward_dtype=torch.float32).sum().backward()
    assert [record.dtype.removeprefix("torch.") for record in log] == ["float32"]


def test_the_gradient_travels_in_the_dtype_asked_for() -> None:
    """Case 19: redistribute(backward_dtype=) was ignored in the backward."""
    run_ranks(2, wide_gradient)


def stacked() -> int:
    x = lay(torch.ones(4, 2), line(2), Shard(0))
    torch.stack([x, x])
    before = dispatch_cache_info().misses
    torch.stack([x, x])
    return dispatch_cache_info().misses - before


def test_stack_is_planned_once() -> None:
    """Case 21: torch.stack missed the sharding cache on every call."""
    assert run_ranks(2, stacked) == [0, 0]


def asked_without_a_move() -> None:
    mesh = line(2)
    rank = mesh.get_local_rank("tp")
    x = lay(torch.ones(3), mesh, Replicate()).requires_grad_()
    (x.to_local(grad_placements=[Partial()]) * (rank + 1)).sum().backward()
    assert x.grad.placements == (Replicate(),)
    assert x.grad.to_local().tolist() == [3.0] * 3
    y = lay(torch.ones(3), mesh, Replicate()).requires_grad_()
    (y.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Partial()]) * (rank + 1)).sum().backward()
    assert y.grad.to_local().tolist() == [3.0] * 3


def test_gradient_placements_apply_without_a_forward_move() -> None:
    """Case 22: a redistribution to the same placements returned early and dropped them."""
    run_ranks(2, asked_without_a_move)
