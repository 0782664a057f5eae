"""One kind of call of MindSpore's, which can be a key of caches: what the dispatcher calls the function.

`__fallback__` gets a new function object for every call; `calls.interpret` makes one of these of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mindspore import Tensor

from hp_core.platform.mindspore.arrays import as_tensor
from hp_core.platform.mindspore.empty_pieces import over_nothing

__all__ = ["MindSporeOp", "PairOp", "TripleOp"]


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
        nothing = False
        for value in args:
            kind = type(value)
            if kind is np.ndarray or kind is list or kind is tuple:  # what a redistribution has moved
                args = tuple([_as_tensors(one) for one in args])
                nothing = any(_has_nothing(one) for one in args)
                break
            if isinstance(value, Tensor) and not value.size:
                nothing = True
        for name, value in kwargs.items():
            if type(value) is np.ndarray:
                kwargs[name] = as_tensor(value)
            nothing = nothing or _has_nothing(value)
        if nothing and not self.inplace:
            return over_nothing(self.canonical, self.local, args, kwargs)
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


def _has_nothing(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.size
    return type(value) in (list, tuple) and any(isinstance(item, Tensor) and not item.size for item in value)
