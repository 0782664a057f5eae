"""The block of which the models of several benchmarks are stacked."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["Block"]


class Block(nn.Module):
    """A pre-norm feed-forward block: LayerNorm, Linear(D, 4 D), SiLU, Linear(4 D, D), and the residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, width]` to the same."""
        output: torch.Tensor = x + self.down(F.silu(self.up(self.norm(x))))
        return output
