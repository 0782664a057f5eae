"""The check that parallel training is right: the first steps again on one dense process, and the largest differences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .compare import Trace
from .config import RunConfig
from .parallel import dense
from .pipelined import make_trainer
from .text import Text

if TYPE_CHECKING:
    from hp_core import DeviceMesh


def trace_run(config: RunConfig, text: Text, steps: int, mesh: DeviceMesh | None = None) -> Trace:
    """Runs the first steps of a run from its seed. All ranks of the mesh must call it; each gets the whole trace."""
    trainer = make_trainer(config, text, mesh)
    trainer.compute_gradients(1)
    gradients = {
        name: _whole(parameter.grad)
        for name, parameter in trainer.model.named_parameters()
        if parameter.grad is not None
    }
    losses = [trainer.train_step(step).loss for step in range(1, steps + 1)]
    parameters = {name: _whole(parameter) for name, parameter in trainer.model.named_parameters()}
    if mesh is not None and config.pipelined:
        gradients, parameters = _of_all_stages(gradients), _of_all_stages(parameters)
    return Trace(losses, gradients, parameters)


def _of_all_stages(own: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the ranks of all stages have, by name."""
    of_ranks: list[dict[str, Tensor]] = [{} for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(of_ranks, own)
    return {name: tensor for of_rank in of_ranks for name, tensor in of_rank.items()}


def _whole(tensor: Tensor) -> Tensor:
    return dense(tensor).double()
