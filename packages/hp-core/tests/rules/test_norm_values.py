"""Norms where the textbook formula goes wrong: at zero, in half precision, and as one message for a list of tensors.

The dense results of torch are the specification.
"""

from __future__ import annotations

import pytest
import torch

from hp_core import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_core.platform.recorder import record_collectives
from hp_core.testing import run_ranks

PLACEMENTS: list[tuple[Placement, Placement]] = [
    (Shard(0), Shard(1)),
    (Replicate(), Shard(0)),
    (Replicate(), Replicate()),
]


def a_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def some_tensors(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in ((8, 6), (7, 3), (4, 4))]


def distributed(tensors: list[torch.Tensor]) -> list[DTensor]:
    mesh = a_mesh()
    return [distribute_tensor(tensor, mesh, places) for tensor, places in zip(tensors, PLACEMENTS, strict=True)]


@pytest.mark.parametrize("order", [2, 3.0])
def test_the_gradient_of_a_norm_of_zeros_is_zero(order: float) -> None:
    def on_rank() -> torch.Tensor:
        zeros = distribute_tensor(torch.zeros(8), a_mesh(), [Shard(0), Replicate()]).requires_grad_()
        torch.linalg.vector_norm(zeros, order).backward()
        return zeros.grad.full_tensor()

    for gradient in run_ranks(4, on_rank):
        assert torch.equal(gradient, torch.zeros(8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_norms_do_not_overflow(dtype: torch.dtype) -> None:
    def on_rank() -> tuple[torch.Tensor, torch.Tensor]:
        values = distribute_tensor(torch.full((4,), 300.0, dtype=dtype), a_mesh(), [Shard(0), Replicate()])
        of_list, _ = torch._foreach_norm([values, values])
        return torch.linalg.vector_norm(values).full_tensor(), of_list.full_tensor()

    dense = torch.linalg.vector_norm(torch.full((4,), 300.0, dtype=dtype))
    for alone, of_list in run_ranks(4, on_rank):
        assert alone.dtype == of_list.dtype == dtype
        assert alone == of_list == dense


def test_the_norms_of_a_list_are_reduced_in_one_message() -> None:
    def on_rank() -> tuple[list[torch.Tensor], int]:
        tensors = distributed(some_tensors())
        with record_collectives() as log:
            norms = torch._foreach_norm(tensors)
        return [norm.full_tensor() for norm in norms], len(log)

    dense = torch._foreach_norm(some_tensors())
    for norms, messages in run_ranks(4, on_rank):
        torch.testing.assert_close(norms, list(dense))
        assert messages == 1


def test_the_gradients_of_the_norms_of_a_list() -> None:
    def weighted_gradients(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        norms = torch._foreach_norm(tensors)
        sum(weight * norm for weight, norm in enumerate(norms, 1)).backward()
        return [tensor.grad for tensor in tensors]

    def on_rank() -> list[torch.Tensor]:
        tensors = [tensor.requires_grad_() for tensor in distributed(some_tensors())]
        return [gradient.full_tensor() for gradient in weighted_gradients(tensors)]

    dense = weighted_gradients([tensor.requires_grad_() for tensor in some_tensors()])
    for gradients in run_ranks(4, on_rank):
        torch.testing.assert_close(gradients, dense)


def test_a_lone_factor_scales_every_tensor_of_a_list() -> None:
    """As gradient clipping does; a factor that is pending is summed first."""

    def on_rank(pending: bool) -> list[torch.Tensor]:
        tensors = distributed(some_tensors())
        mesh = a_mesh()
        if pending:
            factor = DTensor.from_local(torch.tensor(0.125, dtype=torch.float64), mesh, [Partial(), Partial()])
        else:
            factor = distribute_tensor(torch.tensor(0.5, dtype=torch.float64), mesh, [Replicate(), Replicate()])
        torch._foreach_mul_(tensors, factor)
        return [tensor.full_tensor() for tensor in tensors]

    dense = [tensor * 0.5 for tensor in some_tensors()]
    for pending in (False, True):
        for scaled in run_ranks(4, on_rank, pending):
            torch.testing.assert_close(scaled, dense)
