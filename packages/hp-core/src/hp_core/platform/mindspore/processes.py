"""The world of processes for MindSpore on CPU: torch's gloo world, joined as on the torch platform.

The launcher's variables are torchrun's (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) or msrun's, which are translated.
"""

from __future__ import annotations

import importlib.util
import os
from datetime import timedelta
from typing import Any

from hp_core.errors import ProcessGroupError
from hp_core.platform.protocol import Group

__all__ = ["HostProcesses", "adopt_msrun_environment", "require_gloo"]

_MSRUN = {
    "RANK": "RANK_ID",
    "WORLD_SIZE": "MS_WORKER_NUM",
    "MASTER_ADDR": "MS_SCHED_HOST",
}
"""What msrun calls the launcher's variables; its scheduler holds MS_SCHED_PORT itself, so we meet at the next port."""


class HostProcesses:
    """The world of this process; see `hp_core.platform.protocol.Processes`."""

    device_type = "cpu"

    def __init__(self) -> None:
        self._world: Any = None

    def init_world(
        self,
        backend: str | None,
        *,
        init_method: str | None,
        world_size: int | None,
        rank: int | None,
        timeout: timedelta | None,
    ) -> None:
        """Check everything that can be checked alone, then join the world."""
        if backend not in (None, "gloo"):
            raise ProcessGroupError(
                f"backend {backend!r} can't work here: MindSpore runs on CPU, where tensors travel over gloo; use "
                f"backend='gloo' or None. On an Ascend machine call mindspore.set_device('Ascend') first."
            )
        require_gloo()
        if os.environ.get("MS_ROLE") == "MS_SCHED":
            # msrun runs the script once more for a scheduler of its own, which isn't needed here and is no rank.
            raise SystemExit(0)
        adopt_msrun_environment()
        self._gloo().init_world(backend, init_method=init_method, world_size=world_size, rank=rank, timeout=timeout)

    def destroy_world(self) -> None:
        """Leave the world."""
        if self._world is not None:
            self._world.destroy_world()

    def is_initialized(self) -> bool:
        """Whether the world exists."""
        return self._world is not None and self._world.is_initialized()

    def rank(self) -> int:
        """Global rank; what the launcher says before the world exists, else 0."""
        return self._gloo().rank() if self._world is not None else int(_launcher("RANK") or 0)

    def world_size(self) -> int:
        """Number of processes; what the launcher says before the world exists, else 1."""
        return self._gloo().world_size() if self._world is not None else int(_launcher("WORLD_SIZE") or 1)

    def backend(self, group: Group | None) -> str:
        """Name of the communication backend."""
        return str(self._gloo().backend(group))

    def new_group(self, ranks: tuple[int, ...], own: bool = False) -> Group:
        """A group of these ranks."""
        require_gloo()
        group: Group = self._gloo().new_group(ranks, own)
        return group

    def _gloo(self) -> Any:
        if self._world is None:
            from hp_core.platform.torch.processes import TorchProcesses

            self._world = TorchProcesses("cpu")
        return self._world


def require_gloo() -> None:
    """Refuse to communicate where torch isn't installed.

    Raises:
        ProcessGroupError: with the remedy.
    """
    if importlib.util.find_spec("torch") is None:
        raise ProcessGroupError(
            "MindSpore's own CPU collectives have no reduce-scatter, no all-to-all and no point-to-point, so on CPU tensors travel "
            "over PyTorch's gloo, and torch is not installed: pip install 'torch==2.13.0' --index-url "
            "https://download.pytorch.org/whl/cpu. A single process, or Ascend, needs none of it."
        )


def adopt_msrun_environment() -> None:
    """Set what the world needs from msrun's variables, unless torchrun's are set."""
    for ours in _MSRUN:
        said = _launcher(ours)
        if said is not None:
            os.environ.setdefault(ours, said)
    port = os.environ.get("MS_SCHED_PORT")
    if port is not None:
        os.environ.setdefault("MASTER_PORT", str(int(port) + 1))


def _launcher(name: str) -> str | None:
    return os.environ.get(name) or os.environ.get(_MSRUN[name])
