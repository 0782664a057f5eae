"""The narrow waist: everything that differs between frameworks and devices is behind `get_platform()`.

The protocol is `protocol.Platform`; `torch/` implements it for PyTorch. Above this package nothing imports a framework.
"""

from hp_core.platform.protocol import Group, Platform, Work
from hp_core.platform.select import get_platform

__all__ = ["Group", "Platform", "Work", "get_platform"]
