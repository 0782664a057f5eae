"""Local implementations on plain tensors that rules ask for by name, where the op itself would mean something else locally."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import wrap_torch_function

from hp_core.platform.torch.attention import attention_rows
from hp_core.platform.torch.convolution import affine_grid, channelwise, convolution
from hp_core.platform.torch.extrema import (
    aminmax_over_ranks,
    argument_over_ranks,
    extremum_over_ranks,
    extremum_share,
    selection_over_ranks,
)
from hp_core.platform.torch.index_ops import INDEX_OPS
from hp_core.platform.torch.losses import (
    cross_entropy_cut_classes,
    cross_entropy_share,
    in_range,
    loss_share,
    nll_loss_cut_classes,
    nll_loss_share,
)
from hp_core.platform.torch.products import bilinear_of_nothing
from hp_core.platform.torch.scans import (
    cumulative_extremum_over_ranks,
    product_over_ranks,
    scan_over_ranks,
    topk_over_ranks,
)

__all__ = ["LOCAL_OPS"]


def reshape_first(tensor: torch.Tensor, *_: Any, shape: Sequence[int]) -> torch.Tensor:
    """Reshape the first operand to its local shape."""
    return tensor.reshape(shape)


def view_first(tensor: torch.Tensor, *_: Any, shape: Sequence[int]) -> torch.Tensor:
    """View the first operand in its local shape, or fail as torch does."""
    return tensor.view(shape)


def expand_first(tensor: torch.Tensor, *_: Any, shape: Sequence[int]) -> torch.Tensor:
    """Expand the first operand to its local shape."""
    return tensor.expand(shape)


def mean_share(
    tensor: torch.Tensor, *, dim: Sequence[int], keepdim: bool, dtype: torch.dtype | None, count: int
) -> torch.Tensor:
    """This rank's share of a mean over `count` elements: the shares of all ranks add up to it."""
    if not (dtype or tensor.dtype).is_floating_point and not (dtype or tensor.dtype).is_complex:
        raise RuntimeError(
            f"mean(): could not infer output dtype; the input dtype must be floating point or complex, got {tensor.dtype}."
        )
    return tensor.sum(tuple(dim), keepdim=keepdim, dtype=dtype) / count


@wrap_torch_function(lambda tensor, statistics: (tensor, statistics))
def standardized(tensor: torch.Tensor, statistics: torch.Tensor) -> torch.Tensor:
    """Minus the first statistic, times the second; both broadcast. Stacked, so that one message carries both gradients."""
    return (tensor - statistics[0]) * statistics[1]


def embedding_rows(
    ids: torch.Tensor, weight: torch.Tensor, *, start: int, stop: int, vocabulary: int, padding_index: int | None
) -> torch.Tensor:
    """Rows `[start, stop)` of a vocabulary: what this rank knows of each id, zero where it knows nothing.

    Args:
        ids: [...], of the whole vocabulary.
        weight: [stop - start, features], this rank's rows.
        start: first row.
        stop: one past the last row.
        vocabulary: number of rows in all, for the range check.
        padding_index: row whose gradient stays zero, or None.
    """
    in_range(ids, vocabulary, "embedding: an id")
    mine = (ids >= start) & (ids < stop)
    if start == stop:
        # an empty piece still takes part in the graph, so that its (empty) gradient exists
        return weight.new_zeros((*ids.shape, weight.shape[1])) + weight.sum() * 0
    local_ids = torch.where(mine, ids - start, 0)
    padding = padding_index - start if padding_index is not None and start <= padding_index < stop else None
    rows = F.embedding(local_ids, weight, None)
    if padding is not None:
        rows = torch.where((local_ids == padding).unsqueeze(-1), rows.detach(), rows)
    return rows.masked_fill(~mine.unsqueeze(-1), 0)


LOCAL_OPS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        reshape_first,
        view_first,
        expand_first,
        mean_share,
        standardized,
        extremum_share,
        extremum_over_ranks,
        aminmax_over_ranks,
        selection_over_ranks,
        argument_over_ranks,
        product_over_ranks,
        topk_over_ranks,
        scan_over_ranks,
        cumulative_extremum_over_ranks,
        embedding_rows,
        cross_entropy_share,
        cross_entropy_cut_classes,
        nll_loss_share,
        nll_loss_cut_classes,
        loss_share,
        F.linear,
        F.cross_entropy,
        F.embedding,
        F.one_hot,
        torch.stack,
        torch.searchsorted,
        F.leaky_relu,
        affine_grid,
        channelwise,
        convolution,
        bilinear_of_nothing,
        attention_rows,
    )
} | INDEX_OPS
