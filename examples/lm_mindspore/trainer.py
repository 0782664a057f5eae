"""One training step on MindSpore, dense or on a mesh: the same code, since a distributed tensor is used like a tensor.

The optimizer is MindSpore's own and works on the local parameters, which `value_and_grad` differentiates by; their
gradients come out laid out as they are, by the law of gradients.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import mindspore as ms
from lm.config import RunConfig
from lm.parallel import dense, distribute_batch, local_positions, parallelize
from lm.step import StepResult, learning_rate
from lm.text import Text
from mindspore import Tensor, ops
from mindspore.experimental import optim

from hp_core import DTensor

from .model import build_model, next_byte_loss

if TYPE_CHECKING:
    from hp_core import DeviceMesh

Gradients = tuple[Tensor, ...]


class Trainer:
    """The model, its optimizer and the steps of a run.

    Args:
        config: The run, already validated.
        text: What it learns from.
        mesh: Where it runs; None for one dense process.
    """

    def __init__(self, config: RunConfig, text: Text, mesh: DeviceMesh | None = None) -> None:
        self.config, self.text, self.mesh = config, text, mesh
        self.model = build_model(config.sizes, getattr(ms, config.dtype), config.seed)
        self.parameter_count = sum(parameter.size for parameter in self.model.trainable_params())
        if mesh is not None:
            parallelize(self.model, mesh, config.sequence_parallel)
        self.parameters = list(self.model.trainable_params())
        matrices = [parameter for parameter in self.parameters if parameter.ndim > 1]
        gains = [parameter for parameter in self.parameters if parameter.ndim <= 1]
        self.optimizer = optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": gains, "weight_decay": 0.0}],
            lr=config.lr,
            betas=(0.9, 0.95),
        )
        self._loss_and_gradients = ms.value_and_grad(self._loss, None, weights=self.optimizer.parameters)

    def named_parameters(self) -> list[tuple[str, Any]]:
        """The model's parameters as its cells see them: distributed tensors on a mesh."""
        return [
            (name, getattr(parameter, "_distributed", parameter))
            for name, parameter in self.model.parameters_and_names()
        ]

    def train_step(self, step: int) -> StepResult:
        """Runs step number `step` (from 1) on its batch.

        Raises:
            FloatingPointError: The loss is not finite (on all ranks alike); the weights are those before the step.
        """
        loss, gradients = self.compute_gradients(step)
        norm, lr = self.update(gradients, step)
        return StepResult(loss, norm, lr)

    def compute_gradients(self, step: int) -> tuple[float, Gradients]:
        """The loss of a step's batch, and the gradients of the optimizer's parameters."""
        loss, gradients = self._loss_and_gradients("train", step)
        value = float(loss.asnumpy())
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the loss of step {step} is {value}: lower --lr (now {self.config.lr}) or lengthen --warmup"
            )
        return value, gradients

    def update(self, gradients: Gradients, step: int) -> tuple[float | None, float]:
        """Clips the gradients and takes the optimizer's step; returns their norm before (if clipped), and the rate."""
        norm, lr = None, learning_rate(self.config, step)
        if self.config.clip:
            norm = self._norm(gradients)
            factor = min(1.0, self.config.clip / (norm + 1e-6))
            gradients = tuple(gradient * factor for gradient in gradients)
        for group in self.optimizer.param_groups:
            ops.assign(group["lr"], lr)
        self.optimizer(gradients)
        return norm, lr

    def validate(self) -> float:
        """Mean loss on the validation batches, which are the same each time."""
        losses = [float(self._loss("validation", index).asnumpy()) for index in range(self.config.eval_batches)]
        return sum(losses) / len(losses)

    def distributed(self, tensors: Gradients) -> list[Any]:
        """What is local to the optimizer's parameters, as the distributed tensors that it is the local part of."""
        found = []
        for parameter, tensor in zip(self.optimizer.parameters, tensors, strict=True):
            owner = getattr(parameter, "_distributed", None)
            found.append(tensor if owner is None else DTensor.from_local(tensor, owner.layout, shape=owner.shape))
        return found

    def _loss(self, split: str, step: int) -> Tensor:
        config = self.config
        positions = local_positions(config.batch, self.mesh)
        rows = self.text.rows(split, config.seed, step, positions, config.sizes.sequence)
        inputs, targets = (distribute_batch(Tensor(part.copy()), self.mesh) for part in (rows[:, :-1], rows[:, 1:]))
        loss = next_byte_loss(self.model(inputs), targets)
        return loss.full_tensor() if isinstance(loss, DTensor) else loss

    def _norm(self, gradients: Gradients) -> float:
        """Norm of the whole gradient. The sums of sharded ones stay pending until they are all added up: one message."""
        total = None
        for gradient in self.distributed(gradients):
            square = (gradient * gradient).sum()
            total = square if total is None else total + square
        return math.sqrt(float(dense(total).asnumpy()))
