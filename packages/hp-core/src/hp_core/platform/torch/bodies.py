"""Functions that torch writes in Python run on DTensors as they are written: the ops they call are what is intercepted.

Such a function first asks whether an argument overrides it. Its body here is the same code with that question answered
"no"; the functions that it calls still ask.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch.nn.functional as F

__all__ = ["BODIES"]

_DECOMPOSED = (
    F.multi_head_attention_forward,
    F.multilabel_soft_margin_loss,
    F.triplet_margin_with_distance_loss,
    F.gumbel_softmax,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.unfold,
    F.fold,
    F.lp_pool1d,
    F.lp_pool2d,
    F.lp_pool3d,
)


def _never(*_: Any) -> bool:
    return False


def _body(function: Any) -> Any:
    """The function's own code, which takes no argument for an override of the function itself."""
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = {**function.__globals__, **dict.fromkeys(names, _never)}
    body = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    body.__kwdefaults__ = function.__kwdefaults__
    return body


BODIES: dict[Any, Any] = {function: _body(function) for function in _DECOMPOSED}
"""By function, what runs in its place on DTensors."""
