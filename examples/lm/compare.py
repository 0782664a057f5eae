"""How far two runs are apart: the largest relative differences of their losses, gradients and parameters.

The dense program is the specification: losses, the first step's gradients and the parameters after the last step must
agree to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Not bfloat16: there the order in which an embedding row's gradient is summed changes it by tenths.
TOLERANCES = {"float64": 1e-9, "float32": 1e-4}


@dataclass(frozen=True)
class Trace:
    """What the first steps of a run gave, as dense float64 arrays or tensors of any framework.

    Attributes:
        losses: One a step.
        gradients: Of the first step, before clipping, by parameter name.
        parameters: After the last step, by name.
    """

    losses: list[float]
    gradients: dict[str, Any]
    parameters: dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """The largest relative differences of two traces, and the parameters that showed them."""

    loss: float
    gradient: float
    gradient_of: str
    parameter: float
    parameter_of: str

    @property
    def largest(self) -> float:
        """The largest of all."""
        return max(self.loss, self.gradient, self.parameter)


def say_difference(difference: Difference, dtype: str, say: Callable[[str], object]) -> bool:
    """Says how far a run is from its reference; returns whether that is rounding."""
    agrees = difference.largest <= TOLERANCES[dtype]
    say(f"            loss {difference.loss:.1e}")
    say(f"            gradient of the first step {difference.gradient:.1e} ({difference.gradient_of})")
    say(f"            parameter {difference.parameter:.1e} ({difference.parameter_of})")
    say(f"            {'agrees' if agrees else 'DOES NOT AGREE'} to {TOLERANCES[dtype]:.0e} ({dtype})")
    return agrees


def compare_runs(run: Trace, reference: Trace) -> Difference:
    """How far a run is from the reference.

    Losses are compared as `|a - b| / |b|`. Tensors are compared as wholes, by the largest element of `|a - b|` over the
    largest element of `|b|`: an element that is zero but for rounding then counts for no more than its size.

    Raises:
        ValueError: The traces are of different lengths or name different tensors.
    """
    if len(run.losses) != len(reference.losses):
        raise ValueError(
            f"the traces have {len(run.losses)} and {len(reference.losses)} steps: compare runs of equal length"
        )
    loss = max(abs(a - b) / abs(b) for a, b in zip(run.losses, reference.losses, strict=True))
    gradient, gradient_of = _largest(run.gradients, reference.gradients)
    parameter, parameter_of = _largest(run.parameters, reference.parameters)
    return Difference(loss, gradient, gradient_of, parameter, parameter_of)


def _largest(tensors: dict[str, Any], reference: dict[str, Any]) -> tuple[float, str]:
    """The largest relative difference of two sets of named tensors, and where it is."""
    if tensors.keys() != reference.keys():
        raise ValueError(f"only one of the traces has {sorted(tensors.keys() ^ reference.keys())}")
    return max((_relative(tensors[name], reference[name]), name) for name in reference)


def _relative(tensor: Any, reference: Any) -> float:
    difference = float(abs(tensor - reference).max())
    return difference / max(float(abs(reference).max()), 1e-300) if math.isfinite(difference) else math.inf
