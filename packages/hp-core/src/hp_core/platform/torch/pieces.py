"""What each rank knows of its own piece, gathered: the small exchange behind reductions and scans over cut dims.

Where a sum over ranks won't do (products, indices, prefixes), every rank reduces its own piece, the results are stacked
along a new first dim on all ranks, and each finishes alike. The bytes are those of the reduced shape, once per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hp_core.platform.protocol import Group
from hp_core.platform.torch.collectives import TorchCollectives

__all__ = ["gather_pieces", "gather_with_indices", "joined"]

_collectives = TorchCollectives()


def gather_pieces(own: torch.Tensor, group: Group, position: int, *, varies: bool = False) -> torch.Tensor:
    """Stack what all members of `group` hold: [members, ...], in group order, with its gradient.

    Args:
        own: this rank's tensor; of one shape on all ranks.
        group: the ranks.
        position: this rank's place in it.
        varies: whether the ranks do different things with the stack, so that its gradients are contributions to a sum. If
            not, the gradient is equal on all ranks, and the backward needs no communication.
    """
    stacked: torch.Tensor = _Gather.apply(group, position, varies, own)[0]  # type: ignore[no-untyped-call]
    return stacked


def gather_with_indices(
    values: torch.Tensor, indices: torch.Tensor, group: Group, position: int, *, varies: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack values and, in the same message, what has no gradient; see `gather_pieces`."""
    both: tuple[torch.Tensor, torch.Tensor] = _Gather.apply(group, position, varies, values, indices)  # type: ignore[no-untyped-call]
    return both


def joined(own: torch.Tensor, stacked: torch.Tensor) -> torch.Tensor:
    """`own`, which depends on `stacked` in name: so that the backward of the stack runs on every rank, or on none."""
    result: torch.Tensor = _Join.apply(own, stacked)  # type: ignore[no-untyped-call]
    return result


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, position: int, varies: bool, *own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.position, ctx.varies, ctx.others = group, position, varies, len(own) - 1
        stacked = _stacked_together(own, group) if len(own) > 1 else (_stacked(own[0].contiguous(), group),)
        ctx.mark_non_differentiable(*stacked[1:])
        return stacked

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        if ctx.varies and gradient.numel():
            own = gradient.new_empty(gradient.shape[1:])
            _collectives.reduce_scatter(own, gradient.contiguous(), "sum", ctx.group)
        else:
            own = gradient[ctx.position]
        return None, None, None, own, *[None] * ctx.others


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, stacked: torch.Tensor) -> torch.Tensor:
        ctx.like = stacked.shape
        return own.view_as(own)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, Any]:
        return gradient, gradient.new_zeros(ctx.like)


def _stacked(own: torch.Tensor, group: Group) -> torch.Tensor:
    stacked = own.new_empty((group.size, *own.shape))
    if own.numel():
        _collectives.all_gather(stacked, own, group)
    return stacked


def _stacked_together(own: Sequence[torch.Tensor], group: Group) -> tuple[torch.Tensor, ...]:
    """Stack several tensors by one message of their bytes."""
    as_bytes = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in own]
    parts = _stacked(torch.cat(as_bytes), group).split([part.numel() for part in as_bytes], 1)
    return tuple(
        # a copy, since a view as another type needs an aligned start
        part.clone(memory_format=torch.contiguous_format).view(-1).view(tensor.dtype).view((group.size, *tensor.shape))
        for part, tensor in zip(parts, own, strict=True)
    )
