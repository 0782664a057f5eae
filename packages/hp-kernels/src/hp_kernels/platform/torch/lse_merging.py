"""The merge of attention partials as ops of torch: native on the CPU, its twin in torch's own ops everywhere else.

`hp_kernels::lse_merge`, `hp_kernels::lse_merge_` and `hp_kernels::lse_merge_backward` work on [n0, n1, n2, dim] and an lse whose
last two dims may be swapped (`swapped`); `hp_kernels.lse_merge` brings every layout into that form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hp_kernels.errors import KernelArgumentError
from hp_kernels.loading import native
from hp_kernels.platform.torch import npu
from hp_kernels.platform.torch.arrays import array_of, floating_types, on_cpu, require_dense, require_one_device

__all__ = ["merge", "merge_backward_twin", "merge_in_place", "merge_twin"]


def merge(
    name: str,
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    grid: Sequence[int],
    lse_grid: Sequence[int],
    swapped: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`hp_kernels.lse_merge` for tensors of torch, whose shapes have been compared already."""
    _check(name, out_a, lse_a, out_b, lse_b)
    if out_a.dtype != torch.float32 and out_b.dtype == torch.float32:
        # The merge is symmetric, and the kernels have the wider partial first.
        out_a, lse_a, out_b, lse_b = out_b, lse_b, out_a, lse_a
    out, lse = torch.ops.hp_kernels.lse_merge(
        out_a.view(grid), lse_a.view(lse_grid), out_b.view(grid), lse_b.view(lse_grid), swapped
    )
    return out.view(out_a.shape), lse.view(lse_a.shape)


def merge_in_place(
    name: str,
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    grid: Sequence[int],
    lse_grid: Sequence[int],
    swapped: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`hp_kernels.lse_merge_` for tensors of torch, whose shapes have been compared already."""
    _check(name, out_a, lse_a, out_b, lse_b)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (out_a, lse_a, out_b, lse_b)):
        raise KernelArgumentError(f"{name}: not differentiable; use lse_merge, or call it under torch.no_grad().")
    if out_a.dtype not in (out_b.dtype, torch.float32):
        raise KernelArgumentError(
            f"{name}: out_a is {out_a.dtype} and can't hold a merge with {out_b.dtype}; make the running result float32."
        )
    torch.ops.hp_kernels.lse_merge_(
        out_a.view(grid), lse_a.view(lse_grid), out_b.view(grid), lse_b.view(lse_grid), swapped
    )
    return out_a, lse_a


def merge_twin(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor, swapped: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op in torch's own ops, differentiable by itself; arguments as for `hp_kernels::lse_merge`."""
    weight_a, weight_b, lse = _weights(lse_a, lse_b)
    terms = [_scaled(out, _per_row(weight, swapped)) for out, weight in ((out_a, weight_a), (out_b, weight_b))]
    return (terms[0] + terms[1]).to(torch.promote_types(out_a.dtype, out_b.dtype)), lse


def merge_backward_twin(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    swapped: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients in torch's own ops, differentiable in turn; arguments as for `hp_kernels::lse_merge_backward`.

    d out / d out_x = w_x; d out / d lse_a = w_a w_b (out_a - out_b), and the negative of it for lse_b; d lse / d lse_x = w_x.
    """
    weight_a, weight_b, _ = _weights(lse_a, lse_b)
    wide = lse_a.dtype
    product = (grad_out.to(wide) * (out_a.to(wide) - out_b.to(wide))).sum(-1)
    both = (weight_a != 0) & (weight_b != 0)
    slope = torch.where(both, weight_a * weight_b * (product.transpose(1, 2) if swapped else product), 0)
    own = torch.zeros_like(lse_a) if grad_lse is None else grad_lse
    grads = []
    for out, weight, sign in ((out_a, weight_a, 1), (out_b, weight_b, -1)):
        grads.append(_scaled(grad_out, _per_row(weight, swapped)).to(out.dtype))
        grads.append(torch.where(weight == 0, 0, sign * slope + weight * own))
    return grads[0], grads[1], grads[2], grads[3]


def _weights(lse_a: torch.Tensor, lse_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """exp(lse_x - lse) for both, and lse; no NaN where both are -inf, nor in the gradients that torch derives."""
    neither = (lse_a == -torch.inf) & (lse_b == -torch.inf)
    safe_a, safe_b = (torch.where(neither, 0, lse) for lse in (lse_a, lse_b))
    lse = torch.logaddexp(safe_a, safe_b)
    weights = [torch.where(neither, 0, torch.exp(part - lse)) for part in (safe_a, safe_b)]
    return weights[0], weights[1], torch.where(neither, -torch.inf, lse)


def _per_row(weight: torch.Tensor, swapped: bool) -> torch.Tensor:
    """[n0, n1, n2, 1] of an lse's shape."""
    return (weight.transpose(1, 2) if swapped else weight).unsqueeze(-1)


def _scaled(out: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What has no weight doesn't contribute, even NaN: neither to the result nor to a gradient."""
    return torch.where(weight == 0, 0, torch.where(weight == 0, 0, out.to(weight.dtype)) * weight)


def _check(name: str, out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> None:
    tensors = (out_a, lse_a, out_b, lse_b)
    require_one_device(name, tensors)
    require_dense(name, *tensors)
    for what, out in (("out_a", out_a), ("out_b", out_b)):
        if out.dtype not in floating_types:
            raise KernelArgumentError(
                f"{name}: {what} is {out.dtype}; it must be float32, bfloat16, float16 or float64."
            )
    if out_a.dtype != out_b.dtype and {out_a.dtype, out_b.dtype} not in (
        {torch.float32, torch.bfloat16},
        {torch.float32, torch.float16},
    ):
        raise KernelArgumentError(
            f"{name}: out_a is {out_a.dtype} and out_b {out_b.dtype}; they must be equal, or one float32 and the other short."
        )
    wide = torch.float64 if out_a.dtype == torch.float64 else torch.float32
    for what, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if lse.dtype != wide:
            raise KernelArgumentError(f"{name}: {what} is {lse.dtype}; with {out_a.dtype} it must be {wide}.")


@torch.library.custom_op("hp_kernels::lse_merge", mutates_args=())
def _merge_op(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor, swapped: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    module = native() if on_cpu(out_a) else None
    if module is None:
        launched = npu.lse_merge(out_a, lse_a, out_b, lse_b, swapped) if npu.on_npu(out_a) else None
        return launched or merge_twin(out_a, lse_a, out_b, lse_b, swapped)
    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
    module.lse_merge(*map(array_of, (out_a, lse_a, out_b, lse_b, out, lse)), swapped)
    return out, lse


@_merge_op.register_fake
def _(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor, swapped: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(out_a), torch.empty_like(lse_a)


@torch.library.custom_op("hp_kernels::lse_merge_", mutates_args=("out_a", "lse_a"))
def _merge_in_place_op(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor, swapped: bool
) -> None:
    module = native() if on_cpu(out_a) else None
    if module is None:
        out, lse = merge_twin(out_a, lse_a, out_b, lse_b, swapped)
        out_a.copy_(out)
        lse_a.copy_(lse)
        return
    result = array_of(out_a), array_of(lse_a)
    module.lse_merge(*result, array_of(out_b), array_of(lse_b), *result, swapped)


@_merge_in_place_op.register_fake
def _(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor, swapped: bool) -> None:
    return None


@torch.library.custom_op("hp_kernels::lse_merge_backward", mutates_args=())
def _merge_backward_op(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    swapped: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    module = native() if on_cpu(out_a) else None
    if module is None:
        return merge_backward_twin(grad_out, grad_lse, out_a, lse_a, out_b, lse_b, swapped)
    grads = torch.empty_like(out_a), torch.empty_like(lse_a), torch.empty_like(out_b), torch.empty_like(lse_b)
    module.lse_merge_backward(
        array_of(grad_out),
        None if grad_lse is None else array_of(grad_lse),
        *map(array_of, (out_a, lse_a, out_b, lse_b, *grads)),
        swapped,
    )
    return grads


@_merge_backward_op.register_fake
def _(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    swapped: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(out_a), torch.empty_like(lse_a), torch.empty_like(out_b), torch.empty_like(lse_b)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.swapped = inputs
    ctx.save_for_backward(*tensors)
    # Where only one of the two results is used, the other's gradient is None rather than zeros.
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(tensors[0])
    if torch.is_grad_enabled():
        # Gradients of gradients are wanted, which the twin's ops have.
        out_a, lse_a, out_b, lse_b = tensors
        return *merge_backward_twin(grad_out, grad_lse, out_a, lse_a, out_b, lse_b, ctx.swapped), None
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    return *torch.ops.hp_kernels.lse_merge_backward(grad_out.contiguous(), grad_lse, *tensors, ctx.swapped), None


_merge_op.register_autograd(_backward, setup_context=_save)
