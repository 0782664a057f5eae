"""Indexing on a rank's part of a tensor: what a rank has it gives, for the rest zeros. NumPy, with the gradient written out.

A read along a cut dim gives this rank's share of a pending sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import Tensor

from hp_core.errors import LayoutError
from hp_core.geometry import Interval
from hp_core.platform.mindspore.arrays import Array, as_array
from hp_core.platform.mindspore.autograd import MindSporeAutograd
from hp_core.platform.mindspore.exchange import recut
from hp_core.platform.protocol import Recut

__all__ = ["gather_own", "in_range", "read_index"]

_with_gradient = MindSporeAutograd().with_gradient

Pick = tuple[int, tuple[tuple[int, int, int], ...]]
"""Where an index tensor picks: first dim, and for each dim that it is about the own interval and the global size."""


def read_index(
    tensor: Tensor,
    *tensors: Tensor,
    positions: Sequence[tuple[int, int | None]],
    basic: tuple[Any, ...],
    steps: Sequence[tuple[int, Recut]],
    picks: Sequence[Pick],
    place: int,
) -> Tensor:
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
    shape = tensor.shape
    # the ellipsis makes a view of what would else be a number
    whole_basic: Any = (*basic, ...) if Ellipsis not in basic else basic
    here = all(position is not None for _, position in positions)

    def view(array: Array) -> Array:
        for dim, position in positions:
            array = array[(slice(None),) * dim + (position,)]
        taken: Array = array[whole_basic]
        return taken

    def forward(value: Any) -> Array:
        array = as_array(value)
        taken: Array = view(array).copy() if here else _empty_at(array, positions)[whole_basic]
        return taken

    def backward(gradient: Any) -> Array:
        array = as_array(gradient)
        result = np.zeros(shape, array.dtype)
        if here:
            view(result)[...] = array
        return result

    result = _with_gradient(tensor, forward, backward)
    result = recut(result, steps=steps)
    return _picked(result, tensors, picks, place) if picks else result


def _empty_at(array: Array, positions: Sequence[tuple[int, int | None]]) -> Array:
    """Zeros of the shape that is left when these dims are taken away."""
    dims = {dim for dim, _ in positions}
    return np.zeros([size for dim, size in enumerate(array.shape) if dim not in dims], array.dtype)


def _picked(tensor: Tensor, tensors: Sequence[Tensor], picks: Sequence[Pick], place: int) -> Tensor:
    """The entries that index tensors pick, zeros where another rank has them."""
    entries: list[Any] = [slice(None)] * tensor.ndim
    mine: Array | None = None
    for index, (dim, intervals) in zip(tensors, picks, strict=True):
        numbers = as_array(index)
        start, stop, size = intervals[0]
        if numbers.dtype != np.bool_ and (start, stop) != (0, size):
            numbers = in_range(np.where(numbers < 0, numbers + size, numbers), size, "an index")
            inside = (numbers >= start) & (numbers < stop)
            numbers = np.where(inside, numbers - start, 0)
            mine = inside if mine is None else mine & inside
        entries[dim] = numbers
    shape = tensor.shape
    where = tuple(entries)
    nothing_here = mine is not None and not all(shape[dim] for dim, _ in picks)

    def mask(picked_ndim: int) -> Array | None:
        return None if mine is None else mine.reshape((*mine.shape, *[1] * (picked_ndim - place - mine.ndim)))

    def forward(value: Any) -> Array:
        array = as_array(value)
        if nothing_here:
            array = np.zeros([max(size, 1) for size in array.shape], array.dtype)
        taken = array[where]
        inside = mask(taken.ndim)
        return taken if inside is None else np.where(inside, taken, np.zeros((), taken.dtype))

    def backward(gradient: Any) -> Array:
        array = as_array(gradient)
        result = np.zeros(shape, array.dtype)
        if not nothing_here:
            inside = mask(array.ndim)
            np.add.at(result, where, array if inside is None else array * inside)
        return result

    return _with_gradient(tensor, forward, backward)


def gather_own(tensor: Tensor, index: Tensor, *, dim: int, interval: Interval, size: int) -> Tensor:
    """This rank's share of a gather along a dim of which it has an interval."""
    start, stop = interval
    numbers = in_range(as_array(index), size, "gather: an index")
    inside = (numbers >= start) & (numbers < stop)
    local = np.where(inside, numbers - start, 0)
    shape = tensor.shape
    grid = list(np.ogrid[tuple(slice(length) for length in numbers.shape)])
    grid[dim] = local
    where = tuple(grid)

    def forward(value: Any) -> Array:
        array = as_array(value)
        return (
            np.where(inside, array[where], 0).astype(array.dtype)
            if stop > start
            else np.zeros(numbers.shape, array.dtype)
        )

    def backward(gradient: Any) -> Array:
        array = as_array(gradient)
        result = np.zeros(shape, array.dtype)
        if stop > start:
            np.add.at(result, where, array * inside)
        return result

    return _with_gradient(tensor, forward, backward)


def in_range(numbers: Array, size: int, what: str) -> Array:
    """The numbers, which must count entries of a dim of the global tensor."""
    if numbers.size and not (numbers.min() >= 0 and numbers.max() < size):
        raise LayoutError(f"{what} is out of range: {numbers.min()} to {numbers.max()} for a dim of size {size}.")
    return numbers
