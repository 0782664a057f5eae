"""The seam between units and the framework: storages, hooks of modules, and the engine of gradients."""

from __future__ import annotations

from functools import lru_cache

from hp_core.errors import PlatformError
from hp_core.platform import get_platform
from hp_fsdp.platform.protocol import Tools

__all__ = ["Tools", "get_tools"]


@lru_cache(maxsize=1)
def get_tools() -> Tools:
    """The tools of the framework in use.

    Raises:
        PlatformError: hp-fsdp doesn't support it.
    """
    name = get_platform().name
    if name != "torch":
        raise PlatformError(
            f"hp-fsdp shards torch modules; the platform in use is {name!r}. Set HYPER_PARALLEL_PLATFORM=torch."
        )
    from hp_fsdp.platform.torch.tools import TorchTools

    return TorchTools()
