"""Which stage takes the outputs of which: neighbours, and skip connections from a stage to a later one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hp_core.errors import PlanError

__all__ = ["Flow", "flow_of"]


@dataclass(frozen=True)
class Flow:
    """The ways of outputs forward; gradients go the same ways back.

    Attributes:
        providers: for each stage the earlier stages whose outputs it takes, ascending.
        takers: for each stage the later stages that take its outputs, ascending.
    """

    providers: tuple[tuple[int, ...], ...]
    takers: tuple[tuple[int, ...], ...]


def flow_of(stages: int, skips: Iterable[tuple[int, int]] = ()) -> Flow:
    """The flow through a number of stages, each feeding the next, with skip connections (from stage, to stage).

    Raises:
        PlanError: a skip connection doesn't go from a stage over at least one other to a later one, or is named twice.
    """
    providers: list[list[int]] = [[stage - 1] if stage else [] for stage in range(stages)]
    takers: list[list[int]] = [[stage + 1] if stage + 1 < stages else [] for stage in range(stages)]
    for source, target in skips:
        if not (0 <= source < target - 1 and target < stages) or source in providers[target]:
            raise PlanError(
                f"skip connection from stage {source} to stage {target} of {stages}: it must lead over at least one other stage"
                " to a later one, and be named once; outputs reach the next stage anyway."
            )
        providers[target].append(source)
        takers[source].append(target)
    return Flow(tuple(tuple(sorted(each)) for each in providers), tuple(tuple(sorted(each)) for each in takers))
