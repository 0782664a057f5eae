"""The torch subclass behind `DTensor`: a wrapper of global size around a local tensor.

It is made by `define_dtensor`, which is *given* the dispatcher, so that nothing here imports upward. Ops are intercepted
at function level (`__torch_function__`) and run on local tensors; torch's autograd records those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from hp_core.errors import ShardingRuleError
from hp_core.platform.torch.backward import autograd_backward, autograd_grad
from hp_core.platform.torch.bodies import BODIES
from hp_core.platform.torch.face import TorchFace
from hp_core.platform.torch.initializers import INITIALIZERS

__all__ = ["define_dtensor", "handler_of"]


def define_dtensor(dispatch: Callable[..., Any], methods: type) -> type:
    """The class `DTensor`: `methods` (framework-neutral) over torch's metadata and autograd, over `torch.Tensor`.

    Args:
        dispatch: called as `dispatch(function, args, kwargs)` for every intercepted function.
        methods: mixin with layout, redistribution and conversion.
    """
    base: Any = torch.Tensor

    class DTensor(methods, TorchFace, base):  # type: ignore[misc]
        __doc__ = methods.__doc__

        @classmethod
        def __torch_function__(
            cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            return dispatch(function, args, kwargs)

        @classmethod
        def __torch_dispatch__(
            cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> NoReturn:
            raise ShardingRuleError(
                f"{function} reached a DTensor below the level at which DTensors are intercepted (a C++ path that skips "
                f"__torch_function__). Call it on .to_local(), or on .full_tensor()."
            )

    DTensor.__module__ = "hp_core.dtensor.api"
    DTensor.__qualname__ = "DTensor"
    return DTensor


def handler_of(function: Any) -> Callable[..., Any] | None:
    """What answers an intercepted function that is no op on values; None if it is one.

    A method that the class has itself answers its unbound form and its torch.* twin as well; other attributes are the
    local tensor's.
    """
    known = _HANDLERS.get(function)
    if known is not None:
        return known
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        attribute = function.__self__.__name__
        if attribute in TorchFace.__dict__:
            return getattr(TorchFace.__dict__[attribute], name)  # type: ignore[no-any-return]
        if name == "__get__" and attribute not in ("T", "mT", "H", "mH", "real", "imag"):
            return lambda tensor, *_: getattr(tensor._local, attribute)
        return None
    return TorchFace.__dict__.get(name) if name != "detach" and callable(TorchFace.__dict__.get(name)) else None


_HANDLERS: dict[Any, Callable[..., Any]] = {
    **BODIES,
    **INITIALIZERS,
    torch.autograd.backward: autograd_backward,
    torch.autograd.grad: autograd_grad,
    torch.Tensor.detach: TorchFace.detach,
    torch.detach: TorchFace.detach,
    torch.is_inference: lambda tensor: tensor._local.is_inference(),
    # modules ask it when they are moved or converted
    torch._has_compatible_shallow_copy_type: lambda *tensors: torch._has_compatible_shallow_copy_type(
        *[getattr(tensor, "_local", tensor) for tensor in tensors]
    ),
    torch.is_nonzero: lambda tensor: bool(tensor.item()),
    torch.is_same_size: lambda left, right: tuple(left.shape) == tuple(right.shape),
    torch.result_type: lambda *operands: torch.result_type(*[getattr(value, "_local", value) for value in operands]),
    torch.Tensor.is_inference: lambda tensor: tensor._local.is_inference(),
    torch.Tensor.storage_offset: lambda tensor: tensor._local.storage_offset(),
    torch.Tensor.is_signed: lambda tensor: tensor._local.is_signed(),
    torch.is_signed: lambda tensor: tensor._local.is_signed(),
    torch.Tensor.is_set_to: lambda left, right: left._local.is_set_to(right._local),
    torch.Tensor.is_shared: lambda tensor: tensor._local.is_shared(),
    torch.Tensor.is_pinned: lambda tensor, *args: tensor._local.is_pinned(*args),
}
