"""Values of the operands of samples, and comparison of results, on torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hp_core.platform.protocol import SampleOperand

__all__ = ["differing", "make_operand", "noise"]

_WIDTHS = {"s": torch.float32, "h": torch.bfloat16, "c": torch.complex128}
_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.complex64: 2e-5}


def make_operand(text: str, generator: torch.Generator) -> SampleOperand:
    """The operand that a text like "p:5x3" asks for (see `hp_core.platform.protocol.OpSamples.values`)."""
    kind, _, sizes = text.rpartition(":")
    shape = () if sizes == "-" else tuple(int(size) for size in sizes.split("x"))
    if kind == "b":
        return SampleOperand(torch.rand(shape, generator=generator) < 0.5, False, False)
    if kind.startswith("i"):
        return SampleOperand(torch.randint(0, int(kind[1:]), shape, generator=generator), False, False)
    if kind in ("p", "u"):
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
        return SampleOperand(uniform + 0.5 if kind == "p" else uniform * 0.8 + 0.1, True, True)
    value = _normal(shape, _WIDTHS.get(kind, torch.float64), generator)
    return SampleOperand(value, kind != "f", kind != "n")


def noise(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Normal values of the same shape and element type."""
    return _normal(tuple(like.shape), like.dtype, torch.Generator().manual_seed(seed))


def _normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype == torch.float64 or dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=dtype)
    # eighths: what is pending adds up to the value without rounding, even in bfloat16
    return torch.randint(-8, 9, shape, generator=generator).to(dtype) / 8


def differing(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[int]:
    """Numbers of the pairs that differ by more than rounding."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    found = []
    for number, (left, right) in enumerate(pairs):
        if left.shape != right.shape or left.dtype != right.dtype:
            found.append(number)
        else:
            by_dtype.setdefault(left.dtype, []).append(number)
    for numbers in by_dtype.values():  # many small tensors at once: nearly always all are equal
        left = torch.cat([pairs[number][0].reshape(-1) for number in numbers])
        right = torch.cat([pairs[number][1].reshape(-1) for number in numbers])
        if not _equal(left, right):
            found += [number for number in numbers if not _equal(*pairs[number])]
    return sorted(found)


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    if not (left.is_floating_point() or left.is_complex()):
        return torch.equal(left, right)
    tolerance = _TOLERANCE.get(left.dtype, 1e-11)
    return torch.allclose(left, right, rtol=tolerance, atol=tolerance, equal_nan=True)
