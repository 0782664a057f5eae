"""Losses: each rank sums over its own samples and divides by the global count, which leaves a pending sum.

With logits cut along the classes, cross entropy is computed where they lie: two small all-reduces, never a gather.
"""

from __future__ import annotations

from contextvars import ContextVar
from functools import partial
from math import log, pi, prod
from typing import Any

from hp_core.errors import LayoutError, ShardingRuleError
from hp_core.layout import Layout
from hp_core.platform import get_platform
from hp_core.rules.elementwise import broadcast_labels
from hp_core.rules.registry import rule
from hp_core.rules.rule import PLAIN, Composite, OpCall, Operand, Output, Strategy, solve
from hp_core.rules.spec import TensorSpec

__all__ = ["cut_classes_required"]

cut_classes_required = ContextVar("cut_classes_required", default=False)
"""Set inside `loss_parallel()`: logits whose classes are not cut are then refused."""


@rule(
    "cross_entropy",
    "input target weight size_average ignore_index reduce reduction label_smoothing",
    sees_floats=True,
)
@rule("nll_loss", "input target weight size_average ignore_index reduce reduction", sees_floats=True)
def _cross_entropy(call: OpCall) -> Strategy | Composite:
    """Logits [batch, classes, ...] (or [classes]) and class indices [batch, ...] or probabilities like the logits."""
    _refuse_deprecated(call)
    logits, target = call.spec("input"), call.spec("target")
    rest: tuple[Any, ...] = tuple(range(2, logits.ndim))
    batch: tuple[Any, ...] = ("batch", *rest) if logits.ndim > 1 else ()
    by_probability = get_platform().tensors.is_floating(target.dtype)
    if by_probability and logits.layout.axes_of(1 if batch else 0):
        return Composite(_of_probabilities)
    classes = None if by_probability else "classes"
    labels = (batch[0], classes, *rest) if batch else (classes,)
    operands = [
        Operand(logits, labels, PLAIN),
        Operand(target, labels if by_probability else batch, PLAIN),
    ]
    if isinstance(call.get("weight"), TensorSpec):
        operands.append(Operand(call.spec("weight"), (None,), PLAIN))
    reduction = call.get("reduction", "mean")
    reduced: dict[Any, str] = {} if reduction == "none" else dict.fromkeys(batch, "sum")
    if call.name == "nll_loss":
        reduced["classes"] = "sum"  # the rank that has a target's class gives the loss, the others zero
    strategy = solve(operands, [Output(batch if reduction == "none" else ())], reduced=reduced)

    class_dim = 1 if batch else 0
    class_axes = strategy.layouts[0].axes_of(class_dim)
    if not class_axes and logits.layout.mesh.size() > 1:
        strategy.check = partial(_refuse_whole_classes, class_dim, logits.layout)
    batch_axes = tuple(sorted(axis for axis, _ in strategy.outputs[0][0].partials if axis not in class_axes))
    if not class_axes and not batch_axes:
        return strategy
    mesh = logits.layout.mesh
    strategy.bound = {
        "reduction": reduction,
        "ignore_index": call.get("ignore_index", -100),
        "batch_group": mesh.get_group(batch_axes) if batch_axes else None,
    }
    if call.name == "cross_entropy":
        strategy.bound["label_smoothing"] = call.get("label_smoothing", 0.0)
    if class_axes:
        start, stop = strategy.layouts[0].bounds(tuple(logits.shape))[class_dim]
        strategy.local = f"{call.name}_cut_classes"
        strategy.bound["classes"] = (start, stop, logits.shape[class_dim])
        if call.name == "cross_entropy":
            strategy.bound["class_group"] = mesh.get_group(class_axes)
    else:
        samples = prod(size for dim, size in enumerate(logits.shape) if dim != class_dim)
        strategy.local = f"{call.name}_share"
        strategy.bound["count"] = samples if by_probability else None
    return strategy


def _of_probabilities(
    x: Any, target: Any, weight: Any = None, reduction: str = "mean", label_smoothing: float = 0.0, **_: Any
) -> Any:
    """Cross entropy with probabilities as targets, from sums over the classes, which are cut."""
    dim = 1 if x.ndim > 1 else 0
    classes = x.shape[dim]
    if label_smoothing:
        target = target * (1 - label_smoothing) + label_smoothing / classes
    terms = x.log_softmax(dim) * target
    if weight is not None:
        terms = terms * weight.reshape((classes, *[1] * (x.ndim - dim - 1)))
    if reduction == "none":
        return -terms.sum(dim)
    return -terms.sum() if reduction == "sum" else terms.sum() * (-classes / x.numel())


@rule(
    "linear_cross_entropy",
    "input linear_weight target linear_bias weight reduction ignore_index label_smoothing options",
    decomposed=True,
)
def _linear_cross_entropy(
    x: Any,
    linear_weight: Any,
    target: Any,
    linear_bias: Any = None,
    ignore_index: int | None = None,
    options: Any = None,
    **given: Any,
) -> Any:
    """Cross entropy of a linear layer's outputs; where the weight's rows are cut, so are the logits, and stay so."""
    if linear_weight.ndim != 2:
        raise ShardingRuleError(
            f"linear_cross_entropy on DTensors takes a weight [classes, features], got shape {tuple(linear_weight.shape)}."
        )
    local = get_platform().ops.local
    logits = local("linear")(x, linear_weight, linear_bias)
    return local("cross_entropy")(logits, target, ignore_index=-100 if ignore_index is None else ignore_index, **given)


def _refuse_whole_classes(class_dim: int, layout: Layout) -> None:
    if cut_classes_required.get():
        raise LayoutError(
            f"inside loss_parallel() the logits must be cut along the classes (dim {class_dim}), but they are laid out "
            f"{layout}. Make the last layer ColwiseParallel(use_local_output=False), or leave loss_parallel()."
        )


@rule("mse_loss l1_loss", "input target size_average reduce reduction")
@rule("smooth_l1_loss", "input target size_average reduce reduction beta", sees_floats=True)
@rule("huber_loss", "input target reduction delta", sees_floats=True)
@rule("binary_cross_entropy", "input target weight size_average reduce reduction")
@rule("binary_cross_entropy_with_logits", "input target weight size_average reduce reduction pos_weight")
@rule("kl_div", "input target size_average reduce reduction log_target")
@rule("soft_margin_loss", "input target size_average reduce reduction")
@rule("hinge_embedding_loss", "input target margin size_average reduce reduction", sees_floats=True)
@rule("margin_ranking_loss", "input1 input2 target margin size_average reduce reduction", sees_floats=True)
@rule("poisson_nll_loss", "input target log_input full size_average eps reduce reduction", sees_floats=True)
def _pointwise_loss(call: OpCall) -> Strategy:
    """Every element for itself, all operands broadcast."""
    _refuse_deprecated(call)
    labels, result, shape = broadcast_labels(call.specs)
    operands = [Operand(spec, own, PLAIN) for spec, own in zip(call.specs, labels, strict=True)]
    reduction = call.get("reduction", "mean")
    if reduction == "none":
        return solve(operands, [Output(result, shape)])
    strategy = solve(operands, [Output(())], reduced=dict.fromkeys(result, "sum"))
    if reduction != "sum":
        _share_of_mean(call, strategy, shape[0] if reduction == "batchmean" else prod(shape))
    return strategy


@rule("cosine_embedding_loss", "input1 input2 target margin size_average reduce reduction", sees_floats=True)
@rule(
    "triplet_margin_loss", "anchor positive negative margin p eps swap size_average reduce reduction", sees_floats=True
)
@rule("multi_margin_loss", "input target p margin weight size_average reduce reduction", sees_floats=True)
@rule("multilabel_margin_loss", "input target size_average reduce reduction")
def _row_loss(call: OpCall) -> Strategy:
    """Operands [..., features] give [...], with whole features; those with fewer dims are one number for each row."""
    _refuse_deprecated(call)
    ndim = max(spec.ndim for spec in call.specs)
    rows = tuple(range(ndim - 1))
    shape = next(tuple(spec.shape[:-1]) for spec in call.specs if spec.ndim == ndim)
    weight = call.get("weight")
    operands = [Operand(spec, (None,) if spec is weight else (*rows, None)[: spec.ndim], PLAIN) for spec in call.specs]
    reduction = call.get("reduction", "mean")
    if reduction == "none":
        return solve(operands, [Output(rows, shape)])
    strategy = solve(operands, [Output(())], reduced=dict.fromkeys(rows, "sum"))
    if reduction != "sum":
        _share_of_mean(call, strategy, prod(shape))
    return strategy


@rule("gaussian_nll_loss", "input target var full eps reduction", decomposed=True)
def _gaussian_nll_loss(
    x: Any, target: Any, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Any:
    """The variance is one for each element, or for each row; gradients don't see that it is kept from 0."""
    var = var.reduce_partial() if hasattr(var, "layout") else var
    if hasattr(var, "layout"):
        if tuple(var.shape) == tuple(x.shape[:-1]):
            var = var.unsqueeze(-1)
        if bool((var < 0).any()):
            raise ValueError("gaussian_nll_loss: a variance is negative.")
        var = var + (var.detach().clamp(min=eps) - var.detach())
        terms = 0.5 * (var.log() + (x - target) ** 2 / var)
    else:
        terms = 0.5 * (log(max(var, eps)) + (x - target) ** 2 / max(var, eps))
    if full:
        terms = terms + 0.5 * log(2 * pi)
    return terms if reduction == "none" else terms.sum() if reduction == "sum" else terms.mean()


@rule("ctc_loss", "log_probs targets input_lengths target_lengths blank reduction zero_infinity")
def _ctc_loss(call: OpCall) -> Strategy:
    """Paths through whole sequences; lengths may be plain numbers for all samples, so that the batch is whole, too."""
    operands = [Operand(spec, (None,) * spec.ndim, PLAIN) for spec in call.specs]
    batched = call.spec("log_probs").ndim == 3
    return solve(operands, [Output((None,) if call.get("reduction", "mean") == "none" and batched else ())])


def _share_of_mean(call: OpCall, strategy: Strategy, count: int) -> None:
    """Where the elements are spread over ranks, each gives its own sum divided by the global count."""
    if not strategy.outputs[0][0].partials:
        return
    extra = {
        name: value
        for name, value in call.arguments.items()
        if not isinstance(value, TensorSpec) and name not in ("reduction", "size_average", "reduce")
    }
    names = tuple(name for name, value in call.arguments.items() if isinstance(value, TensorSpec))
    strategy.local = "loss_share"
    strategy.bound = {"loss": call.name, "names": names, "count": count, "extra": extra}


def _refuse_deprecated(call: OpCall) -> None:
    if call.get("size_average") is not None or call.get("reduce") is not None:
        raise ShardingRuleError(f"{call.name}: size_average and reduce are deprecated in torch; use reduction=.")
