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
from hp_core.platform.remedies import explain_failed_import, how_to_install

__all__ = ["FRAMEWORKS", "VARIABLE", "get_platform", "require_choice_unchanged"]

VARIABLE = "HYPER_PARALLEL_PLATFORM"
DETERMINISTIC = "HYPER_PARALLEL_DETERMINISTIC"
FRAMEWORKS = ("torch", "mindspore")
_chosen: Platform | None = None


def get_platform() -> Platform:
    """The platform of this process, resolved on the first call.

    Raises:
        PlatformError: no framework is installed, or the one asked for is unknown, isn't installed, or can't be imported; or the
            determinism that the environment asks for can't be had any more.
    """
    global _chosen
    if _chosen is None:
        name = choose(os.environ.get(VARIABLE), _imported(), _installed())
        try:
            importlib.import_module(name)
        except Exception as error:
            raise PlatformError(explain_failed_import(name, error)) from error
        module = importlib.import_module(f"hp_core.platform.{name}")
        platform: Platform = module.create_platform()
        if os.environ.get(DETERMINISTIC):
            from hp_core.platform.determinism import apply_environment

            apply_environment(platform)
        _chosen = platform
    return _chosen


def require_choice_unchanged() -> None:
    """Refuse to begin something new after the environment has come to name another framework than the one in use.

    Raises:
        PlatformError: with the remedy.
    """
    wanted = os.environ.get(VARIABLE)
    if _chosen is not None and wanted and wanted != _chosen.name:
        raise PlatformError(
            f"{VARIABLE}={wanted} was set after this process had begun to work with {_chosen.name}. A process works with one "
            f"framework: set the variable before the first use of hp_core, or start another process."
        )


def choose(wanted: str | None, imported: set[str], installed: set[str]) -> str:
    """Name of the framework to use; a pure function of what the environment says.

    Args:
        wanted: value of `HYPER_PARALLEL_PLATFORM`, or None.
        imported: names of imported modules.
        installed: names of frameworks that could be imported.
    """
    if wanted:
        if wanted not in FRAMEWORKS:
            raise PlatformError(f"{VARIABLE}={wanted!r} is not a known platform; use one of {', '.join(FRAMEWORKS)}.")
        if wanted not in installed:
            raise PlatformError(f"{VARIABLE}={wanted}, but {wanted} is not installed: {how_to_install(wanted)}.")
        return wanted
    already = [name for name in FRAMEWORKS if name in imported]
    if len(already) == 1:
        return already[0]
    if not installed:
        ways = "; or ".join(how_to_install(name) for name in FRAMEWORKS)
        raise PlatformError(f"no framework is installed: {ways}.")
    return "torch" if "torch" in installed else "mindspore"


def _imported() -> set[str]:
    return {name for name in FRAMEWORKS if sys.modules.get(name) is not None}


def _installed() -> set[str]:
    return _imported() | {name for name in FRAMEWORKS if _is_found(name)}


def _is_found(name: str) -> bool:
    # A folder of that name without an __init__ (a checkout of the framework in the working directory) is no package.
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None
