"""Public names that are imported when they are first used.

A package lists its public names and the module of each; `lazy_exports` makes the module-level `__getattr__`, `__dir__`
and `__all__` from that list. So importing a package costs next to nothing, and loads no framework.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module

__all__ = ["lazy_exports"]


def lazy_exports(
    package: str, distribution: str, exports: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Make `__getattr__`, `__dir__` and `__all__` of a package.

    Args:
        package: the package's own `__name__`.
        distribution: what pip calls it; `__version__` is that distribution's installed version.
        exports: public name -> module that defines it, relative to the package (`"dtensor.api"`).

    Returns:
        The three, in this order, to be assigned in the package's `__init__`.
    """

    def getattr_(name: str) -> object:
        if name == "__version__":
            # importlib.metadata takes longer to import than the whole package, so only who asks for the version pays.
            from importlib.metadata import version

            value: object = version(distribution)
        elif name in exports:
            value = getattr(import_module(f"{package}.{exports[name]}"), name)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # The next access is an ordinary attribute of the module.
        setattr(sys.modules[package], name, value)
        return value

    def dir_() -> list[str]:
        return sorted({*vars(sys.modules[package]), *exports, "__version__"})

    return getattr_, dir_, sorted(exports)
