"""torch.nn.init on DTensors: the functions that torch hands over whole, and the ops that its other ones rest on.

Fans are computed from global shapes, and random numbers come by global index, so that a parameter's initial value is the
same for every layout. Most functions of torch.nn.init run as they are, on ops that have rules.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from hp_core.errors import ShardingRuleError

__all__ = ["INITIALIZERS"]


def uniform_(tensor: Any, a: float = 0.0, b: float = 1.0, generator: Any = None) -> Any:
    """See torch.nn.init."""
    with torch.no_grad():
        return tensor.uniform_(a, b, generator=generator)


def normal_(tensor: Any, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> Any:
    """See torch.nn.init."""
    with torch.no_grad():
        return tensor.normal_(mean, std, generator=generator)


def constant_(tensor: Any, val: float) -> Any:
    """See torch.nn.init."""
    with torch.no_grad():
        return tensor.fill_(val)


def kaiming_uniform_(
    tensor: Any, a: float = 0, mode: str = "fan_in", nonlinearity: str = "leaky_relu", generator: Any = None
) -> Any:
    """See torch.nn.init."""
    if not tensor.numel():
        return tensor
    fan = nn.init._calculate_correct_fan(tensor, mode)  # type: ignore[arg-type]
    bound = math.sqrt(3.0) * nn.init.calculate_gain(nonlinearity, a) / math.sqrt(fan)  # type: ignore[arg-type]
    with torch.no_grad():
        return tensor.uniform_(-bound, bound, generator=generator)


def eye(n: int, m: int | None = None, *, out: Any, **_: Any) -> Any:
    """`torch.eye(n, m, out=DTensor)`: each rank writes its own part."""
    shape = (n, n if m is None else m)
    if tuple(out.shape) != shape or out.is_partial():
        raise ShardingRuleError(
            f"eye{shape} can't be written to a DTensor of shape {tuple(out.shape)} laid out {out.layout}; out= takes one of the "
            f"result's shape without pending reductions."
        )
    if out.layout.flat is not None:
        scratch: Any = torch.empty_like(out)
        with torch.no_grad():
            return out.copy_(eye(n, m, out=scratch.redistribute(out.layout.unflat)))
    (first_row, last_row), (first_column, last_column) = out.layout.bounds(shape)
    local = out.to_local()
    rows = torch.arange(first_row, last_row, device=local.device)
    columns = torch.arange(first_column, last_column, device=local.device)
    with torch.no_grad():
        out._local.copy_(rows.unsqueeze(1) == columns)
    out._forget()
    return out


def t_(tensor: Any) -> Any:
    """`tensor.t_()` of a DTensor outside any graph: the same values under a transposed layout."""
    if tensor.requires_grad:
        raise ShardingRuleError("t_ would change the shape of a DTensor in a graph; write x = x.t().")
    transposed = tensor.t()
    tensor._local, tensor._spec = transposed._local, transposed._spec
    tensor._forget()
    return tensor


INITIALIZERS: dict[Any, Any] = {
    nn.init.uniform_: uniform_,
    nn.init.normal_: normal_,
    nn.init.constant_: constant_,
    nn.init.kaiming_uniform_: kaiming_uniform_,
    torch.eye: eye,
    torch.Tensor.t_: t_,
}
"""What answers each of these functions when a DTensor is among its arguments."""
