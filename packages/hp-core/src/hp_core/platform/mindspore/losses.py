"""Negative log likelihood on a rank's part: of its own samples, or of its own classes. NumPy, with the gradient written out.

Cross entropy needs nothing of its own: MindSpore computes it from log_softmax, whose rule knows of cut classes, and this.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor

from hp_core.platform.mindspore.arrays import Array, as_array
from hp_core.platform.mindspore.autograd import MindSporeAutograd
from hp_core.platform.mindspore.indexing import in_range
from hp_core.platform.protocol import Group
from hp_core.platform.select import get_platform

__all__ = ["nll_loss_cut_classes", "nll_loss_share"]

_with_gradient = MindSporeAutograd().with_gradient


def nll_loss_share(
    log_probabilities: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    reduction: str,
    ignore_index: int,
    batch_group: Group,
    count: int | None = None,
) -> Tensor:
    """This rank's share of a negative log likelihood whose samples are spread over `batch_group`."""
    size = log_probabilities.shape[1 if log_probabilities.ndim > 1 else 0]
    return nll_loss_cut_classes(
        log_probabilities,
        target,
        weight,
        reduction=reduction,
        ignore_index=ignore_index,
        batch_group=batch_group,
        classes=(0, size, size),
    )


def nll_loss_cut_classes(
    log_probabilities: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    reduction: str,
    ignore_index: int,
    batch_group: Group | None,
    classes: tuple[int, int, int],
) -> Tensor:
    """This rank's share of a negative log likelihood of which it holds some of the classes.

    Args:
        log_probabilities: [batch, own classes, ...] or [own classes].
        target: [batch, ...] class indices of all classes.
        weight: [all classes] or None.
        reduction: "mean", "sum" or "none".
        ignore_index: target that counts as no sample.
        batch_group: ranks that share the samples, or None.
        classes: first own class, one past the last, number of all classes.
    """
    start, stop, total_classes = classes
    dim = 1 if log_probabilities.ndim > 1 else 0
    shape = log_probabilities.shape
    numbers = as_array(target)
    valid = numbers != ignore_index
    chosen = in_range(np.where(valid, numbers, 0), total_classes, f"nll_loss: a target (other than {ignore_index})")
    factor = valid if weight is None else as_array(weight)[chosen] * valid
    factor = factor.astype(as_array(log_probabilities).dtype)
    mine = (chosen >= start) & (chosen < stop)
    place = np.expand_dims(np.where(mine, chosen - start, 0), dim)
    own_factor = -factor * mine
    if reduction == "mean":
        own_factor = own_factor / _total(factor, batch_group)

    def forward(value: Any) -> Array:
        if stop > start:
            losses = np.take_along_axis(as_array(value), place, dim).squeeze(dim) * own_factor
        else:
            losses = np.zeros_like(own_factor)
        return losses if reduction == "none" else np.asarray(losses.sum(dtype=losses.dtype))

    def backward(gradient: Any) -> Array:
        result = np.zeros(shape, own_factor.dtype)
        if stop > start:
            # a sample that doesn't count has no gradient, even where the mean over none makes it infinite
            share = np.where(mine & valid, own_factor * as_array(gradient), np.zeros((), own_factor.dtype))
            np.put_along_axis(result, place, np.expand_dims(share, dim), dim)
        return result

    return _with_gradient(log_probabilities, forward, backward)


def _total(factor: Array, batch_group: Group | None) -> Array:
    """The weight of all ranks' samples."""
    total = np.array(factor.sum(dtype=factor.dtype))
    if batch_group is not None:
        get_platform().collectives.all_reduce(total, "sum", batch_group)
    return total
