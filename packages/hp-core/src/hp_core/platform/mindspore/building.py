"""Cells built without memory: while a context is open, a Parameter that a cell registers becomes one on the meta device.

How it would have been initialised is kept with the cell, so that `init_parameters` can fill it piece by piece. MindSpore has
no hook where Parameters are registered, so `nn.Cell.insert_param_to_cell` is replaced while any such context is open.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, mint, nn

from hp_core.errors import PlatformError

__all__ = ["building_on", "copy_attributes", "initialisers_of"]

_insert: Any = nn.Cell.insert_param_to_cell
_register: Any = nn.Cell.register_buffer
_lock = threading.Lock()
_open = 0
_here = threading.local()
"""The contexts that this thread is in, outermost first."""
_OWN = ("cpu", "CPU", "npu", "Ascend")


@dataclass
class _Context:
    """One context: whether it takes memory away, and from buffers, too; what it has moved, by the identity of the old."""

    meta: bool
    buffers: bool
    moved: dict[int, tuple[Any, Any]] = field(default_factory=dict)


@contextmanager
def building_on(device: str, include_buffers: bool) -> Iterator[None]:
    """Cells built inside have their Parameters on the meta device, or, with the process' own device, where they'd be anyway."""
    global _open
    if device not in ("meta", *_OWN):
        raise PlatformError(
            f"init_on_device({device!r}): on MindSpore cells are built on the device of mindspore.set_device(), or on 'meta', "
            f"where they have no memory."
        )
    stack: list[_Context] = _here.__dict__.setdefault("stack", [])
    context = _Context(device == "meta", include_buffers)
    with _lock:
        _open += 1
        if _open == 1:
            nn.Cell.insert_param_to_cell, nn.Cell.register_buffer = _insert_parameter, _register_buffer
            # MindSpore then leaves a Parameter that an initializer describes without memory until it is asked for
            Parameter.init_param = False
    stack.append(context)
    try:
        yield
    finally:
        stack.remove(context)
        with _lock:
            _open -= 1
            if not _open:
                nn.Cell.insert_param_to_cell, nn.Cell.register_buffer = _insert, _register
                Parameter.init_param = True


def initialisers_of(cell: Any) -> dict[str, Any]:
    """By name of a Parameter that was built without memory, the initializer that it was to get its values from."""
    return getattr(cell, "_delayed_initializers", {})


def copy_attributes(source: Any, target: Any) -> None:
    """Public attributes that user code hung on a tensor; MindSpore's own are there already."""
    for name, value in getattr(source, "__dict__", {}).items():
        if not name.startswith("_") and name not in _BOOKKEEPING and name not in target.__dict__:
            setattr(target, name, value)


# From an array, and by no op: an op would start MindSpore's runtime, after which no device can be set.
_BOOKKEEPING = frozenset(Parameter(Tensor(np.zeros(1, np.float32))).__dict__) | {"init_mode", "init"}


def _context() -> _Context | None:
    """The innermost context of this thread."""
    stack = _here.__dict__.get("stack", ())
    return stack[-1] if stack else None


def _insert_parameter(self: Any, param_name: str, param: Any, check_name_contain_dot: bool = True) -> None:
    context = _context()
    if isinstance(param, Parameter) and not param.is_meta:
        if context is not None and context.meta:
            if param.has_init:
                delayed = self.__dict__.setdefault("_delayed_initializers", {})
                delayed[param_name] = param.init_mode.init
            param = _without_memory(param, context)
        elif param.has_init:  # another thread's context, or an inner one, made MindSpore wait
            param = param.init_data()
    _insert(self, param_name, param, check_name_contain_dot)


def _register_buffer(self: Any, name: str, tensor: Any, persistent: bool = True) -> None:
    context = _context()
    if context is not None and context.meta and context.buffers and tensor is not None and not tensor.is_meta:
        tensor = _without_memory(tensor, context)
    _register(self, name, tensor, persistent)


def _without_memory(value: Any, context: _Context) -> Any:
    """The same on the meta device; what was registered before under another name stays one tensor."""
    known = context.moved.get(id(value))
    if known is not None and known[0] is value:
        return known[1]
    result: Any = mint.empty(tuple(value.shape), dtype=value.dtype, device="meta")
    if isinstance(value, Parameter):
        result = Parameter(result, name=value.name, requires_grad=value.requires_grad)
    copy_attributes(value, result)
    context.moved[id(value)] = (value, result)
    return result
