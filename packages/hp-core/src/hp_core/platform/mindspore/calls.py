"""From an intercepted call of MindSpore's to a canonical one, and back to run it on local tensors.

`__fallback__` gets a new function object for every call, and arguments as the primitive takes them. Here that becomes
one `MindSporeOp` per primitive and kind of call, which can be a key of caches, with arguments by canonical names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
from mindspore import Tensor
from mindspore._c_expression import typing as _types
from mindspore.ops import Primitive

from hp_core.errors import ShardingRuleError
from hp_core.platform.mindspore.arrays import as_tensor
from hp_core.platform.mindspore.empty_pieces import ON_EMPTY
from hp_core.platform.mindspore.op_names import KEYWORDS, NAMES, Spelling

__all__ = ["MindSporeOp", "PairOp", "bind", "interpret", "never_local"]

Call = tuple["MindSporeOp", tuple[Any, ...], dict[str, Any]]


class MindSporeOp:
    """One kind of call: what it is called here, and how it runs on local tensors. Equal kinds are one object.

    Attributes:
        name: MindSpore's name of the primitive.
        canonical: the canonical name, or None if there is none.
        inplace: whether it writes to its first argument.
        local: the call on plain tensors, by canonical arguments.
    """

    __slots__ = ("canonical", "inplace", "local", "name")

    def __init__(self, name: str, canonical: str | None, local: Callable[..., Any], inplace: bool = False) -> None:
        self.name, self.canonical, self.local, self.inplace = name, canonical, local, inplace

    @property
    def __name__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"MindSporeOp({self.name} as {self.canonical})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the op on plain tensors, or on what a redistribution made of them."""
        for value in args:
            kind = type(value)
            if kind is np.ndarray or kind is list or kind is tuple:  # what a redistribution has moved
                args = tuple([_as_tensors(one) for one in args])
                break
        for name, value in kwargs.items():
            if type(value) is np.ndarray:
                kwargs[name] = as_tensor(value)
        on_empty = ON_EMPTY.get(self.canonical) if self.canonical is not None else None
        if on_empty is not None and any(isinstance(value, Tensor) and 0 in value.shape for value in args):
            return on_empty(*args, **kwargs)
        return self.local(*args, **kwargs)


class PairOp(MindSporeOp):
    """An op that gives a second result, which nobody should use, beside its own."""

    extra = 1


class TripleOp(PairOp):
    """An op that gives two results beside its own."""

    extra = 2


def _as_tensors(value: Any) -> Any:
    kind = type(value)
    return kind([as_tensor(item) for item in value]) if kind is list or kind is tuple else as_tensor(value)


_ops: dict[Any, tuple[MindSporeOp, Callable[..., Any] | None]] = {}
"""By kind of call: the op, and what makes canonical arguments of MindSpore's (None: they are canonical)."""


def interpret(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Call:
    """The canonical op and arguments of an intercepted call."""
    if len(args) == 3 and type(args[2]) is tuple and isinstance(args[0], Primitive):
        primitive, name, args = args
        key: Any = (name, str(primitive), len(args))
        known = _ops.get(key)
        if known is None:
            known = _ops[key] = _kind(name, len(args), (), lambda *values: function(primitive, name, values))
    else:
        name = function.name
        key = (type(function), name, len(args), tuple(kwargs)) if kwargs else (type(function), name, len(args))
        known = _ops.get(key)
        if known is None:
            known = _ops[key] = _kind(name, len(args), tuple(kwargs or ()), function)
    op, canonical_arguments = known
    if canonical_arguments is None:
        return op, args, kwargs or {}
    result = canonical_arguments(args, kwargs or {})
    return result if len(result) == 3 else (op, *result)


def _kind(
    name: str, positional: int, keywords: tuple[str, ...], native: Callable[..., Any]
) -> tuple[MindSporeOp, Callable[..., Any] | None]:
    if name in _SPECIAL:
        return MindSporeOp(name, name, native), _SPECIAL[name](native)
    spelling = NAMES.get(name)
    if spelling is None and name.startswith("Inplace"):
        raise ShardingRuleError(
            f"{name}: on MindSpore DTensors are written to only by copy_(); its CPU back end has no in-place arithmetic (it leaves "
            f"the tensor as it is). Write x = x + y instead of x += y."
        )
    if spelling is None:
        return MindSporeOp(name, None, native), None
    if not keywords and positional <= len(spelling.leading):
        if spelling.canonical in _REFLECTED:
            return MindSporeOp(name, spelling.canonical, native), _reflecting(native, *_REFLECTED[spelling.canonical])
        return MindSporeOp(name, spelling.canonical, native, spelling.inplace), None
    return _renaming(name, spelling, positional, keywords, native)


def _renaming(
    name: str, spelling: Spelling, positional: int, keywords: tuple[str, ...], native: Callable[..., Any]
) -> tuple[MindSporeOp, Callable[..., Any]]:
    """Arguments beyond the leading ones go on by canonical keyword, and come back as MindSpore gave them."""
    leading = len(spelling.leading)
    names = (*spelling.leading, *spelling.others)
    by_position: list[str] = []
    for given in names[:positional]:
        by_position.append(given)
        if given.endswith("..."):
            break
    by_position = by_position[leading:]
    canonical_of = {keyword: KEYWORDS.get(keyword, keyword) for keyword in keywords}

    def canonical_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        named: dict[str, Any] = {}
        for place, given in enumerate(by_position, leading):
            value = args[place]
            if given.endswith("..."):
                rest = args[place:]
                value = tuple(value) if len(rest) == 1 and isinstance(value, (tuple, list)) else rest
                given = given[:-3]
            named[given] = _readable(given, value)
        for keyword, value in kwargs.items():
            named[canonical_of[keyword]] = _readable(canonical_of[keyword], value)
        return args[:leading], named

    back = [given.removesuffix("...") for given in by_position]

    def local(*values: Any, **named: Any) -> Any:
        rest = [named[given] for given in back]
        if not keywords:
            return native(*values, *rest)
        return native(*values, *rest, **{keyword: named[canonical_of[keyword]] for keyword in keywords})

    return MindSporeOp(name, spelling.canonical, local, spelling.inplace), canonical_arguments


def _readable(name: str, value: Any) -> Any:
    """Element types are passed on as such; some primitives are given their numbers."""
    return _types.type_id_to_type(value) if name == "dtype" and type(value) is int else value


_REFLECTED = {"sub": ("rsub", lambda x, number: number - x), "div": ("rdiv", lambda x, number: number / x)}
"""Ops whose first argument may be a number, and what they are then called with the tensor first."""


def _reflecting(native: Callable[..., Any], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    reflected = MindSporeOp(name, name, function)

    def canonical_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(args[0], Tensor):
            return args, kwargs
        return reflected, (args[1], args[0]), kwargs

    return canonical_arguments


# -- primitives whose arguments mean different ops ---------------------------------------------------------------------


def _gather_rows(native: Callable[..., Any]) -> Callable[..., Any]:
    """Gather(params, indices, axis, batch_dims): rows of a table are an embedding, else entries along a dim."""
    embedding = MindSporeOp("Gather", "embedding", lambda ids, weight: native(weight, ids, 0, 0))
    select = MindSporeOp("Gather", "index_select", lambda input, dim, index: native(input, index, dim, 0))
    unknown = MindSporeOp("Gather", None, native)

    def canonical_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        params, indices, axis, *batch = args
        if any(batch) or not isinstance(indices, Tensor):
            return unknown, args, kwargs
        if params.ndim == 2 and axis in (0, -2):
            return embedding, (indices, params), {}
        return (select, (params, axis, indices), {}) if indices.ndim == 1 else (unknown, args, kwargs)

    return canonical_arguments


def _product(native: Callable[..., Any]) -> Callable[..., Any]:
    """MatMul and BatchMatMul(input, other, transpose_a, transpose_b)."""
    linear = MindSporeOp("MatMul", "linear", lambda input, weight: native(input, weight, False, True))
    product = MindSporeOp("MatMul", "matmul", lambda input, other: native(input, other, False, False))
    unknown = MindSporeOp("MatMul", None, native)

    def canonical_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        input, other, *transposed = args
        if transposed == [False, True] and other.ndim == 2:
            return linear, (input, other), {}
        return (unknown, args, kwargs) if any(transposed) else (product, (input, other), {})

    return canonical_arguments


def _bias_add(native: Callable[..., Any]) -> Callable[..., Any]:
    """BiasAdd(input, bias, data_format): the bias lies along dim 1."""
    add = MindSporeOp("BiasAdd", "add", lambda input, bias: input + bias)
    unknown = MindSporeOp("BiasAdd", None, native)

    def canonical_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (add, (args[0], args[1]), {}) if args[0].ndim == 2 else (unknown, args, kwargs)

    return canonical_arguments


def _dropout_of_function(native: Callable[..., Any]) -> Callable[..., Any]:
    """FuncDropoutExt(input, p, training, inplace, seed, offset): MindSpore's own seed counts for nothing here."""
    dropout = MindSporeOp("FuncDropoutExt", "dropout", never_local)
    return lambda args, kwargs: (dropout, (args[0],), dict(zip(("p", "training", "inplace"), args[1:4], strict=True)))


def _dropout_of_layer(native: Callable[..., Any]) -> Callable[..., Any]:
    """Dropout(input, keep_prob, seed, seed): gives the result and the mask."""
    dropout = PairOp("Dropout", "dropout", never_local)
    return lambda args, kwargs: (dropout, (args[0],), {"p": 1.0 - args[1]})


def _layer_norm(native: Callable[..., Any]) -> Callable[..., Any]:
    """LayerNorm(input, gamma, beta, begin_norm_axis, begin_params_axis, epsilon): gives the result, mean and variance."""

    def local(input: Tensor, normalized_shape: Sequence[int], weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        axis = input.ndim - len(normalized_shape)
        return native(input, weight, bias, axis, axis, eps)[0]

    norm = TripleOp("LayerNorm", "layer_norm", local)

    def canonical_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        input, weight, bias, axis, _, eps = args
        return norm, (input, tuple(input.shape[axis:]), weight, bias, eps), {}

    return canonical_arguments


def never_local(*_: Any, **__: Any) -> NoReturn:
    """The local form of an op whose rule computes it from other ops."""
    raise AssertionError("this op has no local form: its rule computes it from other ops")


_SPECIAL: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "Gather": _gather_rows,
    "MatMul": _product,
    "BatchMatMul": _product,
    "BiasAdd": _bias_add,
    "LayerNorm": _layer_norm,
    "FuncDropoutExt": _dropout_of_function,
    "Dropout": _dropout_of_layer,
}


def bind(args: Sequence[Any], kwargs: dict[str, Any], parameters: Sequence[str]) -> dict[str, Any]:
    """A call's arguments by canonical names; a parameter "*name" takes all remaining positional ones."""
    bound: dict[str, Any] = {}
    for position, name in enumerate(parameters):
        if name.startswith("*"):
            if position < len(args):
                bound[name[1:]] = tuple(args[position:])
            break
        if position < len(args):
            bound[name] = args[position]
    starred = {name[1:] for name in parameters if name.startswith("*")}
    for name, value in kwargs.items():
        bound[name] = tuple(value) if name in starred and isinstance(value, (tuple, list)) else value
    return bound
