"""MindSpore behind the platform protocol; beside `platform/torch` the only place of hp-core that imports a framework."""

from mindspore.common import np_dtype as _np_dtype

from hp_core.errors import PlatformError
from hp_core.platform.remedies import explain_wrong_numpy

if not hasattr(_np_dtype, "bfloat16"):
    # MindSpore's own extension for NumPy, which is compiled for NumPy 1 and left out under NumPy 2
    raise PlatformError(explain_wrong_numpy())

from hp_core.platform.mindspore.platform import MindSporePlatform, create_platform

__all__ = ["MindSporePlatform", "create_platform"]
