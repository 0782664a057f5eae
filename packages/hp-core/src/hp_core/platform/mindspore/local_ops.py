"""Local implementations on plain tensors that rules ask for by name, from ops that have a kernel on CPU, too."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from mindspore import Tensor, mint, ops

from hp_core.platform.mindspore.arrays import as_tensor
from hp_core.platform.mindspore.exchange import cat_recut, recut, recut_pieces, reorder, repeat_recut
from hp_core.platform.mindspore.extrema import extremum_over_ranks, extremum_share
from hp_core.platform.mindspore.indexing import gather_own, in_range, read_index
from hp_core.platform.mindspore.losses import nll_loss_cut_classes, nll_loss_share
from hp_core.platform.mindspore.op import MindSporeOp
from hp_core.platform.mindspore.scans import (
    argument_over_ranks,
    scan_over_ranks,
    selection_over_ranks,
    topk_over_ranks,
)
from hp_core.platform.mindspore.special_calls import without_gradient

__all__ = ["LOCAL_OPS"]


def reshape_first(tensor: Tensor, *_: Any, shape: Sequence[int]) -> Tensor:
    """Reshape the first operand to its local shape."""
    return tensor.reshape(tuple(shape))


def expand_first(tensor: Tensor, *_: Any, shape: Sequence[int]) -> Tensor:
    """Expand the first operand to its local shape."""
    sizes = [own if size == -1 else size for size, own in zip(shape[::-1], tensor.shape[::-1], strict=False)][::-1]
    return ops.broadcast_to(tensor, (*tuple(shape)[: len(shape) - len(sizes)], *sizes))


def mean_share(tensor: Tensor, *, dim: Sequence[int], keepdim: bool, dtype: Any, count: int) -> Tensor:
    """This rank's share of a mean over `count` elements: the shares of all ranks add up to it."""
    return mint.sum(tensor, tuple(dim), keepdim, dtype=dtype) / count


def standardized(tensor: Tensor, statistics: Tensor) -> Tensor:
    """Minus the first statistic, times the second; both broadcast. Stacked, so that one message carries both gradients."""
    return (tensor - statistics[0]) * statistics[1]


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Along a new dim."""
    return ops.stack(tuple(tensors), dim)


def embedding_rows(
    ids: Tensor, weight: Tensor, *, start: int, stop: int, vocabulary: int, padding_index: int | None
) -> Tensor:
    """Rows `[start, stop)` of a vocabulary: what this rank knows of each id, zero where it knows nothing.

    Args:
        ids: [...], of the whole vocabulary.
        weight: [stop - start, features], this rank's rows.
        start: first row.
        stop: one past the last row.
        vocabulary: number of rows in all, for the range check.
        padding_index: row whose gradient stays zero, or None.
    """
    values = in_range(ids.asnumpy(), vocabulary, "embedding: an id")
    mine = (values >= start) & (values < stop)
    local_ids = as_tensor((values - start) * mine)
    rows = ops.gather(weight, local_ids, 0)
    if padding_index is not None:
        rows = without_gradient(rows, values == padding_index)
    return rows * as_tensor(mine[..., None]).astype(weight.dtype)


def _local_op(function: Callable[..., Any], kernels: bool) -> Callable[..., Any]:
    """The function on plain tensors, or, called with DTensors, the op of that name.

    Args:
        function: on plain tensors.
        kernels: whether it calls kernels of MindSpore's, which must see no tensor without elements.
    """
    op = MindSporeOp(function.__name__, function.__name__, function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
        if hasattr(first, "_spec"):
            return first._dispatch(op, args, kwargs)
        return op(*args, **kwargs) if kernels else function(*[as_tensor(value) for value in args], **kwargs)

    return call


_OF_KERNELS = (reshape_first, expand_first, mean_share, standardized, stack, embedding_rows)
_OF_ARRAYS = (
    extremum_share, extremum_over_ranks, selection_over_ranks, argument_over_ranks, topk_over_ranks, scan_over_ranks,
    recut, recut_pieces, cat_recut, repeat_recut, reorder, read_index, gather_own, nll_loss_share, nll_loss_cut_classes,
)  # fmt: skip

LOCAL_OPS: dict[str, Callable[..., Any]] = {
    function.__name__: _local_op(function, function in _OF_KERNELS) for function in (*_OF_KERNELS, *_OF_ARRAYS)
}
LOCAL_OPS["view_first"] = LOCAL_OPS["reshape_first"]
