"""Products, candidates and cumulative ops over a dim of which each rank holds a piece.

A scan runs on each piece alone; the totals of the pieces are gathered, and what lies before a piece is added to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hp_core.platform.protocol import Group
from hp_core.platform.torch.pieces import gather_pieces, gather_with_indices, joined

__all__ = ["cumulative_extremum_over_ranks", "product_over_ranks", "scan_over_ranks", "topk_over_ranks"]


def product_over_ranks(
    tensor: torch.Tensor, *, dim: int | None, keepdim: bool, dtype: torch.dtype | None, group: Group, position: int
) -> torch.Tensor:
    """The product of all ranks' pieces, from the products of each."""
    own = tensor.prod(dtype=dtype) if dim is None else tensor.prod(dim, keepdim, dtype=dtype)
    return gather_pieces(own, group, position).prod(0)


def topk_over_ranks(
    tensor: torch.Tensor,
    *,
    k: int,
    dim: int,
    largest: bool,
    sorted: bool,
    start: int,
    candidates: Sequence[tuple[int, int]],
    group: Group,
    position: int,
) -> Any:
    """The k most extreme elements along a dim, out of the k most extreme of each rank.

    Args:
        tensor: this rank's piece.
        k: how many.
        dim: the dim.
        largest: the largest, or the smallest.
        sorted: whether they come in order.
        start: where this rank's piece starts along the dim.
        candidates: place in the group and number of candidates of each rank that has some, in order of its piece.
        group: ranks that hold the pieces.
        position: this rank's place in the group.
    """
    length = tensor.shape[dim]
    values, indices = tensor.topk(min(k, length), dim, largest)
    width = max(count for _, count in candidates)
    stacks = gather_with_indices(_padded(values, dim, width), _padded(indices + start, dim, width), group, position)
    values, indices = (
        torch.cat([stack[place].narrow(dim, 0, count) for place, count in candidates], dim) for stack in stacks
    )
    best, where = values.topk(k, dim, largest, sorted)
    return torch.return_types.topk((best, indices.gather(dim, where)))


def scan_over_ranks(
    tensor: torch.Tensor,
    *,
    scan: str,
    dim: int,
    dtype: torch.dtype | None,
    before: Sequence[int],
    group: Group,
    position: int,
) -> torch.Tensor:
    """A cumulative sum, product or logarithm of a sum of exponentials; this rank's piece of it.

    Args:
        tensor: this rank's piece.
        scan: "cumsum", "cumprod" or "logcumsumexp".
        dim: the dim.
        dtype: element type to compute in, or None.
        before: places in the group of the ranks whose pieces come before this one.
        group: ranks that hold the pieces.
        position: this rank's place in the group.
    """
    if dtype is not None:
        tensor = tensor.to(dtype)
    run, total, joint, extend = _SCANS[scan]
    own = run(tensor, dim)
    totals = gather_pieces(total(tensor, dim), group, position, varies=True)
    own = joined(own, totals)
    return extend(own, joint(totals[list(before)], 0)) if before else own


def cumulative_extremum_over_ranks(
    tensor: torch.Tensor, *, dim: int, largest: bool, start: int, before: Sequence[int], group: Group, position: int
) -> Any:
    """The cumulative extremum and the index of the last element that is it; this rank's piece. See `scan_over_ranks`."""
    values, indices = tensor.cummax(dim) if largest else tensor.cummin(dim)
    indices = indices + start
    length = tensor.shape[dim]
    if length:
        last, last_index = values.narrow(dim, length - 1, 1), indices.narrow(dim, length - 1, 1)
    else:
        last, last_index = tensor.sum(dim, keepdim=True).to(tensor.dtype), indices.sum(dim, keepdim=True)
    lasts, last_indices = gather_with_indices(last, last_index, group, position, varies=True)
    values = joined(values, lasts)
    if before:
        earlier = lasts[list(before)]
        best, where = (value[-1] for value in (earlier.cummax(0) if largest else earlier.cummin(0)))
        index = last_indices[list(before)].gather(0, where.unsqueeze(0)).squeeze(0)
        own = ((values >= best) if largest else (values <= best)) | values.isnan()
        values, indices = torch.where(own, values, best), torch.where(own, indices, index)
    kind = torch.return_types.cummax if largest else torch.return_types.cummin
    return kind((values, indices))


def _padded(tensor: torch.Tensor, dim: int, width: int) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[dim] = width - shape[dim]
    return torch.cat([tensor, tensor.new_zeros(shape)], dim) if shape[dim] else tensor


def _sum(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return tensor.sum(dim, keepdim=True)


_Step = Callable[[torch.Tensor, int], torch.Tensor]
_SCANS: dict[str, tuple[_Step, _Step, _Step, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "cumsum": (torch.cumsum, _sum, torch.sum, torch.add),
    "cumprod": (torch.cumprod, lambda tensor, dim: tensor.prod(dim, keepdim=True), torch.prod, torch.mul),
    "logcumsumexp": (
        torch.logcumsumexp,
        lambda tensor, dim: tensor.logsumexp(dim, keepdim=True),
        torch.logsumexp,
        torch.logaddexp,
    ),
}
"""The scan of a piece, the total of a piece, the total of totals, and how it is put before a piece."""
