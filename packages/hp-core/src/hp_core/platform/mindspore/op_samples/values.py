"""Values of the operands of samples, and comparison of results, on MindSpore: arrays of NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np

from hp_core.platform.mindspore.arrays import Array, array_dtype, as_array
from hp_core.platform.protocol import SampleOperand

__all__ = ["differing", "make_operand", "noise"]

_WIDTHS = {"h": ms.float16}
_TOLERANCE = {np.dtype(np.float16): 4e-3, np.dtype(np.float64): 1e-6}
_STEP = 1 / 1024
"""All values are multiples of it: what is pending adds up to the value without rounding in float32, and ties are rare."""


def make_operand(text: str, random: np.random.Generator) -> SampleOperand:
    """The operand that a text like "p:5x3" asks for (see `hp_core.platform.protocol.OpSamples.values`); float32 by default."""
    kind, _, sizes = text.rpartition(":")
    shape = () if sizes == "-" else tuple(int(size) for size in sizes.split("x"))
    if kind == "b":
        return SampleOperand(np.asarray(random.random(shape) < 0.5), False, False)
    if kind.startswith("i"):
        return SampleOperand(np.asarray(random.integers(0, int(kind[1:]), shape)), False, False)
    if kind in ("p", "u"):
        uniform = np.asarray(random.random(shape))
        return SampleOperand(_stepped(uniform + 0.5 if kind == "p" else uniform * 0.8 + 0.1, np.float32), True, True)
    if kind in _WIDTHS:  # eighths, for the same reason
        value = np.asarray(random.integers(-8, 9, shape) / 8).astype(array_dtype(_WIDTHS[kind]))
        return SampleOperand(value, True, True)
    return SampleOperand(_stepped(np.asarray(random.normal(size=shape)), np.float32), kind != "f", kind != "n")


def noise(like: Any, seed: int) -> Array:
    """Normal values of the same shape and element type."""
    dtype = like.dtype if isinstance(like, (np.ndarray, np.generic)) else array_dtype(like.dtype)
    return _stepped(np.asarray(np.random.default_rng(seed).normal(size=tuple(like.shape))), dtype)


def differing(pairs: Sequence[tuple[Any, Any]]) -> list[int]:
    """Numbers of the pairs that differ by more than rounding."""
    return [number for number, pair in enumerate(pairs) if not _equal(*map(as_array, pair))]


def _stepped(values: Array, dtype: Any) -> Array:
    step = _STEP if np.dtype(dtype).itemsize > 2 else 1 / 8
    return np.asarray(np.round(values / step) * step).astype(dtype)


def _equal(left: Array, right: Array) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if not np.issubdtype(left.dtype, np.floating):
        return bool(np.array_equal(left, right))
    tolerance = _TOLERANCE.get(left.dtype, 1e-4)
    return bool(np.allclose(left, right, rtol=tolerance, atol=tolerance / 4, equal_nan=True))
