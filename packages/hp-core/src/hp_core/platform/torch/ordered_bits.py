"""Floating-point numbers as integers of the same order, so that a max or min over ranks treats NaN as the dense op does.

Backends compare floats as their own code happens to: gloo drops a NaN or keeps it, depending on the rank that holds it.
Integers have one order everywhere. Read as sign and magnitude, the bits of a float already are in order.
"""

from __future__ import annotations

import torch

__all__ = ["from_ordered_bits", "ordered_bits"]


def ordered_bits(tensor: torch.Tensor, reduce_op: str) -> torch.Tensor:
    """Integers of which the max (or min, as `reduce_op` says) is that of the numbers, with any NaN beyond all of them.

    Float32 gives int32, float64 gives int64; narrower types are widened to float32.
    """
    wide = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
    bits = wide.contiguous().view(torch.int64 if wide.dtype == torch.float64 else torch.int32)
    limits = torch.iinfo(bits.dtype)
    ordered = _flip_negative(bits)
    return ordered.masked_fill_(wide.isnan(), limits.max if reduce_op == "max" else limits.min)


def from_ordered_bits(ordered: torch.Tensor) -> torch.Tensor:
    """The float32 or float64 numbers that such integers stand for."""
    return _flip_negative(ordered).view(torch.float64 if ordered.dtype == torch.int64 else torch.float32)


def _flip_negative(bits: torch.Tensor) -> torch.Tensor:
    """Reverse the order of the negative numbers; its own inverse."""
    limits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (limits.bits - 1)) & limits.max)
