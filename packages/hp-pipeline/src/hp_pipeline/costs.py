"""What a pipeline's steps cost in time and memory: the simulator's only input beside the schedule.

A value is one number for all stages (or edges), or a number for each. Units are free, as long as they agree: seconds and
bytes, or "chunks" and "activations of a micro-batch".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from hp_core.errors import PlanError

__all__ = ["Costs", "Values"]

Values = float | Sequence[float]
"""One number for all, or one for each stage (edge)."""

_OF_EDGES = ("latency", "message_bytes", "bandwidth")


@dataclass(frozen=True)
class Costs:
    """Time and memory of a pipeline's steps. The defaults are the unit costs of the literature: F = I = W = 1, B = 2.

    Edge e joins stages e and e + 1; a skip connection from stage a to b counts as edge min(a, b).

    Attributes:
        forward: time of F, by stage.
        input_gradient: time of I, by stage.
        weight_gradient: time of W, by stage. B takes I + W.
        recompute: time that B and I take in addition, because the forward is computed again, by stage.
        latency: time from the end of a message's sending to its arrival, by edge.
        message_bytes: size of a message, by edge; gradients are as large as activations.
        bandwidth: bytes per unit of time of the link, by edge. Messages from one rank to another follow each other.
        activation: memory that a micro-batch's F takes, kept until its B or W is done, by stage.
        weight_activation: the part of it that W still needs once I is done, by stage; None: all of it.
        static: memory of the stage itself (weights, gradients, optimizer states), by stage.
        unsharded: memory that the gathered weights take from UNSHARD to RESHARD, by stage.
        unshard: time of UNSHARD, by stage. Collectives run beside the computation, one after the other.
        reduce: time of REDUCE_GRAD, by stage.
        swap: time of SWAP_OUT and of SWAP_IN, by stage. Copies run beside the computation, one per direction at a time.
        overlap: how much of the shorter part of an OVERLAP_B_F step is hidden behind the longer one. 0: the two take F + B (a
            device that computes all the time gains nothing); 1: they take max(F, B).
    """

    forward: Values = 1.0
    input_gradient: Values = 1.0
    weight_gradient: Values = 1.0
    recompute: Values = 0.0
    latency: Values = 0.0
    message_bytes: Values = 0.0
    bandwidth: Values = math.inf
    activation: Values = 1.0
    weight_activation: Values | None = None
    static: Values = 0.0
    unsharded: Values = 0.0
    unshard: Values = 0.0
    reduce: Values = 0.0
    swap: Values = 0.0
    overlap: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            single = isinstance(value, (int, float))
            numbers = (float(value),) if single else tuple(float(number) for number in value)
            if field.name == "bandwidth":
                possible = all(number > 0 for number in numbers)
            else:
                possible = all(number >= 0 and math.isfinite(number) for number in numbers)
            if not possible:
                raise PlanError(
                    f"costs: {field.name} = {value} should be {'> 0' if field.name == 'bandwidth' else 'finite and >= 0'}."
                )
            object.__setattr__(self, field.name, numbers[0] if single else numbers)
        if not isinstance(self.overlap, float) or self.overlap > 1:
            raise PlanError(f"costs: overlap = {self.overlap} should be a number between 0 (F + B) and 1 (max(F, B)).")

    def of(self, name: str, stages: int) -> tuple[float, ...]:
        """A cost's values, one for each stage (for each edge, if it is a cost of edges).

        Args:
            name: of the attribute.
            stages: how many stages the pipeline has.

        Raises:
            PlanError: there are more or fewer values.
        """
        value = (
            self.activation if name == "weight_activation" and self.weight_activation is None else getattr(self, name)
        )
        count = stages - 1 if name in _OF_EDGES else stages
        if isinstance(value, float):
            return (value,) * count
        if len(value) != count:
            what = f"{count} edges" if name in _OF_EDGES else f"{count} stages"
            raise PlanError(
                f"costs: {name} has {len(value)} values, but the pipeline has {what}; give one number, or one for each."
            )
        return tuple(value)

    def check(self, stages: int) -> None:
        """See that all costs fit the number of stages.

        Raises:
            PlanError: one doesn't.
        """
        for field in fields(self):
            if field.name != "overlap":
                self.of(field.name, stages)

    def message_times(self, stages: int) -> tuple[tuple[float, float], ...]:
        """For each edge the time that a message occupies the link, and the time until it has arrived."""
        edges = zip(*(self.of(name, stages) for name in _OF_EDGES), strict=True)
        return tuple((size / rate, size / rate + latency) for latency, size, rate in edges)
