"""The check that parallel training is right: the first steps again on one dense process, and the largest differences.

The dense program is the specification: losses, the first step's gradients and the parameters after the last step must
agree to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .config import RunConfig
from .parallel import dense
from .text import Text
from .trainer import Trainer

if TYPE_CHECKING:
    from hp_core import DeviceMesh

# Not bfloat16: there the order in which an embedding row's gradient is summed changes it by tenths.
TOLERANCES = {"float64": 1e-9, "float32": 1e-4}


@dataclass(frozen=True)
class Trace:
    """What the first steps of a run gave, as dense tensors.

    Attributes:
        losses: One a step.
        gradients: Of the first step, before clipping, by parameter name.
        parameters: After the last step, by name.
    """

    losses: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


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


def trace_run(config: RunConfig, text: Text, steps: int, mesh: DeviceMesh | None = None) -> Trace:
    """Runs the first steps of a run from its seed. All ranks of the mesh must call it; each gets the whole trace."""
    trainer = Trainer(config, text, mesh)
    trainer.compute_gradients(1)
    gradients = {
        name: dense(parameter.grad)
        for name, parameter in trainer.model.named_parameters()
        if parameter.grad is not None
    }
    losses = [trainer.train_step(step).loss for step in range(1, steps + 1)]
    return Trace(losses, gradients, {name: dense(parameter) for name, parameter in trainer.model.named_parameters()})


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


def _largest(tensors: dict[str, Tensor], reference: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative difference of two sets of named tensors, and where it is."""
    if tensors.keys() != reference.keys():
        raise ValueError(f"only one of the traces has {sorted(tensors.keys() ^ reference.keys())}")
    return max((_relative(tensors[name], reference[name]), name) for name in reference)


def _relative(tensor: Tensor, reference: Tensor) -> float:
    tensor, reference = tensor.double(), reference.double()
    difference = (tensor - reference).abs().max()
    if not torch.isfinite(difference):
        return float("inf")
    return float(difference / reference.abs().max().clamp_min(1e-300))
