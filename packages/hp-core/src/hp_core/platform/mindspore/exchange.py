"""Rows of a cut dim change hands: one all-to-all forward, one back for the gradient, nothing but the rows that move.

What goes where is worked out once, in `hp_core.rules.exchange`; here arrays are packed and unpacked along that list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, ops

from hp_core.platform.mindspore.arrays import Array, as_array
from hp_core.platform.mindspore.autograd import MindSporeAutograd
from hp_core.platform.mindspore.op import MindSporeOp
from hp_core.platform.protocol import Recut, Run
from hp_core.platform.select import get_platform

__all__ = ["cat_recut", "recut", "recut_pieces", "reorder", "repeat_recut"]

_with_gradient = MindSporeAutograd().with_gradient
_cat = MindSporeOp("Concat", "cat", ops.cat)
_tile = MindSporeOp("Tile", "tile", ops.tile)


def recut(tensor: Tensor, *, steps: Sequence[tuple[int, Recut]]) -> Tensor:
    """Exchange rows along one dim after the other: pairs (dim, what goes where)."""
    for dim, plan in steps:
        tensor = _recut(tensor, dim, plan)
    return tensor


def recut_pieces(tensor: Tensor, *, dim: int, plan: Recut, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Exchange rows, then take the result apart: this rank's part of each piece."""
    moved, start, pieces = _recut(tensor, dim, plan), 0, []
    for size in sizes:
        pieces.append(_rows_of(moved, dim, start, size))
        start += size
    return tuple(pieces)


def cat_recut(*tensors: Tensor, dim: int, plan: Recut) -> Tensor:
    """This rank's part of the joined tensors, from its parts of each."""
    return _recut(_cat(tensors, dim), dim, plan)


def repeat_recut(tensor: Tensor, *, steps: Sequence[tuple[int, Recut]], repeats: Sequence[int]) -> Tensor:
    """Repeat cut dims by exchanging rows, the others in place."""
    return _tile(recut(tensor, steps=steps), tuple(repeats))


def reorder(tensor: Tensor, *, steps: Sequence[tuple[int, Recut]], runs: Sequence[tuple[int, Sequence[Run]]]) -> Tensor:
    """Put rows in another order: along cut dims by exchange, along whole ones here: pairs (dim, rows in their new order)."""
    for dim, pieces in runs:
        tensor = _reordered(tensor, dim, pieces)
    return recut(tensor, steps=steps)


def _reordered(tensor: Tensor, dim: int, pieces: Sequence[Run]) -> Tensor:
    rows = tensor.shape[dim]
    order = np.concatenate([first + step * np.arange(count) for first, step, count in pieces]).astype(np.int64)

    def forward(value: Any) -> Array:
        return np.take(as_array(value), order, dim)

    def backward(gradient: Any) -> Array:
        return _added(as_array(gradient), dim, order, rows)

    return _with_gradient(tensor, forward, backward)


def _added(gradient: Array, dim: int, order: Array, rows: int) -> Array:
    result = np.zeros((*gradient.shape[:dim], rows, *gradient.shape[dim + 1 :]), gradient.dtype)
    where: Any = (slice(None),) * dim + (order,)
    np.add.at(result, where, gradient)
    return result


def _rows_of(tensor: Tensor, dim: int, start: int, count: int) -> Tensor:
    """An interval of rows, with its gradient; MindSpore's own slices refuse empty ones."""
    index = (slice(None),) * dim + (slice(start, start + count),)
    shape = tensor.shape

    def backward(gradient: Any) -> Array:
        array = as_array(gradient)
        result = np.zeros(shape, array.dtype)
        result[index] = array
        return result

    return _with_gradient(tensor, lambda value: as_array(value)[index], backward)


def _recut(tensor: Tensor, dim: int, plan: Recut) -> Tensor:
    rows = tensor.shape[dim]
    places = [[(start, 1, count) for start, count in pieces] for pieces in plan.receives]

    def forward(value: Any) -> Array:
        array = as_array(value)
        result = np.empty(_with_rows(array, dim, plan.length), array.dtype)
        for place, arrived in _exchanged(array, dim, plan, plan.sends, places):
            _take(result, dim, place)[...] = arrived
        return result

    def backward(gradient: Any) -> Array:
        array = as_array(gradient)
        result = np.zeros(_with_rows(array, dim, rows), array.dtype)
        # a row that was sent twice gets two gradients
        for place, arrived in _exchanged(array, dim, plan, places, plan.sends):
            _take(result, dim, place)[...] += arrived
        return result

    return _with_gradient(tensor, forward, backward)


def _exchanged(
    array: Array, dim: int, plan: Recut, sends: Sequence[Sequence[Run]], receives: Sequence[Sequence[Run]]
) -> list[tuple[Run, Array]]:
    """Send the rows `sends`, and give what arrives, with the rows that it is meant for."""
    found = [(place, _take(array, dim, rows)) for rows, place in zip(sends[plan.own], receives[plan.own], strict=True)]
    if not plan.moves:
        return found
    row = _with_rows(array, dim, 1)
    width = int(np.prod(row))
    others = [member for member in range(plan.group.size) if member != plan.own]
    packed = [_take(array, dim, rows).reshape(-1) for member in others for rows in sends[member]]
    source = np.concatenate(packed) if packed else np.empty(0, array.dtype)
    source_splits = [0 if m == plan.own else width * sum(rows[2] for rows in sends[m]) for m in range(plan.group.size)]
    splits = [0 if m == plan.own else width * sum(rows[2] for rows in receives[m]) for m in range(plan.group.size)]
    received = np.empty(sum(splits), array.dtype)
    get_platform().collectives.all_to_all(received, source, splits, source_splits, plan.group)
    at = 0
    for member in others:
        for rows in receives[member]:
            size = width * rows[2]
            found.append((rows, received[at : at + size].reshape(_with_rows(array, dim, rows[2]))))
            at += size
    return found


def _take(array: Array, dim: int, rows: Run) -> Array:
    """The view of these rows."""
    start, step, count = rows
    if not count:
        return array[(slice(None),) * dim + (slice(0, 0),)]
    stop = start + step * count
    return array[(slice(None),) * dim + (slice(start, None if stop < 0 else stop, step),)]


def _with_rows(array: Array, dim: int, rows: int) -> tuple[int, ...]:
    return (*array.shape[:dim], rows, *array.shape[dim + 1 :])
