"""From an intercepted call of MindSpore's to a canonical one, and back to run it on local tensors.

`__fallback__` gets a new function object for every call, and arguments as the primitive takes them. Here that becomes
one `MindSporeOp` per primitive and kind of call, which can be a key of caches, with arguments by canonical names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mindspore import Tensor
from mindspore._c_expression import typing as _types
from mindspore.ops import Primitive

from hp_core.errors import ShardingRuleError
from hp_core.platform.mindspore.op import MindSporeOp
from hp_core.platform.mindspore.op_names import ATTRIBUTES, KEYWORDS, NAMES, Spelling
from hp_core.platform.mindspore.special_calls import SPECIAL

__all__ = ["bind", "interpret", "readable_dtype"]

Call = tuple[MindSporeOp, tuple[Any, ...], dict[str, Any]]


_SEEDED = frozenset({"Dropout"})
"""Primitives that MindSpore makes anew for every call, with a seed that counts for nothing here, once `set_seed` was called."""

_ops: dict[Any, tuple[MindSporeOp, Callable[..., Any] | None]] = {}
"""By kind of call: the op, and what makes canonical arguments of MindSpore's (None: they are canonical)."""


def interpret(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Call:
    """The canonical op and arguments of an intercepted call."""
    if len(args) == 3 and type(args[2]) is tuple and isinstance(args[0], Primitive):
        primitive, name, args = args
        key: Any = (name, "" if name in _SEEDED else str(primitive), len(args))
        known = _ops.get(key)
        given = len(args)
        if name in ATTRIBUTES:
            args = (*args, *[getattr(primitive, attribute) for attribute in ATTRIBUTES[name]])
        if known is None:
            known = _ops[key] = _kind(name, len(args), (), lambda *values: function(primitive, name, values[:given]))
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
    if name in SPECIAL:
        return MindSporeOp(name, name, native), SPECIAL[name](native)
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
) -> tuple[MindSporeOp, Callable[..., Any] | None]:
    """Arguments beyond the leading ones go on by canonical keyword, and come back as MindSpore gave them."""
    leading = len(spelling.leading)
    names = (*spelling.leading, *spelling.others)
    by_position: list[str] = []
    for given in names[:positional]:
        by_position.append(given)
        if given.endswith("..."):
            break
    else:
        if positional > len(names):  # what they mean isn't known
            return MindSporeOp(name, None, native), None
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
            if given.startswith("!"):
                if value:
                    raise ShardingRuleError(f"{name} with {given[1:]}={value!r} has no sharding rule; leave it off.")
                continue
            named[given] = readable_dtype(value) if given == "dtype" else value
        for keyword, value in kwargs.items():
            named[canonical_of[keyword]] = readable_dtype(value) if keyword == "dtype" else value
        return args[:leading], named

    back = [None if given.startswith("!") else given.removesuffix("...") for given in by_position]

    def local(*values: Any, **named: Any) -> Any:
        rest = [False if given is None else named[given] for given in back]
        if not keywords:
            return native(*values, *rest)
        return native(*values, *rest, **{keyword: named[canonical_of[keyword]] for keyword in keywords})

    return MindSporeOp(name, spelling.canonical, local, spelling.inplace), canonical_arguments


def readable_dtype(value: Any) -> Any:
    """An element type, of which some primitives are given the number."""
    return _types.type_id_to_type(value) if type(value) is int else value


_REFLECTED = {"sub": ("rsub", lambda x, number: number - x), "div": ("rdiv", lambda x, number: number / x)}
"""Ops whose first argument may be a number, and what they are then called with the tensor first."""


def _reflecting(native: Callable[..., Any], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    reflected = MindSporeOp(name, name, function)

    def canonical_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(args[0], Tensor):
            return args, kwargs
        return reflected, (args[1], args[0]), kwargs

    return canonical_arguments


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
