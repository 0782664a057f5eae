"""MindSpore behind the platform protocol; beside `platform/torch` the only place of hp-core that imports a framework."""

from hp_core.errors import PlatformError
from hp_core.platform.mindspore.imports import explain_failed_import

try:
    import mindspore as _mindspore  # noqa: F401
except Exception as error:
    raise PlatformError(explain_failed_import(error)) from error

from hp_core.platform.mindspore.platform import MindSporePlatform, create_platform

__all__ = ["MindSporePlatform", "create_platform"]
