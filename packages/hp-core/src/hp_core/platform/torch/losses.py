"""Losses on a rank's own samples, or on its own classes, that add up to the dense loss over the ranks.

Vocabulary-parallel cross entropy follows Megatron-LM (Shoeybi et al. 2019, section 3): a max and one stacked sum over
the ranks of the classes, and a backward without communication.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hp_core.platform.protocol import Group
from hp_core.platform.torch.collectives import TorchCollectives

__all__ = [
    "cross_entropy_cut_classes",
    "cross_entropy_share",
    "in_range",
    "loss_share",
    "nll_loss_cut_classes",
    "nll_loss_share",
]

_all_reduce = TorchCollectives().all_reduce


def cross_entropy_share(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    batch_group: Group,
    count: int | None,
) -> torch.Tensor:
    """This rank's share of a cross entropy whose samples are spread over `batch_group`.

    Args:
        logits: [batch, classes, ...], this rank's samples.
        target: [batch, ...] class indices, or probabilities like the logits.
        weight: [classes] or None.
        reduction: "mean" or "sum".
        ignore_index: target that counts as no sample.
        label_smoothing: in [0, 1].
        batch_group: ranks that hold the samples.
        count: global number of samples, if targets are probabilities.
    """
    total = F.cross_entropy(
        logits, target, weight, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing
    )
    if reduction == "sum":
        return total
    return total / (
        count if count is not None else _total_weight(target, weight, ignore_index, logits.dtype, batch_group)
    )


def nll_loss_share(
    log_probabilities: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    reduction: str,
    ignore_index: int,
    batch_group: Group,
    count: int | None,
) -> torch.Tensor:
    """This rank's share of a negative log likelihood; see `cross_entropy_share`."""
    total = F.nll_loss(log_probabilities, target, weight, ignore_index=ignore_index, reduction="sum")
    if reduction == "sum":
        return total
    return total / _total_weight(target, weight, ignore_index, log_probabilities.dtype, batch_group)


def loss_share(
    *operands: torch.Tensor, loss: str, names: tuple[str, ...], count: int, extra: dict[str, Any]
) -> torch.Tensor:
    """This rank's share of the mean over `count` elements (or rows) of a loss of torch.nn.functional."""
    total: torch.Tensor = getattr(F, loss)(**dict(zip(names, operands, strict=True)), **extra, reduction="sum")
    return total / count


def cross_entropy_cut_classes(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    batch_group: Group | None,
    class_group: Group,
    classes: tuple[int, int, int],
) -> torch.Tensor:
    """Cross entropy where each rank of `class_group` holds the logits of its own classes.

    Args:
        logits: [batch, own classes, ...] or [own classes].
        target: [batch, ...] class indices of all classes.
        weight: [all classes] or None.
        reduction: "mean", "sum" or "none".
        ignore_index: target that counts as no sample.
        label_smoothing: in [0, 1].
        batch_group: ranks that share the samples, or None.
        class_group: ranks that share the classes.
        classes: first own class, one past the last, number of all classes.
    """
    start, stop, total_classes = classes
    own = logits.movedim(1, -1) if logits.dim() > 1 else logits
    valid, safe, sample_weight = _samples("cross_entropy", target, weight, ignore_index, total_classes, own.dtype)
    own_weight = None if weight is None or not label_smoothing else weight[start:stop].to(own.dtype)
    losses: torch.Tensor = _cut_classes(
        own, safe, valid, sample_weight, own_weight, label_smoothing, class_group, classes
    )
    return _reduced(losses, sample_weight, reduction, batch_group)


def nll_loss_cut_classes(
    log_probabilities: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    reduction: str,
    ignore_index: int,
    batch_group: Group | None,
    classes: tuple[int, int, int],
) -> torch.Tensor:
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
    own = log_probabilities.movedim(1, -1) if log_probabilities.dim() > 1 else log_probabilities
    valid, safe, sample_weight = _samples("nll_loss", target, weight, ignore_index, total_classes, own.dtype)
    mine = (safe >= start) & (safe < stop)
    if stop > start:
        picked = own.gather(-1, torch.where(mine, safe - start, 0).unsqueeze(-1)).squeeze(-1)
    else:
        picked = own.sum(-1)  # zeros, in the graph
    losses = -torch.where(mine & valid, picked * sample_weight, 0)
    return _reduced(losses, sample_weight, reduction, batch_group)


def _samples(
    op: str,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    total_classes: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which targets count, the targets with a class that exists in place of the others, and the weight of each sample."""
    valid = target != ignore_index
    safe = torch.where(valid, target, 0)
    in_range(safe, total_classes, f"{op}: a target (other than ignore_index={ignore_index})")
    return valid, safe, valid.to(dtype) if weight is None else torch.where(valid, weight[safe], 0).to(dtype)


def _reduced(
    losses: torch.Tensor, sample_weight: torch.Tensor, reduction: str, batch_group: Group | None
) -> torch.Tensor:
    """The losses as they are, their sum, or this rank's share of their weighted mean over all samples."""
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    denominator = sample_weight.sum()
    if batch_group is not None:
        denominator = denominator.clone()
        _all_reduce(denominator, "sum", batch_group)
    return losses.sum() / denominator


def in_range(indices: torch.Tensor, size: int, what: str) -> None:
    """Check `0 <= indices < size`: at once on a CPU, as an asynchronous assertion on a device (nothing waits for it)."""
    if not indices.numel() or indices.is_meta:
        return
    low, high = torch.aminmax(indices)
    if not indices.is_cpu:
        torch._assert_async((low >= 0) & (high < size), f"{what} is out of range for size {size}")
    elif int(low) < 0 or int(high) >= size:
        raise IndexError(
            f"{what} is out of range: values reach from {int(low)} to {int(high)}, but the size is {size}."
        )


class _CutClasses(torch.autograd.Function):
    """Loss per sample, [batch, ...], from logits [batch, ..., own classes]."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        valid: torch.Tensor,
        sample_weight: torch.Tensor,
        own_weight: torch.Tensor | None,
        smoothing: float,
        group: Group,
        classes: tuple[int, int, int],
    ) -> torch.Tensor:
        start, stop, total_classes = classes
        exact = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        if stop > start:
            largest = exact.amax(-1)
        else:
            largest = exact.new_full(target.shape, float("-inf"))
        _all_reduce(largest, "max", group)
        shifted = exact - largest.unsqueeze(-1)
        exponentials = shifted.exp()
        mine = (target >= start) & (target < stop)
        index = torch.where(mine, target - start, 0).unsqueeze(-1)
        at_target = shifted.gather(-1, index).squeeze(-1) if stop > start else torch.zeros_like(largest)
        parts = [exponentials.sum(-1), torch.where(mine, at_target, 0)]
        if smoothing:
            parts += [(shifted if own_weight is None else shifted * own_weight).sum(-1)]
        stacked = torch.stack(parts)
        _all_reduce(stacked, "sum", group)
        log_sum = stacked[0].log()
        losses = (log_sum - stacked[1]) * sample_weight
        if smoothing:
            all_weight = float(total_classes) if own_weight is None else own_weight.sum()
            if own_weight is not None:
                all_weight = all_weight.clone()  # type: ignore[union-attr]
                _all_reduce(all_weight, "sum", group)
            smooth = (log_sum * all_weight - stacked[2]) * valid
            losses = losses * (1 - smoothing) + smooth * (smoothing / total_classes)
            ctx.all_weight = all_weight
        ctx.save_for_backward(exponentials / stacked[0].unsqueeze(-1), mine, index, sample_weight, valid, own_weight)
        ctx.smoothing, ctx.total_classes, ctx.dtype = smoothing, total_classes, logits.dtype
        return losses.to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        probabilities, mine, index, sample_weight, valid, own_weight = ctx.saved_tensors
        smoothing = ctx.smoothing
        # a sample that doesn't count has no gradient, even where the mean over none makes it infinite
        gradient = torch.where(valid, gradient.to(probabilities.dtype), 0)
        scale = gradient * sample_weight * (1 - smoothing)
        result = probabilities * scale.unsqueeze(-1)
        if result.shape[-1]:
            result.scatter_add_(-1, index, torch.where(mine, -scale, 0).unsqueeze(-1))
        if smoothing:
            share = (gradient * (smoothing / ctx.total_classes)).unsqueeze(-1)
            result += share * (probabilities * ctx.all_weight - (1.0 if own_weight is None else own_weight))
        return result.to(ctx.dtype), None, None, None, None, None, None, None


_cut_classes: Any = _CutClasses.apply


def _total_weight(
    target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, dtype: torch.dtype, group: Group
) -> torch.Tensor:
    """Sum over all ranks' samples of the weight of each that is not ignored."""
    valid = target != ignore_index
    own = (
        valid.sum().to(dtype) if weight is None else torch.where(valid, weight[torch.where(valid, target, 0)], 0).sum()
    )
    _all_reduce(own, "sum", group)
    return own
