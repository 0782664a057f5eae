"""The seam between stages and the framework: trees of values, leaves of graphs, and backwards in one piece or two."""

from __future__ import annotations

from functools import lru_cache

from hp_core.errors import PlatformError
from hp_core.platform import get_platform
from hp_pipeline.platform.protocol import Chunk, Saved, ThreadTools, Tools

__all__ = ["Chunk", "Saved", "ThreadTools", "Tools", "get_thread_tools", "get_tools"]


@lru_cache(maxsize=1)
def get_tools() -> Tools:
    """The tools of the framework in use.

    Raises:
        PlatformError: hp-pipeline doesn't run stages on it.
    """
    _require_torch()
    from hp_pipeline.platform.torch.tools import TorchTools

    return TorchTools()


@lru_cache(maxsize=1)
def get_thread_tools() -> ThreadTools:
    """What pairs of a backward and a forward need of the framework in use.

    Raises:
        PlatformError: hp-pipeline doesn't run stages on it.
    """
    _require_torch()
    from hp_pipeline.platform.torch.threads import TorchThreadTools

    return TorchThreadTools()


def _require_torch() -> None:
    name = get_platform().name
    if name != "torch":
        raise PlatformError(
            f"hp-pipeline runs stages that are torch modules; the platform in use is {name!r}. Set HYPER_PARALLEL_PLATFORM=torch. "
            f"(Schedules, the validator and the simulator need no framework.)"
        )
