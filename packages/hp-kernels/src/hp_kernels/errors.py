"""The error of a kernel that was asked for something it can't do.

`_native` raises this class too. It is no part of hp_core's hierarchy because this package imports nothing of ours.
"""

from __future__ import annotations

__all__ = ["KernelArgumentError"]


class KernelArgumentError(ValueError):
    """An argument of a kernel is wrong: its dtype, device, shape, memory, or a size that overflows."""
