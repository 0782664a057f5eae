"""Permutation of tokens by expert as ops of torch: native on the CPU, twins in torch's own ops everywhere else.

`hp_kernels::moe_sort` finds the rows, `hp_kernels::moe_dispatch` fills them, `hp_kernels::moe_combine` sums them; dispatch and the
unweighted combine are each other's gradients, and `hp_kernels::moe_combine_backward` is that of the weighted one.
"""

from __future__ import annotations

from typing import Any

import torch

from hp_kernels.errors import KernelArgumentError
from hp_kernels.loading import native
from hp_kernels.platform.torch import npu
from hp_kernels.platform.torch.arrays import array_of, floating_types, on_cpu, require_dense, require_one_device

__all__ = ["combine_backward_twin", "combine_twin", "dispatch_twin", "permute", "sort_twin", "unpermute"]


def permute(
    tokens: torch.Tensor, experts: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`hp_kernels.moe_permute` for tensors of torch, whose shapes have been checked already."""
    experts = experts.unsqueeze(1) if experts.dim() == 1 else experts
    require_one_device("moe_permute", (tokens, experts))
    require_dense("moe_permute", tokens, experts)
    _require_floats("moe_permute", "tokens", tokens)
    if experts.dtype not in (torch.int64, torch.int32):
        raise KernelArgumentError(f"moe_permute: experts are {experts.dtype}; they must be int64 or int32.")
    fused = npu.fused_permute(tokens, experts) if npu.on_npu(tokens) else None
    if fused is not None:
        return *fused, *_counted(experts.flatten(), num_experts)
    rows, counts, offsets = torch.ops.hp_kernels.moe_sort(experts, num_experts)
    return torch.ops.hp_kernels.moe_dispatch(tokens, rows), rows, counts, offsets


def unpermute(permuted: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """`hp_kernels.moe_unpermute` for tensors of torch, whose shapes have been checked already."""
    given = (permuted, rows) if weights is None else (permuted, rows, weights)
    require_one_device("moe_unpermute", given)
    require_dense("moe_unpermute", *given)
    _require_floats("moe_unpermute", "permuted", permuted)
    if rows.dtype != torch.int64:
        raise KernelArgumentError(
            f"moe_unpermute: rows are {rows.dtype}; they must be int64, as moe_permute gives them."
        )
    allowed = (torch.float64,) if permuted.dtype == torch.float64 else (torch.float32, permuted.dtype)
    if weights is not None and weights.dtype not in allowed:
        raise KernelArgumentError(
            f"moe_unpermute: weights are {weights.dtype}; with {permuted.dtype} they must be {' or '.join(map(str, allowed))}."
        )
    fused = npu.fused_unpermute(permuted, rows, weights) if npu.on_npu(permuted) else None
    result: torch.Tensor = torch.ops.hp_kernels.moe_combine(permuted, rows, weights) if fused is None else fused
    return result


def sort_twin(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, counts and offsets in torch's own ops."""
    flat = experts.flatten()
    if flat.device.type == "cpu" and flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < num_experts:
        raise KernelArgumentError(
            f"experts: they name {int(flat.min())} to {int(flat.max())}, there are 0 to {num_experts - 1}"
        )
    order = torch.argsort(flat, stable=True)
    return _inverse(order).view(experts.shape), *_counted(flat, num_experts)


def dispatch_twin(tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """permuted[rows[token, k]] = tokens[token], in torch's own ops."""
    if rows.shape[1] == 0:
        return tokens.new_empty(0, tokens.shape[1])
    return tokens.index_select(0, _inverse(rows.flatten()) // rows.shape[1])


def combine_twin(permuted: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Sum of weights[token, k] * permuted[rows[token, k]] in the order of k, in torch's own ops."""
    wide = _wide(permuted.dtype)
    total: torch.Tensor | None = None
    for k in range(rows.shape[1]):
        term = permuted.index_select(0, rows[:, k]).to(wide)
        if weights is not None:
            term = term * weights[:, k : k + 1].to(wide)
        total = term if total is None else total + term
    if total is None:
        return permuted.new_zeros(rows.shape[0], permuted.shape[1])
    return total.to(permuted.dtype)


def combine_backward_twin(
    grad_out: torch.Tensor, permuted: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the rows and of the weights, in torch's own ops and in the order that `moe_unpermute` states."""
    wide = _wide(permuted.dtype)
    grad = grad_out.to(wide).unsqueeze(1)
    own = (weights.to(wide).unsqueeze(-1) * grad).to(permuted.dtype).flatten(0, 1)
    products = grad * permuted.index_select(0, rows.flatten()).to(wide).view(*rows.shape, -1)
    while products.shape[-1] > 1:
        half = (products.shape[-1] + 1) // 2
        lower, upper = products[..., :half], products[..., half:]
        products = torch.cat([lower[..., : upper.shape[-1]] + upper, lower[..., upper.shape[-1] :]], -1)
    return own.index_select(0, _inverse(rows.flatten())), products.sum(-1).to(weights.dtype)


def _counted(flat: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts and offsets."""
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int64))
    return counts, torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _inverse(order: torch.Tensor) -> torch.Tensor:
    """The inverse of a permutation."""
    places = torch.arange(order.numel(), device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _require_floats(name: str, what: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in floating_types:
        raise KernelArgumentError(
            f"{name}: {what} are {tensor.dtype}; they must be float32, bfloat16, float16 or float64."
        )


def _require_permutation(rows: torch.Tensor) -> None:
    """What the native kernels check, for the twins on the CPU; elsewhere it would need a synchronisation."""
    if rows.device.type == "cpu" and not torch.equal(rows.flatten().sort().values, torch.arange(rows.numel())):
        raise KernelArgumentError(f"rows: they must hold every row from 0 to {rows.numel() - 1} once")


@torch.library.custom_op("hp_kernels::moe_sort", mutates_args=())
def _sort_op(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    module = native() if on_cpu(experts) else None
    if module is None:
        return sort_twin(experts, num_experts)
    rows = torch.empty(experts.shape, dtype=torch.int64)
    counts = torch.empty(num_experts, dtype=torch.int64)
    offsets = torch.empty(num_experts + 1, dtype=torch.int64)
    module.moe_sort(*map(array_of, (experts, rows, counts, offsets)))
    return rows, counts, offsets


@_sort_op.register_fake
def _(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device=experts.device)

    return integers(*experts.shape), integers(num_experts), integers(num_experts + 1)


@torch.library.custom_op("hp_kernels::moe_dispatch", mutates_args=())
def _dispatch_op(tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    module = native() if on_cpu(tokens) else None
    if module is None:
        _require_permutation(rows)
        return dispatch_twin(tokens, rows)
    permuted = tokens.new_empty(rows.numel(), tokens.shape[1])
    module.moe_dispatch(*map(array_of, (tokens, rows, permuted)))
    return permuted


@_dispatch_op.register_fake
def _(tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return tokens.new_empty(rows.numel(), tokens.shape[1])


@torch.library.custom_op("hp_kernels::moe_combine", mutates_args=())
def _combine_op(permuted: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    module = native() if on_cpu(permuted) else None
    if module is None:
        _require_permutation(rows)
        return combine_twin(permuted, rows, weights)
    out = permuted.new_empty(rows.shape[0], permuted.shape[1])
    module.moe_combine(
        array_of(permuted), array_of(rows), None if weights is None else array_of(weights), array_of(out)
    )
    return out


@_combine_op.register_fake
def _(permuted: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    return permuted.new_empty(rows.shape[0], permuted.shape[1])


@torch.library.custom_op("hp_kernels::moe_combine_backward", mutates_args=())
def _combine_backward_op(
    grad_out: torch.Tensor, permuted: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    module = native() if on_cpu(permuted) else None
    if module is None:
        return combine_backward_twin(grad_out, permuted, rows, weights)
    grads = torch.empty_like(permuted), torch.empty_like(weights)
    module.moe_combine_backward(*map(array_of, (grad_out, permuted, rows, weights, *grads)))
    return grads


@_combine_backward_op.register_fake
def _(
    grad_out: torch.Tensor, permuted: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(permuted), torch.empty_like(weights)


def _save_dispatch(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _dispatch_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    [rows] = ctx.saved_tensors
    return torch.ops.hp_kernels.moe_combine(grad.contiguous(), rows, None), None


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    permuted, rows, weights = inputs
    ctx.weighted = weights is not None
    # The rows themselves are only needed for the gradient of the weights.
    ctx.save_for_backward(rows, *((permuted, weights) if ctx.weighted else ()))


def _combine_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor | None]:
    if not ctx.weighted:
        return torch.ops.hp_kernels.moe_dispatch(grad.contiguous(), ctx.saved_tensors[0]), None, None
    rows, permuted, weights = ctx.saved_tensors
    if torch.is_grad_enabled():
        # Gradients of gradients are wanted, which the twin's ops have.
        grad_permuted, grad_weights = combine_backward_twin(grad, permuted, rows, weights)
    else:
        grad_permuted, grad_weights = torch.ops.hp_kernels.moe_combine_backward(
            grad.contiguous(), permuted, rows, weights
        )
    return grad_permuted, None, grad_weights


_dispatch_op.register_autograd(_dispatch_backward, setup_context=_save_dispatch)
_combine_op.register_autograd(_combine_backward, setup_context=_save_combine)
