"""Pickle a call for another interpreter, sending by value what that interpreter couldn't import.

Functions and classes of scripts, notebooks and test modules travel whole; those of packages by their name, so that they
meet the state that their package has on the rank.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import io
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, ModuleType
from typing import Any

import cloudpickle

__all__ = ["pack_call"]


def pack_call(fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> bytes:
    """Pickle `(fn, args, kwargs)`.

    Args:
        fn: the function; its own module is sent by value unless it belongs to a package.
        args: positional arguments.
        kwargs: keyword arguments.

    Returns:
        What `pickle.loads` turns back into the three, in a process with the same packages.

    Raises:
        TypeError: something can't be pickled.
    """
    modules = {module for module in map(_module, (fn, *args, *kwargs.values())) if module and not _importable(module)}
    buffer = io.BytesIO()
    try:
        with _by_value(modules):
            _Pickler(buffer).dump((fn, tuple(args), dict(kwargs)))
    except Exception as error:
        raise TypeError(
            f"{getattr(fn, '__qualname__', fn)} and its arguments can't be sent to the ranks: "
            f"{type(error).__name__}: {error}. "
            "Create what can't be pickled (groups, threads, open files) inside the function."
        ) from error
    return buffer.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, but code keeps the name of its file, so that tracebacks of ranks show source lines.

    A module of a class of its own (`torch.ops`, say, which a name in the function's code may refer to) goes by its name.
    """

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, CodeType):
            make, arguments = self.dispatch_table[CodeType](obj)[:2]
            return make, tuple(obj.co_filename if value == "<dynamic-code>" else value for value in arguments)
        return super().reducer_override(obj)


@contextmanager
def _by_value(modules: set[ModuleType]) -> Iterator[None]:
    # What the user has registered stays registered.
    ours = [module for module in modules if module.__name__ not in cloudpickle.list_registry_pickle_by_value()]
    for module in ours:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in ours:
            cloudpickle.unregister_pickle_by_value(module)


def _module(value: object) -> ModuleType | None:
    while isinstance(value, functools.partial):
        value = value.func
    name = getattr(value, "__module__", None) or type(value).__module__
    return sys.modules.get(name)


def _importable(module: ModuleType) -> bool:
    """True if a fresh interpreter gets this module by name: built in, installed, or part of a regular package.

    A script or a test module isn't: its name may mean nothing, or something else, in another process.
    """
    file = getattr(module, "__file__", None)
    if module.__name__ == "__main__":
        return False
    if file is None:
        return True
    paths = sysconfig.get_paths()
    if any(file.startswith(paths[kind] + os.sep) for kind in ("stdlib", "platstdlib", "purelib", "platlib")):
        return True
    spec = importlib.machinery.PathFinder.find_spec(module.__name__.partition(".")[0])
    return spec is not None and spec.origin is not None and spec.submodule_search_locations is not None
