"""Which rules no sample calls: a rule that is never called is never checked."""

from __future__ import annotations

from hp_core.platform import get_platform
from hp_core.rules.registry import find_rule, rule_names

__all__ = ["unsampled_inplace", "unsampled_rules"]


def unsampled_rules() -> list[str]:
    """Ops that have a rule and no sample."""
    sampled = {sample.op for sample in get_platform().op_samples().table()}
    return [name for name in rule_names() if name not in sampled]


def unsampled_inplace() -> list[str]:
    """Ops whose in-place variant the framework and the rule have, and no sample calls."""
    tools = get_platform().op_samples()
    sampled = {sample.op for sample in tools.table() if sample.inplace}
    return [name for name in rule_names() if name not in sampled and tools.has_inplace(name) and _covers_inplace(name)]


def _covers_inplace(name: str) -> bool:
    rule = find_rule(None, name)
    return rule is not None and not (rule.decomposed and rule.inplace is False)
