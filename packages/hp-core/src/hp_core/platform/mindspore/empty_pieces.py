"""Ops on pieces without elements, where MindSpore's CPU kernels leave the result unset or drop the other operands' gradients.

A rank may hold nothing of a dim that is cut over more ranks than it has rows. What it adds is then zeros, and its
backward must run like that of the other ranks, because they communicate there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mindspore import Tensor

from hp_core.platform.mindspore.arrays import Array, array_dtype
from hp_core.platform.mindspore.autograd import with_zero_gradients

__all__ = ["ON_EMPTY", "empty_sum"]


def _product(left: Tensor, right: Tensor) -> Tensor:
    return with_zero_gradients(lambda x, y: np.zeros(np.matmul(x, y).shape, x.dtype), left, right)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = with_zero_gradients(lambda x, w: np.zeros(np.matmul(x, w.T).shape, x.dtype), input, weight)
    return product if bias is None else product + bias


def empty_sum(input: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """A sum over nothing: zeros."""
    dims = tuple(dim) if isinstance(dim, (list, tuple)) else dim

    def total(x: Array) -> Array:
        return np.asarray(np.sum(x, axis=dims or None, keepdims=keepdim, dtype=x.dtype)).astype(
            x.dtype if dtype is None else array_dtype(dtype)
        )

    return with_zero_gradients(total, input)


def _rows(ids: Tensor, weight: Tensor, **_: Any) -> Tensor:
    return with_zero_gradients(lambda w, i: np.zeros((*i.shape, w.shape[1]), w.dtype), weight, ids)


ON_EMPTY: dict[str, Callable[..., Tensor]] = {
    "matmul": _product,
    "mm": _product,
    "bmm": _product,
    "linear": _linear,
    "sum": empty_sum,
    "embedding": _rows,
}
"""By canonical name, what runs where an operand has no elements."""
