"""Embedding: with a cut vocabulary each rank looks up the rows it has and gives zeros for the others, a pending sum."""

from __future__ import annotations

from typing import Any

from hp_core.errors import ShardingRuleError
from hp_core.platform import get_platform
from hp_core.rules.registry import rule
from hp_core.rules.rule import FACTOR, PLAIN, Composite, OpCall, Operand, Output, OutsideRule, Strategy, solve

__all__: list[str] = []


@rule("one_hot", "input num_classes")
def _one_hot(call: OpCall) -> Strategy | Composite:
    """Indices [...] -> [..., classes], the classes whole; without their number it is that of the largest index."""
    if call.get("num_classes", -1) == -1:
        return Composite(_one_hot_of_largest)
    labels = tuple(range(call.specs[0].ndim))
    return solve([Operand(call.specs[0], labels, PLAIN)], [Output((*labels, None))])


def _one_hot_of_largest(x: Any, num_classes: int = -1) -> Any:
    return get_platform().ops.local("one_hot")(x, int(x.max().item()) + 1)


@rule(
    "embedding_bag",
    "input weight offsets max_norm norm_type scale_grad_by_freq mode sparse per_sample_weights include_last_offset padding_idx",
    decomposed=True,
)
def _embedding_bag(
    x: Any,
    weight: Any,
    offsets: Any = None,
    mode: str = "mean",
    per_sample_weights: Any = None,
    padding_idx: int | None = None,
    **others: Any,
) -> Any:
    """Indices [bags, members] -> the sum, mean or largest of each bag's rows; the vocabulary may be cut."""
    odd = [name for name, value in others.items() if value and name != "norm_type"]
    if x.ndim != 2 or offsets is not None or odd:
        what = f"{', '.join(odd)}" if odd else "offsets"
        raise ShardingRuleError(
            f"embedding_bag on DTensors takes indices [bags, members] without {what}: pad the bags to one length and give "
            f"padded members a weight of 0 in per_sample_weights."
        )
    if padding_idx is not None and mode == "max":
        raise ShardingRuleError("embedding_bag with padding_idx has no rule for mode='max'; leave the padding out.")
    rows = get_platform().ops.local("embedding")(x, weight, padding_idx=padding_idx)
    if mode == "max":
        return rows.amax(1)
    kept = None
    if padding_idx is not None:
        kept = (x != padding_idx % weight.shape[0]).to(weight.dtype)
        rows = rows * kept.unsqueeze(-1)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if mode == "sum":
        return rows.sum(1)
    return rows.mean(1) if kept is None else rows.sum(1) / kept.sum(1, keepdim=True).clamp(min=1)


@rule("embedding", "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse")
def _embedding(call: OpCall) -> Strategy:
    """Indices [...], weight [vocabulary, features] -> [..., features]"""
    for name in ("max_norm", "scale_grad_by_freq", "sparse"):
        if call.get(name):
            raise OutsideRule(
                f"embedding with {name}={call.get(name)!r} has no rule: it looks at other ranks' rows; leave it off."
            )
    ids, weight = call.spec("input"), call.spec("weight")
    batch = tuple(range(ids.ndim))
    strategy = solve(
        [Operand(ids, batch, PLAIN), Operand(weight, ("vocabulary", "features"), FACTOR)],
        [Output((*batch, "features"))],
        reduced={"vocabulary": "sum"},
    )
    layout = strategy.layouts[1]
    if layout.axes_of(0):
        start, stop = layout.bounds(tuple(weight.shape))[0]
        padding = call.get("padding_idx")
        strategy.local = "embedding_rows"
        strategy.bound = {
            "start": start,
            "stop": stop,
            "vocabulary": weight.shape[0],
            "padding_index": None if padding is None else padding % weight.shape[0],
        }
    return strategy
