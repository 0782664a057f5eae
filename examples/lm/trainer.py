"""One training step, dense or on a mesh: the same code, since a distributed tensor is used like a tensor.

The step number decides the batch and the learning rate; the model and the optimizer are all the state there is, so a
run that resumes goes on exactly as if it had not stopped.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hp_fsdp import clip_grad_norm_
from hp_fsdp.optim import AdamW, get_hyper_optimizer

from . import fully_sharded
from .config import RunConfig
from .model import LanguageModel, build_model, next_byte_loss
from .parallel import dense, distribute_batch, local_positions, loss_context, parallelize
from .step import StepResult, learning_rate
from .text import Text

if TYPE_CHECKING:
    from hp_core import DeviceMesh


class Trainer:
    """The model, its optimizer and the steps of a run; `pipelined.PipelinedTrainer` where the mesh has `pp`.

    Attributes:
        model: What this rank holds of it.
        parameter_count: Parameters of the whole model, whatever the mesh.

    Args:
        config: The run, already validated.
        text: What it learns from.
        mesh: Where it runs; None for one dense process.
    """

    def __init__(self, config: RunConfig, text: Text, mesh: DeviceMesh | None = None) -> None:
        self.config, self.text, self.mesh = config, text, mesh
        model = build_model(config.sizes, getattr(torch, config.dtype), config.seed).to(config.device)
        self.parameter_count = sum(parameter.numel() for parameter in model.parameters())
        self.model = self._placed(model)
        self.optimizer = self._optimizer()

    @property
    def batch_mesh(self) -> DeviceMesh | None:
        """On which the rows of a batch are one tensor."""
        return fully_sharded.tensor_mesh(self.mesh) if self.mesh is not None and self.config.fsdp else self.mesh

    def _placed(self, model: LanguageModel) -> nn.Module:
        """The model as it lies on the mesh."""
        if self.mesh is not None and self.config.fsdp:
            fully_sharded.shard(model, self.mesh, self.config)
        elif self.mesh is not None:
            parallelize(model, self.mesh, self.config.sequence_parallel)
        return model

    def _optimizer(self) -> Any:
        config = self.config
        if config.optimizer == "muon":
            return get_hyper_optimizer(
                self.model,
                muon_kwargs={"lr": config.lr, "weight_decay": config.weight_decay},
                adamw_kwargs={"lr": config.lr, "weight_decay": config.weight_decay, "betas": (0.9, 0.95)},
            )
        matrices = [parameter for parameter in self.model.parameters() if parameter.ndim > 1]
        gains = [parameter for parameter in self.model.parameters() if parameter.ndim <= 1]
        kind = AdamW if config.fsdp else torch.optim.AdamW
        return kind(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": gains, "weight_decay": 0.0}],
            lr=config.lr,
            betas=(0.9, 0.95),
        )

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
            value = self._forward_backward(step)
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
            losses = [self._evaluate(index) for index in range(self.config.eval_batches)]
        return sum(losses) / len(losses)

    def _forward_backward(self, step: int) -> float:
        loss = self._loss("train", step)
        loss.backward()
        return self._value(loss)

    def _evaluate(self, step: int) -> float:
        return self._value(self._loss("validation", step))

    def _rows(self, split: str, step: int) -> Tensor:
        """This rank's rows of a step's batch: int64 `[rows, sequence + 1]`."""
        config = self.config
        positions = local_positions(config.batch, self.mesh)
        read = self.text.rows(split, config.seed, step, positions, config.sizes.sequence)
        return torch.from_numpy(read).to(config.device)

    def _loss(self, split: str, step: int) -> Tensor:
        rows = self._rows(split, step)
        inputs, targets = (distribute_batch(part, self.batch_mesh) for part in (rows[:, :-1], rows[:, 1:]))
        return next_byte_loss(self.model(inputs), targets)

    def _value(self, loss: Tensor) -> float:
        """The loss of the whole batch."""
        if self.mesh is not None and self.config.fsdp:
            return float(fully_sharded.mean_over_data(loss, self.mesh))
        return float(dense(loss))

    def _clip(self) -> float | None:
        if not self.config.clip:
            return None
        if self.config.fsdp:
            return float(clip_grad_norm_(self.model.parameters(), self.config.clip))
        # As one list the norms of all sharded gradients are reduced in one message.
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip, foreach=True)
        return float(dense(norm))
