"""What the calls in torch's tables of samples may use: torch itself, and functions of several steps."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hp_core.platform.sample_table import SampleTable

__all__ = ["calls", "each"]


def written(x: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """A copy of `x` after `x[index] = value`."""
    x = x.clone()
    x[index] = value
    return x


def augmented(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A copy of `x` after augmented assignments."""
    x = x.clone()
    x += y
    x *= 2
    x -= 0 * y
    return x


def changed(function: Callable[..., Any], tensors: Sequence[torch.Tensor], *arguments: Any) -> list[torch.Tensor]:
    """Copies of `tensors`, outside the graph, after `function(copies, *arguments)` wrote to them."""
    copies = [tensor.detach().clone() for tensor in tensors]
    function(copies, *arguments)
    return copies


def filled(x: torch.Tensor, name: str, *arguments: Any) -> torch.Tensor:
    """A copy of `x`, outside the graph, after its method `name` filled it."""
    copy: torch.Tensor = getattr(x.detach().clone(), name)(*arguments)
    return copy


def adam_step(function: Callable[..., Any], x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Parameter and both moments after one fused step of Adam on a parameter `x` whose gradient is `y`."""
    parameter, first, second = x.detach().clone(), x.detach().clone().mul_(0), x.detach().clone().mul_(0)
    function(
        [parameter], [y.detach()], [first], [second], [], [torch.ones(())],
        lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    return [parameter, first, second]


def sgd_step(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Parameter and momentum after one fused step of SGD on a parameter `x` whose gradient is `y`."""
    parameter, momentum = x.detach().clone(), x.detach().clone().mul_(0)
    torch._fused_sgd_(
        [parameter], [y.detach()], [momentum],
        weight_decay=0.01, momentum=0.9, lr=0.1, dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
    )  # fmt: skip
    return [parameter, momentum]


def adagrad_step(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Parameter and sum of squares after one fused step of Adagrad on a parameter `x` whose gradient is `y`."""
    parameter, total = x.detach().clone(), x.detach().clone().mul_(0)
    torch._fused_adagrad_(
        [parameter], [y.detach()], [total], [torch.ones(())],
        lr=0.1, lr_decay=0.1, weight_decay=0.01, eps=1e-8, maximize=False,
    )  # fmt: skip
    return [parameter, total]


_NAMESPACE: dict[str, Any] = {
    "torch": torch,
    "F": F,
    "operator": operator,
    "math": math,
    **{
        function.__name__: function
        for function in (written, augmented, changed, filled, adam_step, adagrad_step, sgd_step)
    },
}

_TABLE = SampleTable(_NAMESPACE)
calls, each = _TABLE.calls, _TABLE.each
"""Samples of one op, of several; calls may use `torch`, `F`, `operator`, `math` and the functions above."""
