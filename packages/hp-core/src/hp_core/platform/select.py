"""Which framework this process works with: decided once, on first use.

Order: `HYPER_PARALLEL_PLATFORM` if set; else the framework that is already imported; else the only one installed; else
torch. A framework is never imported just to look at it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

from hp_core.errors import PlatformError
from hp_core.platform.protocol import Platform

__all__ = ["get_platform"]

_VARIABLE = "HYPER_PARALLEL_PLATFORM"
_FRAMEWORKS = ("torch", "mindspore")
_chosen: Platform | None = None


def get_platform() -> Platform:
    """The platform of this process, resolved on the first call.

    Raises:
        PlatformError: no framework is installed, or the one asked for is unknown, isn't installed, or can't be imported.
    """
    global _chosen
    if _chosen is None:
        name = choose(os.environ.get(_VARIABLE), set(sys.modules), _installed())
        module = importlib.import_module(f"hp_core.platform.{name}")
        _chosen = module.create_platform()
    return _chosen


def choose(wanted: str | None, imported: set[str], installed: set[str]) -> str:
    """Name of the framework to use; a pure function of what the environment says.

    Args:
        wanted: value of `HYPER_PARALLEL_PLATFORM`, or None.
        imported: names of imported modules.
        installed: names of frameworks that could be imported.
    """
    if wanted:
        if wanted not in _FRAMEWORKS:
            raise PlatformError(f"{_VARIABLE}={wanted!r} is not a known platform; use one of {', '.join(_FRAMEWORKS)}.")
        if wanted not in installed:
            raise PlatformError(f"{_VARIABLE}={wanted}, but {wanted} is not installed: pip install {wanted}.")
        return wanted
    already = [name for name in _FRAMEWORKS if name in imported]
    if len(already) == 1:
        return already[0]
    if not installed:
        raise PlatformError("no framework is installed: pip install torch (2.7 or newer), or mindspore (2.8 or newer).")
    return "torch" if "torch" in installed else "mindspore"


def _installed() -> set[str]:
    return {name for name in _FRAMEWORKS if name in sys.modules or importlib.util.find_spec(name) is not None}
