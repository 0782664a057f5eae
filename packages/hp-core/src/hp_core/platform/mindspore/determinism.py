"""MindSpore's own switch for deterministic results, which can be set once in a process."""

from __future__ import annotations

import os
from typing import Any

import mindspore as ms

from hp_core.errors import PlatformError

__all__ = ["MindSporeDeterministicSwitches"]

_SWITCH = "mindspore.get_context('deterministic')"
_COMPILER = "TE_PARALLEL_COMPILER"


class MindSporeDeterministicSwitches:
    """See `hp_core.platform.protocol.DeterministicSwitches`."""

    variables = frozenset({"HCCL_DETERMINISTIC", "LCCL_DETERMINISTIC"})
    can_restore = False

    def __init__(self, processes: Any) -> None:
        self._processes = processes

    def started(self) -> dict[str, str]:
        """What has started that reads variables."""
        if self._processes.is_initialized():
            return {"world": "the process world exists (init_process_group() was called)"}
        return {}

    def require_settable(self, level: int) -> None:
        """Refuse to set it to something else than it was set to before."""
        on = self._is_on
        if on == bool(level):
            return
        if not level:
            raise PlatformError(
                "deterministic(0): MindSpore's deterministic setting is on, and can be set once in a process; start another."
            )
        if _is_configured():
            raise PlatformError(
                f"deterministic({level}): mindspore.set_deterministic(False) was called before, and can be called once; "
                f"drop that call."
            )
        compiler = os.environ.get(_COMPILER, "1")
        if compiler != "1":
            raise PlatformError(
                f"deterministic({level}) needs {_COMPILER}=1, but the environment says {_COMPILER}={compiler}: `unset {_COMPILER}`."
            )

    def state(self) -> dict[str, str]:
        """The switch, by the name that users know it by."""
        return {_SWITCH: "ON" if self._is_on else "OFF"}

    def set(self, level: int) -> None:
        """Turn it on."""
        if level and not self._is_on:
            ms.set_deterministic(True)

    def restore(self, state: Any) -> None:
        """Only what hasn't changed can be restored."""

    @property
    def _is_on(self) -> bool:
        return bool(ms.get_context("deterministic") == "ON")


def _is_configured() -> bool:
    from mindspore.device_manager import DeviceManagerConf

    return bool(DeviceManagerConf.get_instance().is_deterministic_configured())
