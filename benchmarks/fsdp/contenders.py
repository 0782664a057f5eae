"""What is compared: the same blocks sharded by hp-fsdp, with and without overlap, and by torch's FSDP2; and one dense process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh as torch_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from benchmarks.blocks import Block
from hp_core import init_device_mesh
from hp_fsdp import fully_shard
from hp_fsdp.optim import AdamW

__all__ = ["DENSE", "IN_TURN", "NAMES", "OURS", "TORCH", "Contender", "Stack", "contender"]

OURS, IN_TURN, TORCH, DENSE = "hp-fsdp", "hp-fsdp, overlap=False", "torch FSDP2", "dense"
NAMES = (OURS, IN_TURN, TORCH)


class Stack(nn.Module):
    """Blocks one after another."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, width]` to the same."""
        for block in self.blocks:
            x = block(x)
        return x


@dataclass(frozen=True)
class Contender:
    """One way to train the stack.

    Attributes:
        model: the stack, sharded block by block, the whole last.
        optimizer: AdamW: our own on flat chunks, or torch's, as fast as it is on this device.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def differentiate(self, x: torch.Tensor) -> torch.Tensor:
        """Forward and backward of the mean square of the output."""
        loss: torch.Tensor = self.model(x).square().mean()
        loss.backward()
        return loss

    def update(self) -> None:
        """The optimizer's step, and no gradients afterwards."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, x: torch.Tensor) -> None:
        """A whole step."""
        self.differentiate(x)
        self.update()


def contender(name: str, width: int, layers: int, dtype: torch.dtype = torch.float32) -> Contender:
    """Build and shard a stack of equal weights on every rank."""
    torch.manual_seed(0)
    model = Stack(width, layers).to(dtype)
    ranks = torch.distributed.get_world_size()
    if name == DENSE:
        return Contender(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    shard: Callable[[nn.Module], object]
    if name == TORCH:
        of_torch = torch_mesh("cpu", (ranks,))
        shard = lambda module: torch_fully_shard(module, mesh=of_torch)  # noqa: E731
    else:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
        shard = lambda module: fully_shard(module, mesh=mesh, overlap=name == OURS)  # noqa: E731
    for block in model.blocks:
        shard(block)
    shard(model)
    if name == TORCH:
        return Contender(model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True))
    return Contender(model, AdamW(model.parameters(), lr=1e-3))
