"""Products of a rank's own parts where torch's own op refuses empty ones."""

from __future__ import annotations

import torch

__all__ = ["bilinear_of_nothing"]


def bilinear_of_nothing(
    first: torch.Tensor, second: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`torch.nn.functional.bilinear` of features none of which are here: [..., i], [..., j], [out, i, j] -> [..., out]."""
    result = torch.einsum("...i,oij,...j->...o", first, weight, second)
    return result if bias is None else result + bias
