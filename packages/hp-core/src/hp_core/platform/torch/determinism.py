"""torch's own switches for deterministic results."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.utils.deterministic

from hp_core.errors import PlatformError

__all__ = ["TorchDeterministicSwitches"]

_MODES = {0: "default", 1: "warn", 2: "error"}
_OPS = "torch.get_deterministic_debug_mode()"
_FILL = "torch.utils.deterministic.fill_uninitialized_memory"
_CUDNN = "torch.backends.cudnn.deterministic"
_BENCHMARK = "torch.backends.cudnn.benchmark"


class TorchDeterministicSwitches:
    """See `hp_core.platform.protocol.DeterministicSwitches`."""

    variables = frozenset({"HCCL_DETERMINISTIC", "LCCL_DETERMINISTIC", "CUBLAS_WORKSPACE_CONFIG"})
    can_restore = True

    def started(self) -> dict[str, str]:
        """What has started that reads variables."""
        found = {}
        if dist.is_initialized():
            found["world"] = "the process world exists (init_process_group() was called)"
        if torch.cuda.is_initialized():
            found["device"] = "CUDA has been initialised"
        return found

    def require_settable(self, level: int) -> None:
        """Refuse on an NPU where ops have run: torch_npu takes the setting of a thread's first op, and keeps it."""
        npu = getattr(torch, "npu", None)
        now = torch.are_deterministic_algorithms_enabled()
        if npu is not None and npu.is_initialized() and now != bool(level):
            raise PlatformError(
                f"deterministic({level}) comes too late: the NPU has been initialised, and torch_npu keeps what was set when its "
                f"first op ran. Call deterministic() first of all."
            )

    def state(self) -> dict[str, str]:
        """The switches, by the names that users know them by."""
        return {
            _OPS: _MODES[torch.get_deterministic_debug_mode()],
            _FILL: str(torch.utils.deterministic.fill_uninitialized_memory),  # type: ignore[attr-defined]
            _CUDNN: str(torch.backends.cudnn.deterministic),
            _BENCHMARK: str(torch.backends.cudnn.benchmark),
        }

    def set(self, level: int) -> None:
        """Turn the switches as a level needs them."""
        # Filling fresh memory finds reads of it, and makes every buffer cost a pass: only where errors are looked for.
        self._turn(_MODES[min(level, 2)], level != 1, level > 0, False if level else torch.backends.cudnn.benchmark)

    def restore(self, state: Any) -> None:
        """Turn them back."""
        self._turn(state[_OPS], *(state[name] == "True" for name in (_FILL, _CUDNN, _BENCHMARK)))

    def _turn(self, ops: str, fill: bool, cudnn: bool, benchmark: bool) -> None:
        torch.set_deterministic_debug_mode(ops)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.backends.cudnn.deterministic = cudnn
        torch.backends.cudnn.benchmark = benchmark
