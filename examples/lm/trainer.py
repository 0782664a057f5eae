"""One training step, dense or on a mesh: the same code, since a distributed tensor is used like a tensor.

The step number decides the batch and the learning rate; the model and the optimizer are all the state there is, so a
run that resumes goes on exactly as if it had not stopped.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .config import RunConfig
from .model import build_model, next_byte_loss
from .parallel import dense, distribute_batch, local_positions, loss_context, parallelize
from .step import StepResult, learning_rate
from .text import Text

if TYPE_CHECKING:
    from hp_core import DeviceMesh


class Trainer:
    """The model, its optimizer and the steps of a run.

    Args:
        config: The run, already validated.
        text: What it learns from.
        mesh: Where it runs; None for one dense process.
    """

    def __init__(self, config: RunConfig, text: Text, mesh: DeviceMesh | None = None) -> None:
        self.config, self.text, self.mesh = config, text, mesh
        self.model = build_model(config.sizes, getattr(torch, config.dtype), config.seed).to(config.device)
        if mesh is not None:
            parallelize(self.model, mesh, config.sequence_parallel)
        matrices = [parameter for parameter in self.model.parameters() if parameter.ndim > 1]
        gains = [parameter for parameter in self.model.parameters() if parameter.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": gains, "weight_decay": 0.0}],
            lr=config.lr,
            betas=(0.9, 0.95),
        )

    @property
    def parameter_count(self) -> int:
        """Parameters of the whole model, whatever the mesh."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def train_step(self, step: int) -> StepResult:
        """Runs step number `step` (from 1) on its batch.

        Raises:
            FloatingPointError: The loss is not finite (on all ranks alike); the weights are those before the step.
        """
        loss = self.compute_gradients(step)
        norm, lr = self.update(step)
        return StepResult(loss, norm, lr)

    def compute_gradients(self, step: int) -> float:
        """Forward and backward of a step's batch: fills the parameters' gradients and returns the loss."""
        self.optimizer.zero_grad()
        with loss_context(self.mesh):
            loss = self._loss("train", step)
            loss.backward()
        value = float(dense(loss))
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the loss of step {step} is {value}: lower --lr (now {self.config.lr}) or lengthen --warmup"
            )
        return value

    def update(self, step: int) -> tuple[float | None, float]:
        """Clips the gradients and takes the optimizer's step; returns their norm before (if clipped), and the rate."""
        norm, lr = self._clip(), learning_rate(self.config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return norm, lr

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss on the validation batches, which are the same each time."""
        with loss_context(self.mesh):
            losses = [float(dense(self._loss("validation", index))) for index in range(self.config.eval_batches)]
        return sum(losses) / len(losses)

    def _loss(self, split: str, step: int) -> Tensor:
        config = self.config
        positions = local_positions(config.batch, self.mesh)
        read = self.text.rows(split, config.seed, step, positions, config.sizes.sequence)
        rows = torch.from_numpy(read).to(config.device)
        inputs, targets = distribute_batch(rows[:, :-1], self.mesh), distribute_batch(rows[:, 1:], self.mesh)
        return next_byte_loss(self.model(inputs), targets)

    def _clip(self) -> float | None:
        if not self.config.clip:
            return None
        # As one list the norms of all sharded gradients are reduced in one message.
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip, foreach=True)
        return float(dense(norm))
