"""Indices of extrema, the largest k and cumulative sums over a dim of which each rank holds a piece. Pieces may be empty.

Every rank works on its own piece, what it found is gathered, and all finish alike. NumPy, with the gradient written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import Tensor

from hp_core.errors import PlatformError
from hp_core.platform.mindspore.arrays import Array, array_dtype, as_array, as_tensor
from hp_core.platform.mindspore.autograd import MindSporeAutograd
from hp_core.platform.mindspore.extrema import piece_extremum
from hp_core.platform.protocol import Group
from hp_core.platform.select import get_platform

__all__ = ["argument_over_ranks", "scan_over_ranks", "selection_over_ranks", "topk_over_ranks"]

_with_gradient = MindSporeAutograd().with_gradient
_NOWHERE = np.iinfo(np.int64).max
"""Index of the extremum of nothing: later than any."""


def selection_over_ranks(
    tensor: Tensor, *, dim: int, keepdim: bool, largest: bool, start: int, group: Group, position: int
) -> tuple[Tensor, Tensor]:
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
    own = as_array(tensor)
    values = piece_extremum(own, (dim,), True, largest)
    if own.shape[dim]:
        indices = np.expand_dims(own.argmax(dim) if largest else own.argmin(dim), dim) + start
    else:
        indices = np.full(values.shape, _NOWHERE)
    values, indices = _first(values, indices, largest, group)
    shape = values.shape if keepdim else tuple(np.delete(values.shape, dim))
    return _taken(tensor, values, indices - start, dim, shape), as_tensor(indices.reshape(shape))


def argument_over_ranks(
    tensor: Tensor,
    *,
    dim: int | None,
    keepdim: bool,
    largest: bool,
    starts: Sequence[int],
    shape: Sequence[int],
    group: Group,
    position: int,
) -> Tensor:
    """The index of the first element that is the extremum, along a dim or in the flattened tensor of `shape`."""
    own = as_array(tensor)
    if dim is not None:
        found = selection_over_ranks(
            as_tensor(own), dim=dim, keepdim=keepdim, largest=largest, start=starts[dim], group=group, position=position
        )
        return found[1]
    every = tuple(range(own.ndim))
    indices = np.full((1,) * own.ndim, _NOWHERE)
    if own.size:
        place = np.unravel_index(own.argmax() if largest else own.argmin(), own.shape)
        indices[...] = np.ravel_multi_index([one + start for one, start in zip(place, starts, strict=True)], shape)
    _, indices = _first(piece_extremum(own, every, True, largest), indices, largest, group)
    return as_tensor(indices if keepdim else indices.reshape(()))


def topk_over_ranks(
    tensor: Tensor,
    *,
    k: int,
    dim: int,
    largest: bool,
    sorted: bool,
    start: int,
    candidates: Sequence[tuple[int, int]],
    group: Group,
    position: int,
) -> tuple[Tensor, Tensor]:
    """The k most extreme elements along a dim, out of the k most extreme of each rank; always in order.

    Args:
        tensor: this rank's piece.
        k: how many.
        dim: the dim.
        largest: the largest, or the smallest.
        sorted: whether they must come in order.
        start: where this rank's piece starts along the dim.
        candidates: place in the group and number of candidates of each rank that has some, in order of its piece.
        group: ranks that hold the pieces.
        position: this rank's place in the group.
    """
    own = as_array(tensor)
    width = max(count for _, count in candidates)
    order = _ordered(own, min(k, own.shape[dim]), dim, largest)
    stacks = [
        _stacked(_padded(array, dim, width), group) for array in (np.take_along_axis(own, order, dim), order + start)
    ]
    values, indices = (
        np.concatenate([_rows(stack[place], dim, count) for place, count in candidates], dim) for stack in stacks
    )
    best = _ordered(values, k, dim, largest)
    values, indices = np.take_along_axis(values, best, dim), np.take_along_axis(indices, best, dim)
    # MindSpore's own indices are 32 bits wide
    return _taken(tensor, values, indices - start, dim, values.shape), as_tensor(indices.astype(np.int32))


def scan_over_ranks(
    tensor: Tensor, *, scan: str, dim: int, dtype: Any, before: Sequence[int], group: Group, position: int
) -> Tensor:
    """A cumulative sum; this rank's piece of it.

    Args:
        tensor: this rank's piece.
        scan: "cumsum".
        dim: the dim.
        dtype: element type to compute in, or None.
        before: places in the group of the ranks whose pieces come before this one.
        group: ranks that hold the pieces.
        position: this rank's place in the group.

    Raises:
        PlatformError: it is another scan.
    """
    if scan != "cumsum":
        raise PlatformError(
            f"{scan} along a dim that is cut isn't there on MindSpore; redistribute its operand so that dim {dim} is whole."
        )
    after = [place for place in range(group.size) if place not in (*before, position)]  # empty pieces add zeros
    source = as_array(tensor).dtype
    wanted = source if dtype is None else array_dtype(dtype)

    def forward(value: Any) -> Array:
        array = as_array(value).astype(wanted, copy=False)
        totals = _stacked(array.sum(dim, keepdims=True, dtype=wanted), group)
        result: Array = array.cumsum(dim, dtype=wanted) + totals[list(before)].sum(0, dtype=wanted)
        return result

    def backward(gradient: Any) -> Array:
        array = as_array(gradient)
        totals = _stacked(array.sum(dim, keepdims=True), group)
        result: Array = np.flip(np.flip(array, dim).cumsum(dim), dim) + totals[after].sum(0)
        return result.astype(source, copy=False)

    return _with_gradient(tensor, forward, backward)


def _taken(tensor: Tensor, values: Array, places: Array, dim: int, shape: Sequence[int]) -> Tensor:
    """These values of all ranks, of which those whose place is on this rank get their gradient here.

    Args:
        tensor: this rank's piece.
        values: what was chosen along the dim.
        places: where that lies on this rank, if it does; of the values' shape.
        dim: the dim.
        shape: the result's.
    """
    own_shape = tensor.shape
    mine = (places >= 0) & (places < own_shape[dim])

    def backward(gradient: Any) -> Array:
        given = as_array(gradient).reshape(values.shape)
        result = np.zeros(own_shape, given.dtype)
        if result.size:
            grid = list(np.ogrid[tuple(slice(size) for size in values.shape)])
            grid[dim] = np.where(mine, places, 0)
            np.add.at(result, tuple(grid), given * mine)
        return result

    return _with_gradient(tensor, lambda _: values.reshape(shape), backward)


def _first(values: Array, indices: Array, largest: bool, group: Group) -> tuple[Array, Array]:
    """Of the extrema of all ranks the most extreme one, and of those the one with the lowest index. NaN wins."""
    values, indices = _stacked(values, group), _stacked(indices, group)
    best = values.max(0) if largest else values.min(0)
    wins = (values == best) | ((values != values) & (best != best))
    return best, np.where(wins, indices, _NOWHERE).min(0)


def _ordered(array: Array, count: int, dim: int, largest: bool) -> Array:
    """Places of the most extreme elements, in order, of equal ones the first."""
    if not largest:
        return _rows(np.argsort(array, dim, kind="stable"), dim, count)
    # from the back, so that of equal ones the first comes first
    backwards = np.flip(np.argsort(np.flip(array, dim), dim, kind="stable"), dim)
    return _rows(array.shape[dim] - 1 - backwards, dim, count)


def _rows(array: Array, dim: int, count: int) -> Array:
    rows: Array = array[(slice(None),) * dim + (slice(count),)]
    return rows


def _padded(array: Array, dim: int, width: int) -> Array:
    padding = [(0, 0)] * array.ndim
    padding[dim] = (0, width - array.shape[dim])
    return np.pad(array, padding)


def _stacked(own: Array, group: Group) -> Array:
    """What all members of the group hold, of one shape on all: [members, ...], in group order."""
    stacked = np.empty((group.size, *own.shape), own.dtype)
    if own.size:
        get_platform().collectives.all_gather(stacked, np.ascontiguousarray(own), group)
    return stacked
