"""The check that parallel training is right: the first steps again on one dense process, and the largest differences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from .compare import Trace
from .config import RunConfig
from .parallel import dense
from .text import Text
from .trainer import Trainer

if TYPE_CHECKING:
    from hp_core import DeviceMesh


def trace_run(config: RunConfig, text: Text, steps: int, mesh: DeviceMesh | None = None) -> Trace:
    """Runs the first steps of a run from its seed. All ranks of the mesh must call it; each gets the whole trace."""
    trainer = Trainer(config, text, mesh)
    trainer.compute_gradients(1)
    gradients = {
        name: _whole(parameter.grad)
        for name, parameter in trainer.model.named_parameters()
        if parameter.grad is not None
    }
    losses = [trainer.train_step(step).loss for step in range(1, steps + 1)]
    return Trace(losses, gradients, {name: _whole(parameter) for name, parameter in trainer.model.named_parameters()})


def _whole(tensor: Tensor) -> Tensor:
    return dense(tensor).double()
