"""Extrema over a dim of which each rank holds a piece: values, where they are, and how a gradient is shared among ties.

Pieces may be empty. A NaN wins over all numbers, as in the dense ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import wrap_torch_function

from hp_core.platform.protocol import Group
from hp_core.platform.torch.collectives import TorchCollectives
from hp_core.platform.torch.pieces import gather_with_indices

__all__ = [
    "aminmax_over_ranks",
    "argument_over_ranks",
    "extremum_over_ranks",
    "extremum_share",
    "selection_over_ranks",
]

_all_reduce = TorchCollectives().all_reduce
_NOWHERE = torch.iinfo(torch.int64).max
"""Index of the extremum of nothing: later than any."""


@wrap_torch_function(lambda tensor, *_, **__: (tensor,))
def extremum_share(tensor: torch.Tensor, dim: Sequence[int], keepdim: bool, largest: bool) -> torch.Tensor:
    """The extremum of this rank's piece; of an empty one, what loses against every number."""
    return _extremum(tensor, tuple(dim), keepdim, largest)


@wrap_torch_function(lambda tensor, *_, **__: (tensor,))
def extremum_over_ranks(
    tensor: torch.Tensor,
    dim: Sequence[int],
    keepdim: bool,
    largest: bool,
    nan_ties: bool = False,
    group: Group | None = None,
) -> torch.Tensor:
    """The extremum of all ranks' pieces; its gradient is shared equally among all elements that equal it.

    Args:
        tensor: this rank's piece.
        dim: dims to reduce.
        keepdim: whether they stay, with size 1.
        largest: the maximum, or the minimum.
        nan_ties: whether elements that are NaN equal an extremum that is NaN (as in `max()`, not in `amax()`).
        group: ranks that hold the pieces; None: this one alone.
    """
    result: torch.Tensor = _Extremum.apply(tensor, tuple(dim), keepdim, largest, nan_ties, group)  # type: ignore[no-untyped-call]
    return result


def aminmax_over_ranks(tensor: torch.Tensor, *, dim: Sequence[int], keepdim: bool, group: Group) -> Any:
    """Both extrema of all ranks' pieces."""
    lowest, highest = (extremum_over_ranks(tensor, dim, keepdim, largest, False, group) for largest in (False, True))
    return torch.return_types.aminmax((lowest, highest))


def selection_over_ranks(
    tensor: torch.Tensor, *, dim: int, keepdim: bool, largest: bool, start: int, group: Group, position: int
) -> Any:
    """The extremum along a dim and the index of the first element that is it, which gets the gradient.

    Args:
        tensor: this rank's piece.
        dim: the dim.
        keepdim: whether it stays, with size 1.
        largest: the maximum, or the minimum.
        start: where this rank's piece starts along the dim.
        group: ranks that hold the pieces.
        position: this rank's place in the group.
    """
    if tensor.shape[dim]:
        values, indices = tensor.max(dim) if largest else tensor.min(dim)
        indices = indices + start
    else:
        values = _extremum(tensor, (dim,), False, largest)
        indices = torch.full_like(values, _NOWHERE, dtype=torch.int64)
    values, indices = _first(values, indices, largest, group, position)
    if keepdim:
        values, indices = values.unsqueeze(dim), indices.unsqueeze(dim)
    kind = torch.return_types.max if largest else torch.return_types.min
    return kind((values, indices))


def argument_over_ranks(
    tensor: torch.Tensor,
    *,
    dim: int | None,
    keepdim: bool,
    largest: bool,
    starts: Sequence[int],
    shape: Sequence[int],
    group: Group,
    position: int,
) -> torch.Tensor:
    """The index of the first element that is the extremum, along a dim or in the flattened tensor of `shape`."""
    tensor = tensor.detach()
    if dim is not None:
        _, found = selection_over_ranks(
            tensor, dim=dim, keepdim=keepdim, largest=largest, start=starts[dim], group=group, position=position
        )
        return found  # type: ignore[no-any-return]
    index = tensor.new_full((), _NOWHERE, dtype=torch.int64)
    if tensor.numel():
        place = torch.unravel_index(tensor.argmax() if largest else tensor.argmin(), tensor.shape)
        index = index.zero_()
        for one, start, size in zip(place, starts, shape, strict=True):
            index = index * size + one + start
    _, index = _first(_extremum(tensor, tuple(range(tensor.dim())), False, largest), index, largest, group, position)
    return index.reshape([1] * tensor.dim()) if keepdim else index


def _first(
    values: torch.Tensor, indices: torch.Tensor, largest: bool, group: Group, position: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the extrema of all ranks the most extreme one, and of those the one with the lowest index."""
    values, indices = gather_with_indices(values, indices, group, position)
    known = values.detach()
    best = known.amax(0) if largest else known.amin(0)
    wins = (known == best) | (known.isnan() & best.isnan())
    winner = torch.where(wins, indices, _NOWHERE).argmin(0, keepdim=True)
    return values.gather(0, winner).squeeze(0), indices.gather(0, winner).squeeze(0)


def _extremum(tensor: torch.Tensor, dims: tuple[int, ...], keepdim: bool, largest: bool) -> torch.Tensor:
    if not dims or all(tensor.shape[d] for d in dims):
        return tensor.amax(dims, keepdim) if largest else tensor.amin(dims, keepdim)
    shape = [1 if d in dims else size for d, size in enumerate(tensor.shape) if keepdim or d not in dims]
    if tensor.is_floating_point():
        worst: Any = float("-inf") if largest else float("inf")
    elif tensor.dtype == torch.bool:
        worst = not largest
    else:
        limits = torch.iinfo(tensor.dtype)
        worst = limits.min if largest else limits.max
    result = tensor.new_full(shape, worst)
    # an empty piece still takes part in the graph, so that its (empty) gradient exists
    return result + tensor.sum() * 0 if tensor.requires_grad else result


class _Extremum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        dims: tuple[int, ...],
        keepdim: bool,
        largest: bool,
        nan_ties: bool,
        group: Group | None,
    ) -> torch.Tensor:
        kept = _extremum(tensor, dims, True, largest)
        if kept is tensor:
            kept = kept.clone()
        if group is not None and kept.numel():
            _all_reduce(kept, "max" if largest else "min", group)
        ctx.save_for_backward(tensor, kept)
        ctx.dims, ctx.nan_ties, ctx.group = dims, nan_ties, group
        return kept if keepdim else kept.squeeze(dims)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        tensor, kept = ctx.saved_tensors
        ties = tensor == kept
        if ctx.nan_ties:
            ties |= tensor.isnan() & kept.isnan()
        # counted only now: no gradient, no message
        count = ties.sum(ctx.dims, keepdim=True)
        if ctx.group is not None and count.numel():
            _all_reduce(count, "sum", ctx.group)
        share = gradient.reshape(kept.shape) / count
        # max() gives 0 to what isn't the extremum, amax() 0 times the share, which may be NaN
        result = share.new_zeros(()).where(~ties, share) if ctx.nan_ties else ties * share
        return result, None, None, None, None, None
