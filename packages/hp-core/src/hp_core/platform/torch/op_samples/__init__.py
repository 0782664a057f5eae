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

    record = "tests/rules/golden"
    most: dict[str, int] = {}  # noqa: RUF012

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

    def gradients(
        self,
        inputs: Sequence[torch.Tensor],
        differentiable: Sequence[bool],
        run: Callable[[list[torch.Tensor]], Sequence[tuple[torch.Tensor, torch.Tensor]]],
    ) -> list[torch.Tensor | None]:
        """Gradients of the inputs by the outputs that `run` gives."""
        leaves = [
            tensor.requires_grad_() if wanted else tensor for tensor, wanted in zip(inputs, differentiable, strict=True)
        ]
        pairs = run(leaves)
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        return [leaf.grad for leaf in leaves]

    def extremum(self, left: torch.Tensor, right: torch.Tensor, largest: bool) -> torch.Tensor:
        """The larger, or the smaller, of each two elements."""
        return torch.maximum(left, right) if largest else torch.minimum(left, right)

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
