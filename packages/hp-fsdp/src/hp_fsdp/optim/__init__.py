"""Optimizers for sharded parameters: AdamW on flat storage, Muon by owners, and one that holds several.

The classes are the framework's own kind of optimizer and live in the platform layer; importing this loads no framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_core.lazy_exports import lazy_exports

# Public name -> module that defines it.
EXPORTS = {
    "AdamW": "classes",
    "ChainedOptimizer": "classes",
    "Muon": "classes",
    "get_hyper_optimizer": "hyper",
}

if TYPE_CHECKING:
    from hp_fsdp.optim.classes import AdamW as AdamW
    from hp_fsdp.optim.classes import ChainedOptimizer as ChainedOptimizer
    from hp_fsdp.optim.classes import Muon as Muon
    from hp_fsdp.optim.hyper import get_hyper_optimizer as get_hyper_optimizer
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, "hp-fsdp", EXPORTS)
