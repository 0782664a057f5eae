"""What belongs to a step whatever the framework: what it shows, and the learning rate that its number decides."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .config import RunConfig

FINAL_LR_SHARE = 0.1


@dataclass(frozen=True)
class StepResult:
    """What a step shows.

    Attributes:
        loss: In nats per byte, before the step.
        gradient_norm: Of the whole gradient before clipping; None without clipping.
        lr: Learning rate of the step.
    """

    loss: float
    gradient_norm: float | None
    lr: float


def learning_rate(config: RunConfig, step: int) -> float:
    """Linear warm-up to `lr`, then half a cosine down to a tenth of it at the last step."""
    if step <= config.warmup:
        return config.lr * step / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.lr * (FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
