"""Which framework a tensor is of, and what `platform/` has for it; no framework is imported to find out.

The faces of the kernels ask here, so that one function serves the tensors of every framework.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from hp_kernels.errors import KernelArgumentError

__all__ = ["platform_module"]

_FRAMEWORKS = ("torch", "mindspore")


def platform_module(tensor: object, name: str, kernel: str) -> ModuleType:
    """The module `platform/FRAMEWORK/name.py` for a tensor.

    Args:
        tensor: whose class, or a base of it, a framework defines.
        name: of the module.
        kernel: what the caller is called, for messages.

    Raises:
        KernelArgumentError: no framework defines its class, or none that has this kernel.
    """
    for base in type(tensor).__mro__:
        framework = base.__module__.partition(".")[0]
        if framework in _FRAMEWORKS:
            try:
                return import_module(f"hp_kernels.platform.{framework}.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"hp_kernels.platform.{framework}.{name}":
                    raise
                raise KernelArgumentError(f"{kernel}: not available for tensors of {framework}.") from None
    raise KernelArgumentError(f"{kernel}: takes tensors of {' or '.join(_FRAMEWORKS)}, not {type(tensor).__name__}.")
