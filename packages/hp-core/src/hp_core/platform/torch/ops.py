"""How torch spells ops: from an intercepted function to its canonical name, and its arguments by canonical names.

Nearly all names are torch's own; the tables below hold only what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from hp_core.platform.torch.dtensor import handler_of
from hp_core.platform.torch.local_ops import LOCAL_OPS

__all__ = ["TorchOps"]

_ALIASES = {
    "absolute": "abs", "arccos": "acos", "arcsin": "asin", "arctan": "atan", "arctan2": "atan2", "clip": "clamp",
    "concat": "cat", "concatenate": "cat", "divide": "div", "true_divide": "div", "truediv": "div",
    "rtruediv": "rdiv", "fix": "trunc", "greater": "gt", "greater_equal": "ge", "less": "lt",
    "less_equal": "le", "moveaxis": "movedim", "multiply": "mul", "negative": "neg", "not_equal": "ne",
    "subtract": "sub", "swapaxes": "transpose", "swapdims": "transpose", "invert": "bitwise_not",
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "radd": "add", "rmul": "mul", "rpow": "pow",
    "rmod": "remainder", "rfloordiv": "floor_divide", "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift", "rlshift": "bitwise_left_shift", "rrshift": "bitwise_right_shift",
    "rand": "bitwise_and", "ror": "bitwise_or", "rxor": "bitwise_xor", "iand": "bitwise_and_", "ior": "bitwise_or_",
    "ixor": "bitwise_xor_", "iadd": "add_", "isub": "sub_", "imul": "mul_", "itruediv": "div_",
    "floordiv": "floor_divide", "mod": "remainder", "conj_physical": "conj", "expit": "sigmoid",
    "ger": "outer", "log_sigmoid": "logsigmoid", "_threshold": "threshold", "arccosh": "acosh", "arcsinh": "asinh",
    "arctanh": "atanh", "gammainc": "igamma", "gammaincc": "igammac", "gammaln": "lgamma", "multigammaln": "mvlgamma",
    "psi": "digamma", "idiv": "div_", "ifloordiv": "floor_divide_", "imod": "remainder_", "ilshift": "bitwise_left_shift_",
    "irshift": "bitwise_right_shift_", "ipow": "pow_", "normal_": "fill_normal_",
    "inverse": "inv", "pinverse": "pinv", "orgqr": "householder_product",
}  # fmt: skip
"""Other spellings of one op; dunder underscores are taken off first."""

_PARAMETER_ALIASES = {
    "axis": "dim", "self": "input", "x": "input", "split_size_or_sections": "split_size", "size": "shape",
    "mat2": "other", "mat": "other", "vec": "other", "exponent": "other", "mat1": "batch1", "vec1": "input", "tensor": "input",
    "theta": "input",
}  # fmt: skip
"""Keyword spellings of one parameter, tried when the rule doesn't know the given name."""

_CASTS = {
    "float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16, "int": torch.int32,
    "long": torch.int64, "short": torch.int16, "bool": torch.bool, "byte": torch.uint8, "char": torch.int8,
    "chalf": torch.complex32, "cfloat": torch.complex64, "cdouble": torch.complex128,
}  # fmt: skip

_LINALG_ALONE = frozenset({"linalg_norm", "linalg_cross", "linalg_diagonal"})
"""Functions of torch.linalg that are other ops than their namesakes in torch: they take other dims by default."""

_MOST_OUTPUTS = 4096
"""So many calls are kept whose results' shapes are known."""

_PROPERTIES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
"""Attributes that are ops."""


class TorchOps:
    """See `hp_core.platform.protocol.Ops`."""

    named_dtypes = _CASTS

    def __init__(self) -> None:
        self._known_outputs: dict[Hashable, list[tuple[tuple[int, ...], torch.dtype]] | None] = {}

    def canonical(self, function: Any) -> tuple[str, bool] | None:
        """Canonical name of an intercepted function and whether it writes in place; None for what is no op."""
        name = getattr(function, "__name__", None)
        if name == "__get__":
            name = function.__self__.__name__
            return (name, False) if name in _PROPERTIES else None
        if name is None:
            return None
        if name.startswith("__") and name.endswith("__"):
            name = name[2:-2]
        elif name not in _LINALG_ALONE:
            name = name.removeprefix("linalg_").removeprefix("special_")
        name = _ALIASES.get(name, name)
        inplace = name.endswith("_") and not name.startswith("__")
        if inplace:
            name = _ALIASES.get(name[:-1], name[:-1])
        return name, inplace or name == "setitem" or name.startswith("_fused_")

    def identity(self, op: Any) -> Any:
        """What stands for an op in the table of users' rules: one thing for an op object and all its overloads."""
        op = getattr(op, "_opoverload", op)  # what torch.library.custom_op returns
        return getattr(op, "overloadpacket", op)

    def handler(self, function: Any) -> Callable[..., Any] | None:
        """What answers a function that is no op on values: metadata, autograd, Python's own protocols."""
        return handler_of(function)

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any], parameters: Sequence[str]) -> dict[str, Any]:
        """The call's arguments by canonical names; a parameter "*name" takes all remaining positional ones."""
        bound: dict[str, Any] = {}
        names = [name.lstrip("*") for name in parameters]
        for position, name in enumerate(parameters):
            if name.startswith("*"):
                if position < len(args):
                    bound[names[position]] = tuple(args[position:])
                break
            if position < len(args):
                bound[name] = args[position]
        for name, value in kwargs.items():
            if name not in names:
                alias = _PARAMETER_ALIASES.get(name, name)
                if alias not in names and alias in ("input", "other"):
                    alias = name
                name = alias
            starred = f"*{name}" in parameters
            bound[name] = tuple(value) if starred and isinstance(value, (tuple, list)) else value
        if "dtype" in parameters and not isinstance(bound.get("dtype"), (torch.dtype, type(None))):
            self._read_to(bound, args)
        return bound

    def dense_outputs(
        self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> list[tuple[tuple[int, ...], torch.dtype]] | None:
        """Run the call on meta tensors of the global shapes; None if its result depends on values.

        Layouts play no part in it, so what was found is kept for the next layout of the same operands.
        """
        try:
            key = (function, _described(args), _described(kwargs), torch.get_default_dtype())
            if key in self._known_outputs:
                return self._known_outputs[key]
        except TypeError:  # an argument that can't be hashed
            return self._run_on_meta(function, args, kwargs)
        found = self._run_on_meta(function, args, kwargs)
        if len(self._known_outputs) >= _MOST_OUTPUTS:
            self._known_outputs.clear()
        self._known_outputs[key] = found
        return found

    def _run_on_meta(
        self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> list[tuple[tuple[int, ...], torch.dtype]] | None:
        try:
            with torch.no_grad():
                result = function(*_on_meta(tuple(args)), **_on_meta(kwargs))
        except NotImplementedError:
            return None
        except RuntimeError as error:
            # a value was asked for, or a user's op says nothing of its shapes
            if "meta tensor" in str(error).lower() or "no fake impl" in str(error):
                return None
            raise
        results = [result] if isinstance(result, torch.Tensor) else result
        if not isinstance(results, (list, tuple)) or not all(isinstance(one, torch.Tensor) for one in results):
            return None
        return [(tuple(one.shape), one.dtype) for one in results]

    def local(self, name: str) -> Callable[..., Any]:
        """The local implementation of this name."""
        return LOCAL_OPS[name]

    def _read_to(self, bound: dict[str, Any], args: Sequence[Any]) -> None:
        """`to(other)`, `to(device)`, `to(device, dtype)`: find the element type among what was given."""
        given = [bound.pop("dtype"), *args[2:]]
        for value in given:
            if isinstance(value, torch.Tensor):
                bound["dtype"] = value.dtype
            elif isinstance(value, torch.dtype):
                bound["dtype"] = value


def _described(value: Any) -> Hashable:
    """All that the result on meta tensors depends on; numbers with their types, since 2 and 2.0 are equal."""
    kind = type(value)
    if kind is list or kind is tuple:
        return (kind, *map(_described, value))
    if kind is dict:
        return (kind, *((name, _described(item)) for name, item in value.items()))
    if isinstance(value, torch.Tensor):
        return (torch.Tensor, value.shape, value.dtype)
    return (kind, value)


def _on_meta(value: Any) -> Any:
    """The same arguments, with meta tensors of the global shape in place of DTensors."""
    kind = type(value)
    if kind is list or kind is tuple:
        return kind(_on_meta(item) for item in value)
    if kind is dict:
        return {name: _on_meta(item) for name, item in value.items()}
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return value
