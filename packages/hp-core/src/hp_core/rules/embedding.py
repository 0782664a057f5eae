"""Embedding: with a cut vocabulary each rank looks up the rows it has and gives zeros for the others, a pending sum."""

from __future__ import annotations

from hp_core.errors import ShardingRuleError
from hp_core.rules.registry import rule
from hp_core.rules.rule import FACTOR, PLAIN, OpCall, Operand, Output, OutsideRule, Strategy, solve

__all__: list[str] = []


@rule("one_hot", "input num_classes")
def _one_hot(call: OpCall) -> Strategy:
    """Indices [...] -> [..., classes], the classes whole."""
    if call.get("num_classes", -1) == -1:
        raise ShardingRuleError("one_hot without num_classes would count each rank's own classes; pass num_classes.")
    labels = tuple(range(call.specs[0].ndim))
    return solve([Operand(call.specs[0], labels, PLAIN)], [Output((*labels, None))])


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
