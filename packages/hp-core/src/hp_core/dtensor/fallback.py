"""An op without a rule: run as the framework's own distributed op, or an error that says what to do."""

from __future__ import annotations

import logging
from typing import Any

from hp_core.dtensor.api import DTensorMethods
from hp_core.dtensor.operands import collect_dtensors, refuse_plain_tensors
from hp_core.errors import HyperParallelError, ShardingRuleError
from hp_core.layout import from_placements
from hp_core.mesh import as_mesh
from hp_core.platform import get_platform
from hp_core.rules.registry import nearest_names

__all__ = ["fall_back", "near"]

_logger = logging.getLogger("hp_core")
_told: set[str] = set()


def fall_back(
    function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], reason: HyperParallelError | None
) -> Any:
    """The framework's own distributed op library, told of once per op; or an error that says what to do."""
    operands: list[Any] = []
    collect_dtensors(args, operands)
    collect_dtensors(kwargs, operands)
    layouts = ", ".join(f"{tuple(operand.shape)} {operand.layout}" for operand in operands)
    why = f"{name} has no sharding rule" if reason is None else str(reason)
    remedy = f"Register one with register_sharding_rule({name!r}, ...){near(name)}"
    try:
        refuse_plain_tensors(name, args, kwargs)
        result = get_platform().fallback(function, args, kwargs, _from_native)
    except HyperParallelError as error:
        raise ShardingRuleError(
            f"{why}, and it can't run as the framework's own distributed op: {error} Operands: {layouts}. {remedy}."
        ) from error
    except Exception as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ShardingRuleError(
            f"{why}, and the framework's own distributed op refused it ({type(error).__name__}: {text}). Operands: {layouts}. "
            f"{remedy}, or call it on .to_local() / .full_tensor()."
        ) from error
    if result is NotImplemented:
        raise ShardingRuleError(f"{why}. Operands: {layouts}. {remedy}, or call it on .to_local() / .full_tensor().")
    if name not in _told:
        _told.add(name)
        _logger.info("%s: runs as the framework's own distributed op. Operands: %s", why, layouts)
    return result


def near(name: str) -> str:
    """Rules with a similar name, as part of a message; empty if there are none."""
    names = nearest_names(name)
    return f" (nearest names: {', '.join(names)})" if names else ""


def _from_native(local: Any, mesh: Any, placements: Any, shape: tuple[int, ...]) -> Any:
    layout = from_placements(as_mesh(mesh), placements, len(shape))
    return DTensorMethods.from_local(local, layout, shape=shape)
