"""Convolutions and ops on channels of a rank's own part, where that part is a share of the groups, or empty.

torch refuses tensors without channels; here one zero channel stands in, so that the result has its shape and the graph
gives the (empty) gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["affine_grid", "channelwise", "convolution"]


def affine_grid(theta: torch.Tensor, *, size: Sequence[int], align_corners: bool) -> torch.Tensor:
    """The sampling grid of this rank's matrices; `size` is that of this rank's images."""
    if theta.shape[0]:
        return F.affine_grid(theta, list(size), align_corners=align_corners)
    grid = F.affine_grid(_with_one(theta, 0), [1, *size[1:]], align_corners=align_corners)
    return grid.narrow(0, 0, 0)


def convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    op: str,
    groups: int,
    arguments: dict[str, Any],
) -> torch.Tensor:
    """The convolution called `op` of this rank's channels.

    Args:
        x: [batch, in, ...] or [in, ...]; batch and channels may be empty.
        weight: [out, in, ...], or [in, out, ...] for a transposed one; channels may be empty.
        bias: [out] or None.
        op: name in torch.nn.functional.
        groups: how many groups this rank has.
        arguments: stride, padding and the like.
    """
    from_dim, to_dim = (0, 1) if "transpose" in op else (1, 0)
    in_dim = x.dim() - weight.dim() + 1
    no_samples = in_dim == 1 and not x.shape[0]
    no_outputs = not weight.shape[to_dim]
    if not weight.shape[from_dim]:
        x, weight = _with_one(x, in_dim), _with_one(weight, from_dim)
    if no_outputs:
        weight = _with_one(weight, to_dim)
        bias = None if bias is None else _with_one(bias, 0)
    if no_samples:
        x = _with_one(x, 0)
    result: torch.Tensor = getattr(F, op)(x, weight, bias, groups=groups, **arguments)
    if no_outputs:
        result = result.narrow(in_dim, 0, 0)
    return result.narrow(0, 0, 0) if no_samples else result


def channelwise(*operands: torch.Tensor, op: str, names: Sequence[str], arguments: dict[str, Any]) -> Any:
    """The op of torch.nn.functional called `op` on operands some of whose dims are empty; those pass through."""
    empty = [dim for dim, size in enumerate(operands[0].shape) if not size]
    for dim in empty:
        operands = tuple(_with_one(operand, dim) for operand in operands)
    result = getattr(F, op)(**dict(zip(names, operands, strict=True)), **arguments)

    def narrowed(tensor: torch.Tensor) -> torch.Tensor:
        for dim in empty:
            tensor = tensor.narrow(dim, 0, 0)
        return tensor

    return tuple(map(narrowed, result)) if isinstance(result, tuple) else narrowed(result)


def _with_one(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """One zero after the end of an empty dim; still in the tensor's graph."""
    shape = list(tensor.shape)
    shape[dim] = 1
    return torch.cat((tensor, tensor.new_zeros(shape)), dim)
