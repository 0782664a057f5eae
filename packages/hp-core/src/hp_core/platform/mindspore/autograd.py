"""MindSpore's gradients behind the protocol: one function with a forward and a backward given as callables.

`mindspore.value_and_grad` and `grad` record a graph of tensors while the function runs, as torch does: a tensor in it
has a node, a Parameter that requires a gradient is a leaf. So DTensors need nothing of their own here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mindspore import Tensor, ops
from mindspore.common import _no_grad
from mindspore.common._grad_function import _Function

try:
    from mindspore.graph.api import _pynative_executor
except ImportError:  # MindSpore 2.8
    from mindspore.common.api import _pynative_executor

from hp_core.platform.mindspore.arrays import array_dtype, as_array, as_tensor

__all__ = ["MindSporeAutograd", "seeded", "unrecorded", "with_zero_gradients"]

_recording: Callable[[], bool] = _pynative_executor._executor.requires_grad
_engine: Callable[[], int] = _pynative_executor._executor.get_current_autodiff_engine_id


class _WithGradient(_Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: Any, backward: Any) -> Tensor:
        ctx.backward_of = backward
        return as_tensor(forward(tensor))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, None, None]:
        return as_tensor(ctx.backward_of(gradient)), None, None


class _ZeroGradients(_Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, result: Tensor, *tensors: Tensor) -> Tensor:
        ctx.like = [(tensor.shape, array_dtype(tensor.dtype)) for tensor in tensors]
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient, *[as_tensor(np.zeros(shape, dtype)) for shape, dtype in ctx.like]


def with_zero_gradients(result: Tensor, *tensors: Tensor) -> Tensor:
    """The result, by which every one of these tensors has a gradient of zeros, too.

    For what depends on nothing, but must run its backward on every rank alike.
    """
    found: Tensor = _ZeroGradients.apply(result, *tensors)
    return found


def unrecorded(function: Callable[[], Any]) -> Any:
    """What the function gives, with gradients not recorded."""
    with _no_grad():
        return function()


class _Seeded(_Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, seeds: Any, *outputs: Tensor) -> Tensor:
        ctx.seeds = seeds
        return as_tensor(np.zeros((), np.float32))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, *[as_tensor(seed) for seed in ctx.seeds]


def seeded(outputs: Sequence[Tensor], seeds: Sequence[Any]) -> Tensor:
    """A scalar by which the gradients of these tensors are the given ones."""
    result: Tensor = _Seeded.apply(list(seeds), *outputs)
    return result


class MindSporeAutograd:
    """See `hp_core.platform.protocol.Autograd`.

    Args:
        on_host: whether redistribution works on arrays of the host, as on CPU; else on tensors.
    """

    def __init__(self, on_host: bool = True) -> None:
        self._on_host = on_host

    keeps_gradients = False

    def kept_gradient(self, parameter: Any) -> None:
        """None: gradients are returned by what differentiates."""

    def needs_gradient(self, tensor: Any) -> bool:
        """Whether gradients are recorded now and this tensor takes part."""
        return isinstance(tensor, Tensor) and tensor._requires_grad and _recording()

    def with_gradient(self, tensor: Any, forward: Callable[[Any], Any], backward: Callable[[Any], Any]) -> Any:
        """`forward(tensor)` with `backward` as its gradient."""
        if self._on_host:
            # what runs in the backward is then never recorded, and mixes with what a redistribution gives
            return _WithGradient.apply(tensor, forward, lambda gradient: backward(as_array(gradient)))
        return _WithGradient.apply(tensor, forward, backward)

    def requires_grad(self, tensor: Any) -> bool:
        """Whether the tensor takes part in gradients."""
        return isinstance(tensor, Tensor) and bool(tensor._requires_grad)

    def is_leaf(self, tensor: Any) -> bool:
        """Whether no op of the graph made it."""
        return bool(tensor._is_leaf)

    def version(self, tensor: Any) -> int:
        """Another number when the values may be others: written to, as far as MindSpore counts it, or in another place."""
        return (int(tensor.data_ptr()) << 16) + int(tensor._version) if isinstance(tensor, Tensor) else 0

    def pending_share(self, tensor: Any, keeps: bool) -> Any:
        """A copy, or as many zeros, whose gradient is the tensor's own."""

        def share(value: Any) -> Any:
            array = as_array(value)
            return array.copy() if keeps else np.zeros_like(array)

        return self.with_gradient(tensor, share, lambda gradient: gradient)

    def alias(self, tensor: Any) -> Any:
        """The same storage as another node of the graph."""
        if not self.needs_gradient(tensor):
            return tensor
        return _WithGradient.apply(tensor, lambda value: value, lambda gradient: gradient)

    def detach(self, tensor: Any) -> Any:
        """The same storage outside the graph."""
        return ops.stop_gradient(tensor) if self.requires_grad(tensor) else tensor

    def unrecorded(self, function: Callable[[], None]) -> None:
        """Call it with gradients not recorded."""
        unrecorded(function)

    def recomputes(self) -> bool:
        """Whether a forward runs inside a backward: nothing else asks there."""
        return _engine() != -1
