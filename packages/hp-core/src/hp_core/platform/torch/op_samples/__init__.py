"""Samples of all ops of torch: what the validator of sharding rules calls, family by family.

A table for each family, in the form that `calls` reads; a rule without a sample is told by the validator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch

from hp_core.platform.protocol import OpSample, SampleOperand
from hp_core.platform.torch.op_samples.native import native_calls
from hp_core.platform.torch.op_samples.values import differing, make_operand, noise

__all__ = ["TorchOpSamples"]

_TABLES = (
    "elementwise", "special", "products", "matrices", "shapes", "indices", "reductions", "layers", "convolutions", "lists",
    "draws",
)  # fmt: skip
_RESHAPED = frozenset("as_strided detach squeeze t transpose unsqueeze".split())
"""Ops whose in-place variants change what the tensor is, not its values; they aren't a rule's business."""


class TorchOpSamples:
    """See `hp_core.platform.protocol.OpSamples`."""

    def table(self) -> tuple[OpSample, ...]:
        """All samples."""
        return _table()

    def has_inplace(self, op: str) -> bool:
        """Whether torch has an in-place variant of the op."""
        return op not in _RESHAPED and (hasattr(torch.Tensor, f"{op}_") or hasattr(torch, f"{op}_"))

    def values(self, operands: str, seed: int) -> list[SampleOperand]:
        """Dense values of the operands."""
        generator = torch.Generator().manual_seed(seed)
        return [make_operand(text, generator) for text in operands.split()]

    def noise(self, like: torch.Tensor, seed: int) -> torch.Tensor:
        """Random values of the same shape and element type."""
        return noise(like, seed)

    def backward(self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Differentiate several outputs at once."""
        torch.autograd.backward(list(outputs), list(gradients))

    def differing(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[int]:
        """Numbers of the pairs that differ by more than rounding."""
        return differing(pairs)

    def native_calls(self) -> dict[str, tuple[Callable[..., Any], ...]]:
        """Ops of torch's own DTensor, with calls to try."""
        return native_calls()


@cache
def _table() -> tuple[OpSample, ...]:
    samples: dict[tuple[str, str, str], OpSample] = {}
    for name in _TABLES:
        for sample in import_module(f"{__name__}.{name}").SAMPLES:
            samples.setdefault((sample.op, sample.call, sample.operands), sample)
    return tuple(samples.values())
