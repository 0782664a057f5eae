"""What of a module goes to a checkpoint: every tensor once, however many names it has."""

from __future__ import annotations

from typing import Any

from hp_core.platform import get_platform

__all__ = ["unique_state_dict"]


def unique_state_dict(module: Any) -> dict[str, Any]:
    """The module's state with each tensor under its first name only, on the module's own memory.

    Pass it to `torch.distributed.checkpoint.save`, and that of another model to `load`: a tied parameter is stored once,
    is loaded in place, and so is loaded for all of its names.
    """
    platform = get_platform()
    seen: set[int] = set()
    result: dict[str, Any] = {}
    for name, value in platform.modules.state(module):
        if platform.tensors.is_tensor(value):
            if id(value) in seen:
                continue
            seen.add(id(value))
            value = value.detach()
        result[name] = value
    return result
