"""The optimizer classes of the platform in use; importing this module loads the framework.

Only torch has them: they are `torch.optim.Optimizer`s, so schedulers, hooks and checkpoints treat them as such.
"""

from __future__ import annotations

from hp_core.errors import PlatformError
from hp_core.platform import get_platform

__all__ = ["AdamW", "ChainedOptimizer", "Muon"]

if get_platform().name != "torch":
    raise PlatformError(
        f"hp_fsdp.optim has optimizers for torch; the platform in use is {get_platform().name!r}. Take the framework's own "
        f"optimizers on the sharded parameters, or set HYPER_PARALLEL_PLATFORM=torch."
    )

from hp_fsdp.platform.torch.optim import AdamW, ChainedOptimizer, Muon
