"""The DTensors among a call's arguments, wherever they stand: found, replaced, and no plain tensor among them.

For the paths that aren't hot: calls of a new kind, and calls that skip dispatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hp_core.dtensor.api import dtensor_type
from hp_core.errors import LayoutError
from hp_core.platform import get_platform
from hp_core.platform.foreign import is_foreign

__all__ = ["collect_dtensors", "refuse_plain_tensors", "replace_dtensors"]


def collect_dtensors(value: Any, into: list[Any]) -> None:
    """Append all DTensors of a value, in order of appearance, also those within lists, tuples and dicts."""
    kind = type(value)
    if kind is dtensor_type():
        into.append(value)
    elif kind is list or kind is tuple:
        for item in value:
            collect_dtensors(item, into)
    elif kind is dict:
        for item in value.values():
            collect_dtensors(item, into)


def replace_dtensors(value: Any, locals_: Iterator[Any]) -> Any:
    """The same value with the next of `locals_` in place of each DTensor."""
    kind = type(value)
    if kind is dtensor_type():
        return next(locals_)
    if kind is list or kind is tuple:
        return kind(replace_dtensors(item, locals_) for item in value)
    if kind is dict:
        return {name: replace_dtensors(item, locals_) for name, item in value.items()}
    return value


def refuse_plain_tensors(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A plain tensor among DTensors has no layout. A number in tensor's clothing (0-d, no gradient) may pass, and so may an
    empty one-dimensional tensor, with which caches start to be concatenated: it has nothing to lay out. Another framework's
    tensor is refused whatever it holds.
    """
    platform = get_platform()
    is_tensor, requires_grad = platform.tensors.is_tensor, platform.autograd.requires_grad

    def check(value: Any) -> None:
        if type(value) in (list, tuple):
            for item in value:
                check(item)
        elif is_foreign(value, platform.name):
            platform.tensors.shape(value)  # refuses it
        elif (
            is_tensor(value)
            and type(value) is not dtensor_type()
            and ((value.ndim and tuple(value.shape) != (0,)) or requires_grad(value))
        ):
            raise LayoutError(
                f"{name} got a plain tensor of shape {tuple(value.shape)} among DTensors. Say how it lies: "
                f"distribute_tensor(t, mesh, placements) if it is the global value, DTensor.from_local(t, mesh, placements) if "
                f"it is this rank's part, or distribute_module(module, mesh) for parameters and buffers of a module."
            )

    for value in (*args, *kwargs.values()):
        check(value)
