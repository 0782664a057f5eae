"""The optional islands: the kernels compiled against one framework, for fewer steps between an op and its kernel.

They are built by `python -m hp_kernels.build torch` (or `mindspore`) where they are used, not into the wheel, which
therefore serves every version of every framework. Each has a switch, HP_KERNELS_TORCH and HP_KERNELS_MINDSPORE: `auto`
(the default) loads the island if it was built for this very framework, `on` insists, `off` leaves it out.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

__all__ = ["ISLANDS", "folder_of", "left_out", "sources", "switch_of"]

ISLANDS = ("torch", "mindspore")
"""Frameworks that there is an island for."""

_HOME = "HP_KERNELS_HOME"
_reasons: dict[str, str] = {}


def switch_of(island: str) -> str:
    """What the environment says about an island: "auto", "on" or "off".

    Raises:
        ImportError: it says something else.
    """
    variable = f"HP_KERNELS_{island.upper()}"
    switch = os.environ.get(variable, "auto")
    if switch not in ("auto", "on", "off"):
        raise ImportError(f"{variable} must be auto, on or off, not {switch!r}.")
    return switch


def folder_of(island: str, version: str) -> Path:
    """Where an island for this version of its framework, and this Python, is built to and loaded from.

    Below `HP_KERNELS_HOME`, by default `~/.cache/hp_kernels`.
    """
    home = os.environ.get(_HOME) or os.path.join(os.path.expanduser("~"), ".cache", "hp_kernels")
    return Path(home) / f"{island}-{version}-{sys.implementation.cache_tag}-{platform.machine()}"


def sources() -> Path:
    """The folder with the C++ sources: beside this file in a wheel, in `src/native` of a checkout."""
    here = Path(__file__).resolve().parent
    installed = here / "sources"
    return installed if installed.is_dir() else here.parent / "native"


def left_out(island: str, reason: str | None = None) -> str:
    """Why an island isn't in use, where something has tried to load it; with a reason, remembers that."""
    if reason is not None:
        _reasons[island] = reason
    default = f"not asked for yet: nothing has used the kernels with {island} in this process"
    return _reasons.get(island, default)
