"""What this installation of the kernels can do: what was built, how, and what was left out and why."""

from __future__ import annotations

from typing import Any

from hp_kernels.cann import why_not_cann
from hp_kernels.islands import ISLANDS, left_out
from hp_kernels.loading import native, why_not_native

__all__ = ["build_info"]


def build_info() -> dict[str, Any]:
    """What was built, with which compiler and flags, and what was left out and why.

    Returns:
        "native": whether `_native` is in use; "compiler", "flags", "standard", "pybind11" and "processor" (the instruction
        set that its loops take on this machine) where it is; "threads"; and "left_out": name of a part -> why it isn't in use:
        "native", the islands "torch" and "mindspore", and "cann".
    """
    module = native()
    reasons = {"native": why_not_native(), **{island: left_out(island) for island in ISLANDS}, "cann": why_not_cann()}
    missing = {part: reason for part, reason in reasons.items() if reason}
    if module is None:
        return {"native": False, "left_out": missing}
    return {"native": True, **module.build, "threads": module.thread_count(), "left_out": missing}
