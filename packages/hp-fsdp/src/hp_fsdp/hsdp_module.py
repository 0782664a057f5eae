"""`HSDPModule`: what `fully_shard` mixes into a module's class, the handle by which users and pipelines drive it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hp_core.errors import PlanError
from hp_core.platform import get_platform
from hp_core.protocols import UnitDescription
from hp_fsdp.description import describe_unit
from hp_fsdp.unit import State, Unit

__all__ = ["ATTRIBUTE", "HSDPModule", "unit_of", "units_below"]

ATTRIBUTE = "_hp_fsdp_unit"


def unit_of(module: Any) -> Unit | None:
    """The unit that a module was sharded into, if any."""
    return module.__dict__.get(ATTRIBUTE)  # type: ignore[no-any-return]


def units_below(module: Any) -> list[Unit]:
    """The units of a module and all below it, in the order of modules, each once."""
    found: dict[int, Unit] = {}
    for _, one in get_platform().modules.named_modules(module):
        unit = unit_of(one)
        if unit is not None:
            found.setdefault(id(unit), unit)
    return list(found.values())


class _Gathered:
    """The handle of `unshard(async_op=True)`."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Return when the parameters are whole."""
        if self._unit.by_hand:
            self._unit.finish_gather()
            self._unit.show_whole()


class HSDPModule:
    """A module that `fully_shard` has sharded. Implements `hp_core.protocols.ShardedModule`."""

    @property
    def _unit(self) -> Unit:
        unit = unit_of(self)
        assert unit is not None
        return unit

    def unshard(self, async_op: bool = False) -> Any:
        """Gather this module's parameters (not those of units below it); they stay until `reshard()`.

        Args:
            async_op: return at once, with a handle whose `wait()` finishes it.
        """
        unit = self._unit
        if unit.state is State.SHARDED:
            unit.refresh()
        unit.by_hand = True
        unit.start_gather()
        handle = _Gathered(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this module's gathered parameters and keep the shards."""
        unit = self._unit
        unit.by_hand = False
        if not unit.active:
            unit.show_sharded()
            unit.free()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backwards reduce gradients; without, they add up on this rank, to be reduced by the next that does."""
        for unit in self._chosen(recurse):
            unit.switches.sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """For HSDP: whether reductions go on to the other replicas; without, chunks add up until the next that does."""
        for unit in self._chosen(recurse):
            unit.switches.all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the end of the next backwards waits for reductions on their way."""
        for unit in units_below(self):
            unit.switches.last_backward = is_last_backward

    def set_reshard_after_forward(self, reshard_after_forward: bool, *, recurse: bool = True) -> None:
        """Whether the forward frees gathered parameters."""
        for unit in self._chosen(recurse):
            unit.switches.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether the backward frees gathered parameters; without, the next micro-batch needn't gather them."""
        for unit in self._chosen(recurse):
            unit.switches.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[Any]) -> None:
        """Units to gather while this one's forward runs, instead of the next one. The same on all ranks."""
        self._unit.switches.forward_prefetch = _units_of(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[Any]) -> None:
        """Units to gather while this one's backward runs, instead of the next one. The same on all ranks."""
        self._unit.switches.backward_prefetch = _units_of(modules)

    def set_gradient_scaling_factor(self, factor: float, *, recurse: bool = True) -> None:
        """By what reduced gradients are multiplied, besides being averaged."""
        for unit in self._chosen(recurse):
            unit.switches.factor = float(factor)

    def set_reduce_op_type(self, reduce_op: str, *, recurse: bool = True) -> None:
        """Whether gradients of the data-parallel ranks are averaged ("avg", the default) or added ("sum").

        Raises:
            PlanError: another word.
        """
        if reduce_op not in ("avg", "sum"):
            raise PlanError(f"set_reduce_op_type({reduce_op!r}): gradients are reduced by 'avg' or 'sum'.")
        for unit in self._chosen(recurse):
            unit.switches.reduce_op = reduce_op

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backwards add gradients up on this rank and communicate none."""
        units = self._chosen(True)
        before = [unit.switches.sync for unit in units]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit, sync in zip(units, before, strict=True):
                unit.switches.sync = sync

    def describe_unit(self) -> UnitDescription:
        """What `hp_core.debug.describe` shows of this module's unit; nothing is communicated."""
        return describe_unit(self._unit)

    def _chosen(self, recurse: bool) -> list[Unit]:
        return units_below(self) if recurse else [self._unit]


def _units_of(modules: Sequence[Any]) -> list[Unit]:
    units = [unit_of(module) for module in modules]
    missing = [type(module).__name__ for module, unit in zip(modules, units, strict=True) if unit is None]
    if missing:
        raise PlanError(f"modules to prefetch must have been sharded by fully_shard(); {missing[0]} was not.")
    return [unit for unit in units if unit is not None]
