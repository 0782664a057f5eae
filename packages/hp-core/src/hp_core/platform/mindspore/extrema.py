"""Extrema over a dim of which each rank holds a piece, and how a gradient is shared among ties. Pieces may be empty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import Tensor

from hp_core.platform.mindspore.arrays import Array, as_array, as_tensor
from hp_core.platform.mindspore.autograd import MindSporeAutograd
from hp_core.platform.protocol import Group
from hp_core.platform.select import get_platform

__all__ = ["extremum_over_ranks", "extremum_share", "piece_extremum"]

_with_gradient = MindSporeAutograd().with_gradient


def extremum_share(tensor: Tensor, dim: Sequence[int], keepdim: bool, largest: bool) -> Tensor:
    """The extremum of this rank's piece; of an empty one, what loses against every number. It has no gradient."""
    return as_tensor(piece_extremum(as_array(tensor), tuple(dim), keepdim, largest))


def extremum_over_ranks(
    tensor: Tensor,
    dim: Sequence[int],
    keepdim: bool,
    largest: bool,
    nan_ties: bool = False,
    group: Group | None = None,
) -> Tensor:
    """The extremum of all ranks' pieces; its gradient is shared equally among all elements that equal it.

    Args:
        tensor: this rank's piece.
        dim: dims to reduce.
        keepdim: whether they stay, with size 1.
        largest: the maximum, or the minimum.
        nan_ties: whether elements that are NaN equal an extremum that is NaN.
        group: ranks that hold the pieces; None: this one alone.
    """
    dims = tuple(dim)
    own = as_array(tensor)
    kept = np.array(piece_extremum(own, dims, True, largest))
    if group is not None and kept.size:
        get_platform().collectives.all_reduce(kept, "max" if largest else "min", group)

    def backward(gradient: Any) -> Array:
        ties = own == kept
        if nan_ties:
            ties |= np.isnan(own) & np.isnan(kept)
        count = np.array(ties.sum(dims, keepdims=True))
        if group is not None and count.size:
            get_platform().collectives.all_reduce(count, "sum", group)
        share = as_array(gradient).reshape(kept.shape) / count.astype(own.dtype)
        return np.where(ties, share, np.zeros((), own.dtype)) if nan_ties else ties * share

    result = kept if keepdim else np.array(kept.reshape([n for d, n in enumerate(kept.shape) if d not in dims]))
    return _with_gradient(tensor, lambda _: result, backward)


def piece_extremum(array: Array, dims: tuple[int, ...], keepdim: bool, largest: bool) -> Array:
    """The extremum over dims; of nothing, what loses against every number."""
    if not dims or all(array.shape[d] for d in dims):
        return np.asarray(array.max(dims, keepdims=keepdim) if largest else array.min(dims, keepdims=keepdim))
    shape = [1 if d in dims else size for d, size in enumerate(array.shape) if keepdim or d not in dims]
    if array.dtype == np.bool_:
        worst: Any = not largest
    elif np.issubdtype(array.dtype, np.integer):
        worst = np.iinfo(array.dtype).min if largest else np.iinfo(array.dtype).max
    else:
        worst = -np.inf if largest else np.inf
    return np.full(shape, worst, array.dtype)
