"""MindSpore's ops behind the protocol: canonical names, arguments, and the implementations that rules ask for by name."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import mindspore as ms
from mindspore import Tensor, mint

from hp_core.errors import PlatformError
from hp_core.platform.mindspore.calls import bind, readable_dtype
from hp_core.platform.mindspore.local_ops import LOCAL_OPS
from hp_core.platform.mindspore.op import MindSporeOp

__all__ = ["MindSporeOps"]


class MindSporeOps:
    """See `hp_core.platform.protocol.Ops`."""

    named_dtypes: dict[str, Any] = {  # noqa: RUF012
        "float": ms.float32, "double": ms.float64, "half": ms.float16, "bfloat16": ms.bfloat16, "int": ms.int32,
        "long": ms.int64, "short": ms.int16, "bool": ms.bool_, "byte": ms.uint8, "char": ms.int8,
    }  # fmt: skip

    def canonical(self, function: Any) -> tuple[str, bool] | None:
        """Canonical name of an intercepted function and whether it writes in place; None for what has no name here."""
        if not isinstance(function, MindSporeOp) or function.canonical is None:
            return None
        return function.canonical, function.inplace

    def identity(self, op: Any) -> Any:
        """What stands for an op in the table of users' rules: MindSpore's name of it."""
        return op.name if isinstance(op, MindSporeOp) else getattr(op, "__name__", op)

    def handler(self, function: Any) -> Callable[..., Any] | None:
        """What answers a function that is no op on values."""
        return _HANDLERS.get(getattr(function, "name", ""))

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any], parameters: Sequence[str]) -> dict[str, Any]:
        """The call's arguments by canonical names."""
        return bind(args, kwargs, parameters)

    def dense_outputs(
        self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> list[tuple[tuple[int, ...], Any]] | None:
        """Nothing: MindSpore tells shapes only by computing."""
        return None

    def local(self, name: str) -> Callable[..., Any]:
        """The local implementation of this name."""
        try:
            return LOCAL_OPS[name]
        except KeyError:
            raise PlatformError(
                f"this call needs the local op {name!r}, which the MindSpore platform doesn't have yet; redistribute its operands "
                f"so that the dim which it works on is whole."
            ) from None


def _detached(tensor: Any) -> Any:
    return tensor.detach()


def _argument(name: str) -> Callable[..., Any]:
    """Argmax and Argmin(input, axis, output_type): indices, of a type that is given by its number."""
    function = getattr(ms.ops, name)
    op = MindSporeOp(name, name, lambda input, dim: function(input, dim).astype(ms.int64))

    def call(input: Any, dim: int = -1, output_type: Any = ms.int64) -> Any:
        return input._dispatch(op, (input, dim), {}).astype(readable_dtype(output_type))

    return call


def _selection(name: str) -> Callable[..., Any]:
    """ArgMaxWithValue and ArgMinWithValue(input, axis, keep_dims) give the indices first."""

    def call(input: Any, dim: int = 0, keepdim: bool = False) -> Any:
        values, indices = getattr(mint, name)(input, dim, keepdim)
        return indices, values

    return call


def _sum_of_all(tensors: Sequence[Any]) -> Any:
    return reduce(operator.add, tensors)


_HANDLERS: dict[str, Callable[..., Any]] = {
    "AddN": _sum_of_all,
    "ArgMaxWithValue": _selection("max"),
    "ArgMinWithValue": _selection("min"),
    "Argmax": _argument("argmax"),
    "Argmin": _argument("argmin"),
    "StopGradient": _detached,
    "Shape": lambda tensor: tensor.shape,
    "typeof": lambda tensor: ms.ops.typeof(tensor._local) if isinstance(tensor, Tensor) else ms.ops.typeof(tensor),
}
