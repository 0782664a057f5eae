"""Ops on pieces without elements: no kernel of MindSpore's computes or differentiates one here.

A rank may hold nothing of a dim that is cut over more ranks than it has rows. On CPU, kernels then raise, leave results
unset, or give the gradient of a broadcast operand any value, so results and zero gradients are made without them. The
backward must run all the same, like that of the other ranks, because they communicate there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from mindspore import Tensor, ops

from hp_core.errors import PlatformError
from hp_core.platform.mindspore.arrays import array_dtype, as_tensor
from hp_core.platform.mindspore.autograd import unrecorded, with_zero_gradients

__all__ = ["over_nothing"]

_OVER_NOTHING = dict.fromkeys("sum mean mean_share matmul mm mv dot bmm linear embedding_rows any".split(), 0)
_OVER_NOTHING |= {"all": 1, "prod": 1}
"""By canonical name, what the ops give whose results can have elements though an operand has none."""
_VIEWS = frozenset(
    "reshape reshape_first view_first expand_first flatten unsqueeze squeeze permute transpose broadcast_to expand_as narrow "
    "split chunk unbind select getitem".split()
)
"""Ops without a kernel, which tell the shape of nothing rightly; some are given the very size that is none."""
_STANDINS = (5, 9)
"""Sizes that stand in for none, to see how the sizes of results grow with it. One would broadcast."""


def over_nothing(name: str | None, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an op gives of operands of which at least one has no elements; every operand's gradient is zeros.

    Args:
        name: canonical name of the op.
        function: the op on plain tensors.
        args: its arguments.
        kwargs: arguments by name.

    Raises:
        PlatformError: the result has elements, and it isn't known of this op what they are.
    """
    if name == "linear" and len(args) == 3 and args[2] is not None:
        product = over_nothing(name, function, (*args[:2], None), kwargs)
        # a bias of no elements makes the product one, too
        return with_zero_gradients(product, args[2]) if 0 in product.shape else product + args[2]
    operands: list[Tensor] = []
    _collect((args, kwargs), operands)
    if name == "cat" and any(operand.size for operand in operands):
        return function(*args, **kwargs)  # MindSpore itself leaves the others out

    if name in _VIEWS and not (name == "getitem" and len(operands) > 1):  # a tensor among the indices needs a kernel
        sources = likes = unrecorded(partial(function, *args, **kwargs))
    else:
        sources, likes = _by_stand_ins(function, args, kwargs, operands)
    several = isinstance(likes, (tuple, list))
    results = []
    for source, like in zip(sources, likes, strict=True) if several else ((sources, likes),):
        if like.size and name not in _OVER_NOTHING:
            raise PlatformError(
                f"{name}: this rank holds no elements of an operand of local shapes {[x.shape for x in operands]}, and what the op "
                f"gives then isn't known on MindSpore; redistribute the operands to Replicate() before."
            )
        value = as_tensor(np.full(like.shape, _OVER_NOTHING.get(name or "", 0), array_dtype(like.dtype)))
        results.append(with_zero_gradients(value, *(operands if source is like else (source,))))
    return type(likes)(results) if several else results[0]


def _by_stand_ins(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[Tensor]
) -> tuple[Any, Any]:
    """What the op gives of tensors that stand in for those without elements, and tensors of the shapes that it ought to have.

    The former are in the graph, so that a gradient reaches the operands that it reaches on other ranks, and no others:
    MindSpore lets none through some ops (comparisons, floor_divide, ceil, ...), and a backward that communicates must run
    on all ranks or on none. An error of a kernel would cost MindSpore the graph recorded so far, so it isn't tried which
    of them take tensors without elements.
    """
    low, high = ([_stand_in(operand, size) for operand in operands] for size in _STANDINS)
    recorded = iter([with_zero_gradients(*pair) for pair in zip(low, operands, strict=True)])
    few = function(*_replaced(args, recorded), **_replaced(kwargs, recorded))
    others = iter(high)
    many = unrecorded(partial(function, *_replaced(args, others), **_replaced(kwargs, others)))
    if isinstance(few, (tuple, list)):
        return few, type(few)([_shrunk(*pair) for pair in zip(few, many, strict=True)])
    return few, _shrunk(few, many)


def _shrunk(few: Tensor, many: Tensor) -> Tensor:
    """A tensor of the shape that is left where the sizes that stand in are none."""
    low, high = _STANDINS
    shape = [small - low * (large - small) // (high - low) for small, large in zip(few.shape, many.shape, strict=True)]
    return as_tensor(np.zeros(shape, array_dtype(few.dtype)))


def _stand_in(operand: Tensor, size: int) -> Tensor:
    """The operand, or one of this size where it has none: zeros, since they are an index of everything."""
    if operand.size:
        return ops.stop_gradient(operand)
    return as_tensor(np.zeros([own or size for own in operand.shape], array_dtype(operand.dtype)))


def _replaced(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The value with the next of these in place of each tensor."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, dict):
        return {key: _replaced(item, tensors) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)([_replaced(item, tensors) for item in value])
    return value


def _collect(value: Any, into: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        into.append(value)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, into)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _collect(item, into)
