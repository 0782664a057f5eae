"""What a stage of the timeline does: a part of the language model, or sleep for a known time."""

from __future__ import annotations

import time
from typing import Any

import torch
from lm.config import ModelSizes
from lm.model import build_model, next_byte_loss
from lm.pipelined import ModelPart, layers_of_stage
from torch import Tensor, nn


class SleepingStage(nn.Module):
    """Sleeps in its forward, and in its backward as long for the gradients of inputs and again for those of weights.

    Unlike computations, sleeps take as long on a machine with fewer cores than ranks.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """The same rows."""
        time.sleep(self.seconds)
        product: Tensor = _SleepInBackward.apply(x, self.seconds) * _SleepInBackward.apply(self.weight, self.seconds)
        return product


class _SleepInBackward(torch.autograd.Function):
    """The identity, whose gradient takes a while."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient, None


class Work:
    """The stages of a pipeline, its batch and its loss.

    Args:
        sizes: The language model that stages are parts of.
        sleep: Seconds that a stage sleeps instead of computing; 0: it computes.
        rows: In a batch.
    """

    def __init__(self, sizes: ModelSizes, sleep: float, rows: int) -> None:
        self.sizes, self.sleep, self.rows = sizes, sleep, rows

    def stages(self, wanted: tuple[int, ...], count: int) -> dict[int, nn.Module]:
        """Some of the pipeline's stages, by index."""
        if self.sleep:
            return {stage: SleepingStage(self.sleep) for stage in wanted}
        model = build_model(self.sizes, torch.float32, seed=0)
        return {
            stage: ModelPart(
                model, list(layers_of_stage(self.sizes.layers, count, stage)), stage == 0, stage == count - 1
            )
            for stage in wanted
        }

    def batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, the same on all ranks."""
        if self.sleep:
            return torch.ones(self.rows, 1), torch.ones(self.rows, 1)
        shape = (2, self.rows, self.sizes.sequence)
        both = torch.randint(self.sizes.vocabulary, shape, generator=torch.Generator().manual_seed(0))
        return both[0], both[1]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Of a micro-batch."""
        return nn.functional.mse_loss(output, target) if self.sleep else next_byte_loss(output, target)
