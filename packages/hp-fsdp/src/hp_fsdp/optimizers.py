"""What is checked and done before any optimizer steps: gradients have arrived, and the parameters are shards."""

from __future__ import annotations

from typing import Any

from hp_core.errors import PlanError
from hp_core.process_group import get_rank
from hp_fsdp.platform import get_tools
from hp_fsdp.registry import member_of, was_replaced

__all__ = ["watch_optimizers"]


def watch_optimizers() -> None:
    """From now on look at each optimizer before it steps."""
    get_tools().before_optimizers_step(_before_step)


def _before_step(optimizer: Any, parameters: list[Any]) -> None:
    """Wait for reductions on their way.

    Raises:
        PlanError: the optimizer was made before `fully_shard`, or gradients have not been reduced.
    """
    roots, units = set(), set()
    for parameter in parameters:
        member = member_of(parameter)
        if member is None:
            former = was_replaced(parameter)
            if former is not None:
                raise PlanError(
                    f"rank {get_rank()}: {type(optimizer).__name__} holds a whole parameter ({former.name!r}) of a sharded "
                    f"{former.unit.name}, whose updates would be lost; make the optimizer after fully_shard()."
                )
        else:
            units.add(member.unit)
            if member.unit.root is not None:
                roots.add(member.unit.root)
    for root in roots:
        root.wait_for_reductions()
    for unit in units:
        unit.discard_whole()  # would be out of date after the step
    waiting = [unit for unit in units if unit.accumulating or unit.partial]
    if waiting:
        raise PlanError(
            f"rank {get_rank()}: {type(optimizer).__name__} steps while {waiting[0].name} holds gradients that were not reduced: "
            f"the last backward ran without gradient sync. Run the last micro-batch with set_requires_gradient_sync(True) (and "
            f"set_requires_all_reduce(True)), or outside of no_sync(); zero_grad() drops them."
        )
