"""All sharding rules by canonical op name, and the door by which users add their own."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from hp_core.errors import ShardingRuleError
from hp_core.platform import get_platform
from hp_core.rules.rule import Composite, OpCall, Strategy

__all__ = ["Rule", "find_rule", "nearest_names", "on_change", "register_sharding_rule", "rule", "rule_names"]

RuleFunction = Callable[[OpCall], Strategy | Composite]

FlatUse = Literal["gathered", "elementwise", "alike", "reduces", "as is"]
"""How an op takes flat operands (see `hp_core.rules.flat`): put together first; share by share if it is elementwise in its
operands, or elementwise in operands that must lie alike; share by share if it reduces all elements; or as they are, because
the rule, or the ops that it is computed from, sees to that.
"""

_FAMILIES = (
    "elementwise",
    "matmul",
    "matrix",
    "view",
    "split",
    "join",
    "index",
    "scatter",
    "rearrange",
    "search",
    "reduce",
    "distance",
    "norm",
    "scan",
    "order",
    "embedding",
    "conv",
    "attention",
    "loss",
    "foreach",
    "random",
)


@dataclass(frozen=True)
class Rule:
    """A rule and how its calls are read.

    Attributes:
        name: canonical op name.
        parameters: names of the op's parameters in order; one that starts with "*" takes all remaining positional ones.
        function: from call to strategy.
        sees_floats: whether the strategy may depend on floating-point arguments.
        decomposed: the function computes the op itself, from other ops on DTensors.
        inplace: of a decomposed op, whether it is the in-place variant (its name ends in "_"); None: both are.
        flat: how it takes flat operands.
    """

    name: str
    parameters: tuple[str, ...]
    function: Callable[..., Any]
    sees_floats: bool = False
    decomposed: bool = False
    inplace: bool | None = False
    flat: FlatUse = "gathered"


_rules: dict[str, Rule] = {}
_custom: dict[Any, Rule] = {}
_loaded = False
on_change: list[Callable[[], None]] = []
"""Called when a rule is registered or changes its mind: whoever caches what rules said drops it."""


def rule(
    names: str,
    parameters: str,
    *,
    sees_floats: bool = False,
    decomposed: bool = False,
    inplace: bool | None = False,
    flat: FlatUse = "gathered",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the function is the rule of these ops (names and parameters separated by blanks)."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names.split():
            if name in _rules:
                raise ShardingRuleError(
                    f"op {name!r} has two rules: {_rules[name].function.__module__} and {function.__module__}."
                )
            _rules[name] = Rule(name, tuple(parameters.split()), function, sees_floats, decomposed, inplace, flat)
        return function

    return register


def register_sharding_rule(
    op: str | Callable[..., Any], parameters: str, *, sees_floats: bool = False
) -> Callable[[RuleFunction], RuleFunction]:
    """Give an op of yours, or one without a rule, a sharding rule; used as a decorator.

    Args:
        op: the function as it is called (for example `torch.ops.mine.scale`; all its overloads are meant), or a canonical op name.
        parameters: the names of its parameters in order, separated by blanks.
        sees_floats: set it if the strategy depends on the value of floating-point arguments.

    The decorated function takes an `OpCall` and returns a `Strategy`, usually by `solve`::

        @register_sharding_rule(torch.ops.mine.scale, "input factor")
        def scale(call):
            x = call.spec("input")
            labels = tuple(range(x.ndim))
            return solve([Operand(x, labels, FACTOR)], [Output(labels)])
    """

    def register(function: RuleFunction) -> RuleFunction:
        name = op if isinstance(op, str) else getattr(op, "__name__", str(op))
        entry = Rule(name, tuple(parameters.split()), function, sees_floats)
        _custom[get_platform().ops.identity(op)] = entry
        for changed in on_change:
            changed()
        return function

    return register


def find_rule(function: Any, name: str | None) -> Rule | None:
    """The rule of an intercepted function with this canonical name; users' rules come first."""
    _load()
    try:
        custom = _custom.get(get_platform().ops.identity(function))
    except TypeError:
        custom = None
    return custom or (_custom.get(name) or _rules.get(name) if name is not None else None)


def rule_names() -> list[str]:
    """Names of all ops that have a rule."""
    _load()
    return sorted(_rules)


def nearest_names(name: str) -> list[str]:
    """Registered names that look like `name`."""
    return difflib.get_close_matches(name, rule_names(), n=3, cutoff=0.5)


def _load() -> None:
    global _loaded
    if not _loaded:
        _loaded = True
        for family in _FAMILIES:
            importlib.import_module(f"hp_core.rules.{family}")
