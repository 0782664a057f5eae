"""Optimizers as `torch.optim.Optimizer`s: AdamW on flat storage, Muon by owners, and one that holds several."""

from __future__ import annotations

from hp_fsdp.platform.torch.optim.adamw import AdamW
from hp_fsdp.platform.torch.optim.chained import ChainedOptimizer
from hp_fsdp.platform.torch.optim.muon import Muon

__all__ = ["AdamW", "ChainedOptimizer", "Muon"]
