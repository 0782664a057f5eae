"""Tokens to the rows of their experts and back: what a mixture of experts does around its grouped matrix products.

`moe_permute` sorts the tokens by expert, each as often as it has experts; `moe_unpermute` is the weighted sum back.
Nothing is dropped and nothing is padded: an expert has as many rows as tokens chose it, none included.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

from hp_kernels.errors import KernelArgumentError
from hp_kernels.frameworks import platform_module

__all__ = ["Permuted", "moe_permute", "moe_unpermute"]

TensorT = TypeVar("TensorT")


class Permuted(NamedTuple, Generic[TensorT]):
    """Tokens sorted by expert.

    Attributes:
        tokens: [tokens * top_k, dim], the rows of expert 0 first; within an expert in the order of the tokens.
        rows: [tokens, top_k], int64: the row of slot k of a token; every row once. `moe_unpermute` takes it.
        counts: [experts], int64: rows of each expert.
        offsets: [experts + 1], int64: where the rows of each expert begin, and at last how many there are.
    """

    tokens: TensorT
    rows: TensorT
    counts: TensorT
    offsets: TensorT


def moe_permute(tokens: TensorT, experts: TensorT, num_experts: int) -> Permuted[TensorT]:
    """Sort tokens by expert: a stable counting sort, and a copy of each token for each of its experts.

    Differentiable with respect to the tokens: the gradient of a token is the sum of those of its rows, in the order of its
    slots, in float32 (float64 for float64), rounded once.

    Args:
        tokens: [tokens, dim], float32, bfloat16, float16 or float64; contiguous.
        experts: [tokens, top_k] (or [tokens] for one each), int64 or int32: the experts that the router chose.
        num_experts: how many there are.

    Returns:
        The rows, and what is needed to find them.

    Raises:
        KernelArgumentError: an expert out of range (found where that needs no synchronisation: on the CPU); or shapes,
            dtypes, devices or memory that kernels don't take.
    """
    platform: Any = platform_module(tokens, "permute", "moe_permute")
    if len(_shape(tokens)) != 2 or len(_shape(experts)) not in (1, 2) or _shape(tokens)[0] != _shape(experts)[0]:
        raise KernelArgumentError(
            f"moe_permute: tokens {list(_shape(tokens))} and experts {list(_shape(experts))} must be [tokens, dim] and "
            "[tokens, top_k] (or [tokens])."
        )
    if num_experts < 1:
        raise KernelArgumentError(f"moe_permute: num_experts is {num_experts}, at least one is needed.")
    return Permuted(*platform.permute(tokens, experts, num_experts))


def moe_unpermute(permuted: TensorT, rows: TensorT, weights: TensorT | None = None) -> TensorT:
    """Sum each token's rows, by weights: out[token] = sum over k of weights[token, k] * permuted[rows[token, k]].

    Summed in the order of k, in float32 (float64 for float64), and rounded once. Differentiable with respect to the rows and
    the weights; the gradient of a weight is a sum over dim that adds the upper half to the lower until one number is left.
    Orders are fixed, so that the native kernel and its twin give the same bits.

    Args:
        permuted: [tokens * top_k, dim], what the experts made of the rows; dtypes as for `moe_permute`; contiguous.
        rows: [tokens, top_k], int64, of `moe_permute`.
        weights: [tokens, top_k] of the router, float32 or the dtype of `permuted`; None: all 1.

    Returns:
        [tokens, dim], of the dtype of `permuted`.

    Raises:
        KernelArgumentError: rows that aren't a permutation (found on the CPU); or shapes, dtypes, devices or memory that
            kernels don't take.
    """
    platform: Any = platform_module(permuted, "permute", "moe_unpermute")
    shape, row_shape = _shape(permuted), _shape(rows)
    if len(shape) != 2 or len(row_shape) != 2 or shape[0] != row_shape[0] * row_shape[1]:
        raise KernelArgumentError(
            f"moe_unpermute: permuted {list(shape)} and rows {list(row_shape)} must be [tokens * top_k, dim] and [tokens, top_k]."
        )
    if weights is not None and _shape(weights) != row_shape:
        raise KernelArgumentError(
            f"moe_unpermute: weights {list(_shape(weights))} must have the shape of rows, {list(row_shape)}."
        )
    result: TensorT = platform.unpermute(permuted, rows, weights)
    return result


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.shape)
