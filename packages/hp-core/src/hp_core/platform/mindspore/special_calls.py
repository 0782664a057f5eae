"""Primitives whose arguments mean different ops, or come in another order than a line of a table could tell.

For each a function that is given the primitive's own call, and gives what turns MindSpore's arguments into an op and
canonical arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import mindspore as ms
from mindspore import Tensor, ops

from hp_core.platform.mindspore.arrays import as_array, as_tensor
from hp_core.platform.mindspore.op import MindSporeOp, PairOp, TripleOp

__all__ = ["SPECIAL", "never_local", "without_gradient"]


def _gather_rows(native: Callable[..., Any]) -> Callable[..., Any]:
    """Gather(params, indices, axis, batch_dims): rows of a table are an embedding, else entries along a dim."""
    embedding = MindSporeOp("Gather", "embedding", lambda ids, weight: native(weight, ids, 0, 0))
    select = MindSporeOp("Gather", "index_select", lambda input, dim, index: native(input, index, dim, 0))
    unknown = MindSporeOp("Gather", None, native)

    def canonical_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        params, indices, axis, *batch = args
        if any(batch) or not isinstance(indices, Tensor):
            return unknown, args, kwargs
        if params.ndim == 2 and axis in (0, -2):
            return embedding, (indices, params), {}
        return (select, (params, axis, indices), {}) if indices.ndim == 1 else (unknown, args, kwargs)

    return canonical_arguments


def _product(native: Callable[..., Any]) -> Callable[..., Any]:
    """MatMul and BatchMatMul(input, other, transpose_a, transpose_b)."""
    linear = MindSporeOp("MatMul", "linear", lambda input, weight: native(input, weight, False, True))
    product = MindSporeOp("MatMul", "matmul", lambda input, other: native(input, other, False, False))
    unknown = MindSporeOp("MatMul", None, native)

    def canonical_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        input, other, *transposed = args
        if transposed == [False, True] and other.ndim == 2:
            return linear, (input, other), {}
        return (unknown, args, kwargs) if any(transposed) else (product, (input, other), {})

    return canonical_arguments


def _bias_add(native: Callable[..., Any]) -> Callable[..., Any]:
    """BiasAdd(input, bias, data_format): the bias lies along dim 1."""
    add = MindSporeOp("BiasAdd", "add", lambda input, bias: input + bias)
    unknown = MindSporeOp("BiasAdd", None, native)

    def canonical_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (add, (args[0], args[1]), {}) if args[0].ndim == 2 else (unknown, args, kwargs)

    return canonical_arguments


def _dropout_of_function(native: Callable[..., Any]) -> Callable[..., Any]:
    """FuncDropoutExt(input, p, training, inplace, seed, offset): MindSpore's own seed counts for nothing here."""
    dropout = MindSporeOp("FuncDropoutExt", "dropout", never_local)
    return lambda args, kwargs: (dropout, (args[0],), dict(zip(("p", "training", "inplace"), args[1:4], strict=True)))


def _dropout_of_layer(native: Callable[..., Any]) -> Callable[..., Any]:
    """Dropout(input, keep_prob, seed, seed): gives the result and the mask."""
    dropout = PairOp("Dropout", "dropout", never_local)
    return lambda args, kwargs: (dropout, (args[0],), {"p": 1.0 - args[1]})


def _layer_norm(native: Callable[..., Any]) -> Callable[..., Any]:
    """LayerNorm(input, gamma, beta, begin_norm_axis, begin_params_axis, epsilon): gives the result, mean and variance."""

    def local(input: Tensor, normalized_shape: Sequence[int], weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        axis = input.ndim - len(normalized_shape)
        return native(input, weight, bias, axis, axis, eps)[0]

    norm = TripleOp("LayerNorm", "layer_norm", local)

    def canonical_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        input, weight, bias, axis, _, eps = args
        return norm, (input, tuple(input.shape[axis:]), weight, bias, eps), {}

    return canonical_arguments


def _embedding(native: Callable[..., Any]) -> Callable[..., Any]:
    """Embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq): without a kernel on CPU."""

    def local(input: Tensor, weight: Tensor, padding_idx: int | None, **others: Any) -> Tensor:
        if ms.get_context("device_target") != "CPU":
            return native(input, weight, padding_idx, *others.values())
        rows = ops.gather(weight, input, 0)
        return rows if padding_idx is None else without_gradient(rows, as_array(input) == padding_idx % weight.shape[0])

    embedding = MindSporeOp("Embedding", "embedding", local)
    names = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")

    def canonical_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return embedding, args[:2], dict(zip(names, args[2:], strict=True)) | kwargs

    return canonical_arguments


def without_gradient(rows: Tensor, mask: Any) -> Tensor:
    """The rows [..., features], of which those in the mask [...] pass no gradient on."""
    kept = as_tensor((~mask)[..., None]).astype(rows.dtype)
    return rows * kept + ops.stop_gradient(rows) * (1 - kept)


_REDUCTIONS = ("sum", "mean", "none")
"""In the order of MindSpore's numbers."""


def _negative_likelihood(native: Callable[..., Any]) -> Callable[..., Any]:
    """NLLLoss(logits, labels, weight, reduction, ignore_index): gives the loss and the sum of the weights."""

    def local(input: Tensor, target: Tensor, weight: Tensor, reduction: str, ignore_index: int) -> Tensor:
        return native(input, target, weight, _REDUCTIONS.index(reduction), ignore_index)[0]

    loss = PairOp("NLLLoss", "nll_loss", local)

    def canonical_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        input, target, weight, reduction, ignore_index = args
        if hasattr(input, "_spec") and not hasattr(weight, "_spec"):  # MindSpore's own ones, equal on all ranks
            weight = type(input).from_local(weight, input.layout.replicated)
        named = {"weight": weight, "reduction": _REDUCTIONS[reduction], "ignore_index": ignore_index}
        return loss, (input, target), named

    return canonical_arguments


def never_local(*_: Any, **__: Any) -> NoReturn:
    """The local form of an op whose rule computes it from other ops."""
    raise AssertionError("this op has no local form: its rule computes it from other ops")


SPECIAL: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "Gather": _gather_rows,
    "MatMul": _product,
    "BatchMatMul": _product,
    "BiasAdd": _bias_add,
    "LayerNorm": _layer_norm,
    "Embedding": _embedding,
    "NLLLoss": _negative_likelihood,
    "FuncDropoutExt": _dropout_of_function,
    "Dropout": _dropout_of_layer,
}
