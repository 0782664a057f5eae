"""Losses: each rank sums over its own samples and divides by the global count, which leaves a pending sum.

With logits cut along the classes, cross entropy is computed where they lie: two small all-reduces, never a gather.
"""

from __future__ import annotations

from contextvars import ContextVar
from functools import partial
from math import prod
from typing import Any

from hp_core.errors import LayoutError, ShardingRuleError
from hp_core.layout import Layout
from hp_core.platform import get_platform
from hp_core.rules.registry import rule
from hp_core.rules.rule import PLAIN, OpCall, Operand, Output, Strategy, solve
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
def _cross_entropy(call: OpCall) -> Strategy:
    """Logits [batch, classes, ...] (or [classes]) and class indices [batch, ...] or probabilities like the logits."""
    if call.get("size_average") is not None or call.get("reduce") is not None:
        raise ShardingRuleError(f"{call.name}: size_average and reduce are deprecated in torch; use reduction=.")
    logits, target = call.spec("input"), call.spec("target")
    rest: tuple[Any, ...] = tuple(range(2, logits.ndim))
    batch: tuple[Any, ...] = ("batch", *rest) if logits.ndim > 1 else ()
    by_probability = get_platform().tensors.is_floating(target.dtype)
    splittable = call.name == "cross_entropy" and not by_probability
    classes = "classes" if splittable else None
    labels = (batch[0], classes, *rest) if batch else (classes,)
    operands = [
        Operand(logits, labels, PLAIN),
        Operand(target, labels if by_probability else batch, PLAIN),
    ]
    if isinstance(call.get("weight"), TensorSpec):
        operands.append(Operand(call.spec("weight"), (None,), PLAIN))
    reduction = call.get("reduction", "mean")
    reduced = {} if reduction == "none" else dict.fromkeys(batch, "sum")
    strategy = solve(operands, [Output(batch if reduction == "none" else ())], reduced=reduced)

    class_dim = 1 if batch else 0
    class_axes = strategy.layouts[0].axes_of(class_dim)
    if not class_axes and logits.layout.mesh.size() > 1:
        strategy.check = partial(_refuse_whole_classes, class_dim, logits.layout)
    batch_axes = tuple(sorted(axis for axis, _ in strategy.outputs[0][0].partials))
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
        strategy.local = "cross_entropy_cut_classes"
        strategy.bound |= {"class_group": mesh.get_group(class_axes), "classes": (start, stop, logits.shape[class_dim])}
    else:
        samples = prod(size for dim, size in enumerate(logits.shape) if dim != class_dim)
        strategy.local = f"{call.name}_share"
        strategy.bound["count"] = samples if by_probability else None
    return strategy


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
def _pointwise_loss(call: OpCall) -> Strategy:
    from hp_core.rules.elementwise import broadcast_labels

    labels, result, shape = broadcast_labels(call.specs)
    operands = [Operand(spec, own, PLAIN) for spec, own in zip(call.specs, labels, strict=True)]
    reduction = call.get("reduction", "mean")
    if reduction == "none":
        return solve(operands, [Output(result, shape)])
    strategy = solve(operands, [Output(())], reduced=dict.fromkeys(result, "sum"))
    if strategy.outputs[0][0].partials and reduction != "sum":
        count = shape[0] if reduction == "batchmean" else prod(shape)
        extra = {
            name: value
            for name, value in call.arguments.items()
            if not isinstance(value, TensorSpec) and name not in ("reduction", "size_average", "reduce")
        }
        tensors = tuple(name for name, value in call.arguments.items() if isinstance(value, TensorSpec))
        strategy.local = "pointwise_loss_share"
        strategy.bound = {"loss": call.name, "names": tensors, "count": count, "extra": extra}
    return strategy
