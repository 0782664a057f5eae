"""What runs before and after the forward of a unit's modules: objects, so that copies of a module get copies of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hp_fsdp.hsdp_module import units_below
from hp_fsdp.platform import get_tools
from hp_fsdp.root import Root
from hp_fsdp.unit import Unit

__all__ = ["hook_module"]


@dataclass(eq=False)
class _Before:
    """Gather, show the whole parameters, cast the inputs."""

    unit: Unit
    casts: bool

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit = self.unit
        root = unit.root
        if root is None:
            root = Root(module, units_below(module) if self.casts else [unit])
        root.enter(unit)
        policy = unit.policy
        if self.casts and policy.param_dtype is not None and policy.cast_forward_inputs:
            return get_tools().cast((args, kwargs), policy.param_dtype)
        return None


@dataclass(eq=False)
class _After:
    """Show the shards, free the whole parameters, wait for the backward; cast the outputs."""

    unit: Unit
    casts: bool

    def __call__(self, module: Any, args: Any, output: Any) -> Any:
        unit, tools = self.unit, get_tools()
        root = unit.root
        if root is None:
            return None
        if output is None and tools.failing():
            root.fail(unit)
            return None
        dtype = unit.policy.output_dtype if self.casts else None
        if dtype is not None:
            output = tools.cast(output, dtype)
        root.leave(unit, output)
        return output if dtype is not None else None


@dataclass(eq=False)
class _Settle:
    """Before a state dict is made or loaded, modules hold shards."""

    unit: Unit

    def __call__(self, *_: Any) -> None:
        if self.unit.root is not None:
            self.unit.root.settle_for_state()
        self.unit.by_hand = False
        if not self.unit.active:
            self.unit.show_sharded()
            self.unit.free()


def hook_module(unit: Unit, module: Any, casts: bool) -> None:
    """Let the forward of a module use a unit.

    Args:
        unit: the unit.
        module: one of its modules, or one outside that holds a parameter of it.
        casts: whether it is one of its own, whose inputs and outputs the unit's policy concerns.
    """
    tools = get_tools()
    tools.before_forward(module, _Before(unit, casts))
    tools.after_forward(module, _After(unit, casts))
    if casts:
        tools.before_state(module, _Settle(unit))
