"""The one place that loads `_native`, and knows why it isn't there.

`HP_KERNELS=off` leaves the portable twins to do the work, `on` insists on the native kernels, `auto` (the default) takes
them where they were built. Asked once per process; `reload` asks again.
"""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType

__all__ = ["native", "reload", "require_native", "why_not_native"]

_SWITCH = "HP_KERNELS"
_loaded: list[tuple[ModuleType | None, str]] = []


def native() -> ModuleType | None:
    """The extension module, or None where the twins are to be used.

    Raises:
        ImportError: `HP_KERNELS=on`, and there is no extension module that loads; or the variable has another value.
    """
    return _state()[0]


def require_native() -> ModuleType:
    """The extension module.

    Raises:
        ImportError: it isn't there, or `HP_KERNELS=off`; with the reason.
    """
    module, why_not = _state()
    if module is None:
        raise ImportError(f"this needs the native kernels, which are not in use: {why_not}.")
    return module


def why_not_native() -> str:
    """Why `native` gives None, in one sentence; empty where it gives the module."""
    return _state()[1]


def reload() -> None:
    """Forget the answer, so that a changed environment counts."""
    _loaded.clear()


def _state() -> tuple[ModuleType | None, str]:
    if not _loaded:
        _loaded.append(_load())
    return _loaded[0]


def _load() -> tuple[ModuleType | None, str]:
    switch = os.environ.get(_SWITCH, "auto")
    if switch not in ("auto", "on", "off"):
        raise ImportError(f"{_SWITCH} must be auto, on or off, not {switch!r}.")
    if switch == "off":
        return None, f"{_SWITCH}=off"
    try:
        return import_module("hp_kernels._native"), ""
    except ImportError as error:
        if switch == "on":
            raise ImportError(
                f"{_SWITCH}=on, but hp_kernels._native doesn't load: {error}. Build it with pip install packages/hp-kernels, "
                f"or unset {_SWITCH} to use the portable twins."
            ) from error
        return None, f"hp_kernels._native doesn't load: {error}"
