"""Indexing on a rank's part of a tensor: what a rank has it gives, for the rest zeros; what is its own it writes.

A read along a cut dim gives this rank's share of a pending sum. A write clips the indices to the rank's own interval.
Whatever is clipped away still takes part in the graph, so that every rank runs the same backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hp_core.geometry import Box, Interval
from hp_core.platform.protocol import Recut
from hp_core.platform.torch.losses import in_range
from hp_core.platform.torch.recut import cat_recut, recut, recut_pieces, reorder, repeat_recut

__all__ = ["INDEX_OPS"]

Pick = tuple[int, tuple[tuple[int, int, int], ...]]
"""Where an index tensor picks: first dim, and for each dim that it is about the own interval and the global size."""


def read_index(
    tensor: torch.Tensor,
    *tensors: torch.Tensor,
    positions: Sequence[tuple[int, int | None]],
    basic: tuple[Any, ...],
    steps: Sequence[tuple[int, Recut]],
    picks: Sequence[Pick],
    place: int,
) -> torch.Tensor:
    """This rank's share of `x[...]`.

    Args:
        tensor: this rank's part of x.
        *tensors: the index tensors.
        positions: integers at cut dims, last dim first: the local position, or None where another rank has it.
        basic: what is then taken by integers, slices and None.
        steps: how cut dims that were sliced are cut anew.
        picks: where the index tensors pick, one for each.
        place: where the picked dims stand in the result.
    """
    for dim, position in positions:
        if position is not None:
            tensor = tensor.select(dim, position)
        else:
            shape = (*tensor.shape[:dim], *tensor.shape[dim + 1 :])
            tensor = _zeros(shape, tensor)
    tensor = recut(tensor[basic], steps=steps)
    if not picks:
        return tensor
    local, mine = _own_indices(tensors, picks)
    entries: list[Any] = [slice(None)] * tensor.dim()
    for (dim, _), index in zip(picks, local, strict=True):
        entries[dim] = index
    if mine is None:
        return tensor[tuple(entries)]
    if not all(tensor.shape[dim] for dim, _ in picks):
        kept = [size for size, entry in zip(tensor.shape, entries, strict=True) if isinstance(entry, slice)]
        return _zeros((*kept[:place], *mine.shape, *kept[place:]), tensor)
    result = tensor[tuple(entries)]
    after = result.dim() - place - mine.dim()
    return result.masked_fill(~mine.view((*mine.shape, *[1] * after)), 0)


def write_index(
    tensor: torch.Tensor,
    *operands: torch.Tensor,
    basic: tuple[Any, ...] | None,
    shape: Sequence[int],
    parts: Sequence[tuple[int, int, int]],
    picks: Sequence[Pick],
    place: int,
    accumulate: bool,
) -> torch.Tensor:
    """`x[...] = value` for what this rank has of x.

    Args:
        tensor: this rank's part of x, written to.
        *operands: the index tensors, and the value.
        basic: integers, slices and None in local positions; or None if nothing of it is here.
        shape: shape of the value, this rank's part in dims that x is cut along as a whole, without the picked dims.
        parts: what of the value belongs here: (dim of the value, first, number) for each slice of a cut dim.
        picks: where the index tensors pick, one for each.
        place: where the picked dims stand in the value.
        accumulate: whether to add.
    """
    *tensors, value = operands
    for index, (_, intervals) in zip(tensors, picks, strict=True):
        if index.dtype is not torch.bool:  # also by ranks that have nothing to write, so that all raise alike
            size = intervals[0][2]
            in_range(torch.where(index < 0, index + size, index), size, "an index")
    if basic is None:
        tensor.narrow(0, 0, 0).copy_(_nothing(value))
        return tensor
    tensors, picks = _spread_masks(tensors, picks)
    picked = torch.broadcast_shapes(*[index.shape for index in tensors])
    whole = (*shape[:place], *picked, *shape[place:]) if picks else tuple(shape)
    while value.dim() > len(whole) and value.shape[0] == 1:
        value = value.squeeze(0)
    value = value.expand(whole)
    for dim, first, count in parts:
        value = value.narrow(dim, first, count)
    view = tensor[basic]
    if not picks:
        view.copy_(value)
        return tensor
    local, mine = _own_indices(tensors, picks)
    rows = view.movedim(tuple(dim for dim, _ in picks), tuple(range(len(picks))))
    front = tuple(range(len(picked)))
    value = value.movedim(tuple(place + dim for dim in front), front)
    if mine is not None:
        local, value = [index[mine] for index in local], value[mine]
    rows.index_put_(tuple(local), value, accumulate)
    return tensor


def gather_own(tensor: torch.Tensor, index: torch.Tensor, *, dim: int, interval: Interval, size: int) -> torch.Tensor:
    """This rank's share of a gather along a dim of which it has an interval."""
    in_range(index, size, "gather: an index")
    start, stop = interval
    if start == stop:
        return _zeros(index.shape, tensor)
    mine = (index >= start) & (index < stop)
    return tensor.gather(dim, torch.where(mine, index - start, 0)).masked_fill(~mine, 0)


def scatter_own(
    tensor: torch.Tensor,
    index: torch.Tensor,
    source: torch.Tensor,
    *,
    op: str,
    inplace: bool,
    dim: int,
    interval: Interval,
    size: int,
    crops: Sequence[tuple[int, int, int]],
    source_crops: Sequence[tuple[int, int, int]],
    options: dict[str, Any],
) -> torch.Tensor:
    """What an op that writes at an index along one dim does to this rank's part.

    One more row takes what is meant for other ranks, and is dropped.

    Args:
        tensor: this rank's part of what is written to.
        index: where to write along `dim`.
        source: what to write.
        op: name of the method: "scatter", "index_add", ...
        inplace: whether `tensor` itself is written to.
        dim: the dim.
        interval: what of the dim is here.
        size: the dim's global size.
        crops: what of the index belongs here in other cut dims: (dim, first, number).
        source_crops: the same of the source.
        options: further keyword arguments.
    """
    in_range(index, size, f"{op}: an index")
    for at, first, count in crops:
        index = index.narrow(at, first, count)
    for at, first, count in source_crops:
        source = source.narrow(at, first, count)
    start, stop = interval
    if (start, stop) == (0, size):
        whole: torch.Tensor = getattr(tensor, f"{op}_" if inplace else op)(dim, index, source, **options)
        return whole
    padded = torch.cat([tensor, tensor.new_ones((*tensor.shape[:dim], 1, *tensor.shape[dim + 1 :]))], dim)
    index = torch.where((index >= start) & (index < stop), index - start, stop - start)
    result: torch.Tensor = getattr(padded, op)(dim, index, source, **options)
    result = result.narrow(dim, 0, tensor.shape[dim])
    return tensor.copy_(result) if inplace else result


def masked_scatter_own(
    tensor: torch.Tensor, mask: torch.Tensor, source: torch.Tensor, *, shape: Sequence[int], box: Box, inplace: bool
) -> torch.Tensor:
    """`masked_scatter` on this rank's box of a tensor: the n-th True of the whole mask takes the n-th of the source."""
    whole = mask.expand(tuple(shape))
    number = whole.flatten().cumsum(0).view(whole.shape) - 1
    in_range(number[whole], source.numel(), "masked_scatter: the number of a True")
    for dim, (start, stop) in enumerate(box):
        whole, number = whole.narrow(dim, start, stop - start), number.narrow(dim, start, stop - start)
    target = tensor if inplace else tensor.clone()
    target[whole] = source.flatten()[number[whole]]
    return target


def diagonal_own(
    tensor: torch.Tensor, *, dims: tuple[int, int], offset: int, corner: tuple[int, int], length: int
) -> torch.Tensor:
    """This rank's stretch of a diagonal of `length` elements, zeros for the rest; its piece starts at `corner`."""
    shifted = offset + corner[0] - corner[1]
    own = tensor.diagonal(shifted, *dims)
    first = corner[0] + max(-shifted, 0) - max(-offset, 0) if own.shape[-1] else 0
    return F.pad(own, (first, length - first - own.shape[-1]))


def diag_embed_own(tensor: torch.Tensor, *, start: int, size: int, dims: tuple[int, int]) -> torch.Tensor:
    """[..., own rows] as [..., own rows, size] with these elements on the diagonal, at dims `dims`."""
    rows = tensor.shape[-1]
    result = tensor.new_zeros((*tensor.shape[:-1], rows, size))
    result.diagonal(start, -2, -1).copy_(tensor)
    return result.movedim((-2, -1), dims)


def _own_indices(
    tensors: Sequence[torch.Tensor], picks: Sequence[Pick]
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Indices counted from this rank's first row, and where they are all its own; None if nothing is cut."""
    found: list[torch.Tensor] = []
    mine: torch.Tensor | None = None
    for index, (_, intervals) in zip(tensors, picks, strict=True):
        start, stop, size = intervals[0]
        if (start, stop) != (0, size):
            index = torch.where(index < 0, index + size, index)
            in_range(index, size, "an index")
            inside = (index >= start) & (index < stop)
            index = torch.where(inside, index - start, 0)
            mine = inside if mine is None else mine & inside
        found.append(index)
    if mine is not None:
        *found, mine = torch.broadcast_tensors(*found, mine)
    return found, mine


def _spread_masks(tensors: Sequence[torch.Tensor], picks: Sequence[Pick]) -> tuple[list[torch.Tensor], list[Pick]]:
    """Masks as the positions at which they are True, one index tensor for each of their dims."""
    found: list[torch.Tensor] = []
    spread: list[Pick] = []
    for index, (dim, intervals) in zip(tensors, picks, strict=True):
        if index.dtype is torch.bool:
            found += index.nonzero(as_tuple=True)
            spread += [(dim + offset, (interval,)) for offset, interval in enumerate(intervals)]
        else:
            found.append(index)
            spread.append((dim, intervals))
    return found, spread


def _nothing(tensor: torch.Tensor) -> torch.Tensor:
    """Zero, by way of the tensor's graph but not of its values."""
    return (tensor.narrow(0, 0, 0) if tensor.dim() else tensor.expand(0)).sum()


def _zeros(shape: Sequence[int], tensor: torch.Tensor) -> torch.Tensor:
    """Zeros that take part in the tensor's graph."""
    zeros = tensor.new_zeros(tuple(shape))
    return zeros + _nothing(tensor) if tensor.requires_grad else zeros


INDEX_OPS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        read_index,
        write_index,
        gather_own,
        scatter_own,
        masked_scatter_own,
        diagonal_own,
        diag_embed_own,
        recut,
        recut_pieces,
        cat_recut,
        repeat_recut,
        reorder,
        torch.cat,
        torch.tril,
        torch.triu,
        torch.Tensor.tril_,
        torch.Tensor.triu_,
        torch.repeat_interleave,
        torch.nonzero,
        torch.bincount,
        torch.histc,
        torch.unique,
        torch.unique_consecutive,
    )
}
"""Local implementations by name; part of `hp_core.platform.torch.local_ops.LOCAL_OPS`."""
