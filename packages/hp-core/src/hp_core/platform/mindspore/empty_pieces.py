"""Ops on pieces without elements, where MindSpore's CPU kernels leave the result unset or drop the other operands' gradients.

A rank may hold nothing of a dim that is cut over more ranks than it has rows. What it adds is then zeros, and its
backward must run like that of the other ranks, because they communicate there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mindspore import Tensor

from hp_core.platform.mindspore.arrays import Array, array_dtype, as_array, as_tensor
from hp_core.platform.mindspore.autograd import with_zero_gradients

__all__ = ["ON_EMPTY", "empty_sum"]


def _product(left: Tensor, right: Tensor) -> Tensor:
    return with_zero_gradients(lambda x, y: np.zeros(np.matmul(x, y).shape, x.dtype), left, right)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = with_zero_gradients(lambda x, w: np.zeros(np.matmul(x, w.T).shape, x.dtype), input, weight)
    return product if bias is None else product + bias


def empty_sum(input: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """A sum over nothing: zeros."""
    dims = _axes(dim)

    def total(x: Array) -> Array:
        return np.asarray(np.sum(x, axis=dims, keepdims=keepdim, dtype=x.dtype)).astype(
            x.dtype if dtype is None else array_dtype(dtype)
        )

    return with_zero_gradients(total, input)


def _axes(dim: Any) -> Any:
    """NumPy's axes; none named means all."""
    dims = tuple(dim) if isinstance(dim, (list, tuple)) else dim
    return None if dims == () else dims


def _rows(ids: Tensor, weight: Tensor, **_: Any) -> Tensor:
    return with_zero_gradients(lambda w, i: np.zeros((*i.shape, w.shape[1]), w.dtype), weight, ids)


def _alike(input: Tensor, *_: Any, **__: Any) -> Tensor:
    return with_zero_gradients(lambda x: np.zeros(x.shape, x.dtype), input)


def _layer_norm(input: Tensor, normalized_shape: Any, weight: Tensor, bias: Tensor, *_: Any) -> Tensor:
    return with_zero_gradients(lambda x, *_: np.zeros(x.shape, x.dtype), input, weight, bias)


def _mean(input: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    return empty_sum(input, dim, keepdim, dtype)


def _holds(function: Callable[..., Any]) -> Callable[..., Tensor]:
    def over_nothing(input: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        return as_tensor(np.asarray(function(as_array(input), axis=_axes(dim), keepdims=keepdim)))

    return over_nothing


def _gathered(input: Tensor, dim: int, index: Tensor) -> Tensor:
    return with_zero_gradients(lambda x, i: np.zeros(i.shape, x.dtype), input, index)


ON_EMPTY: dict[str, Callable[..., Tensor]] = {
    "matmul": _product,
    "mm": _product,
    "bmm": _product,
    "linear": _linear,
    "sum": empty_sum,
    "embedding": _rows,
    "softmax": _alike,
    "log_softmax": _alike,
    "layer_norm": _layer_norm,
    "mean": _mean,
    "all": _holds(np.all),
    "any": _holds(np.any),
    "gather": _gathered,
}
"""By canonical name, what runs where an operand has no elements."""
