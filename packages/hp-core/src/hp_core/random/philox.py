"""Random numbers of the global element index: Philox4x32-10, written on integer arrays of any framework.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Every element of a random tensor
is a pure function of (seed, offset, global row-major index), so its value is the same for every layout and world size.

This is a **format**: a native kernel must give the same bits. Per element

1. *Block.* counter = (index low, index high, offset low, offset high), key = (seed low, seed high), 32-bit words; ten
   rounds give four words w0..w3. One block per element, whatever the dtype; the offset numbers the random calls.
2. *Uniform* in [0, 1): k / 2^b, where k is the top b bits of the 64-bit number (w0, w1), w0 first, and b is the
   precision of the dtype (`UNIFORM_BITS`). So the cast to the dtype is exact, and never gives 1.
3. *Normal*: Box-Muller, sqrt(-2 ln u) cos(2 pi v), with u = (k + 1) / 2^53 from (w0, w1) as above and v = j / 2^53
   likewise from (w2, w3), in float64, then rounded to nearest: to float32 first where the dtype is shorter still.
   Logarithm and cosine are the series below, of +, -, *, / and sqrt alone and in this order: these are exactly rounded
   everywhere, which no library's log and cos are. A kernel must not contract them to fused multiply-adds.

Other distributions and integers are functions of the same words: see `distributions.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import factorial, log, pi
from typing import Any, Protocol

from hp_core.platform.protocol import Tensor

__all__ = [
    "UNIFORM_BITS",
    "FloatOps",
    "Words",
    "global_indices",
    "minus_log",
    "normal_from_words",
    "philox_words",
    "polynomial",
    "sine",
    "top_53",
    "uniform_from_words",
]

Words = tuple[Tensor, Tensor, Tensor, Tensor]
"""Four int64 tensors of 32-bit unsigned values."""

UNIFORM_BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
"""Random bits of a uniform number, by dtype: as many as the dtype holds of every number in [0, 1)."""

_MASK = 0xFFFFFFFF
_ROUNDS = 10
# The paper's multipliers and Weyl increments. A multiplier is kept as its difference to 2^32: see `_multiply`.
_MULTIPLIERS = (0xD2511F53 - (1 << 32), 0xCD9E8D57 - (1 << 32))
_INCREMENTS = (0x9E3779B9, 0xBB67AE85)

_LN2 = log(2.0)
# 2 atanh(s) = s (2 + 2/3 y + 2/5 y^2 + ...), y = s^2 <= 1/9; what is left out is below 1e-17.
_ATANH = tuple(2.0 / (2 * i + 1) for i in range(17))
# sin(pi/2 t) = t (pi/2 - (pi/2)^3/3! y + ...), y = t^2 <= 1; what is left out is below 2e-18.
_SINE = tuple((-1) ** i * (pi / 2) ** (2 * i + 1) / factorial(2 * i + 1) for i in range(11))


class FloatOps(Protocol):
    """What a platform adds to the operators of its tensors (`* & >> << ^ + - / <` and `abs`)."""

    def to_float64(self, tensor: Tensor) -> Tensor:
        """Convert integers below 2^53 in size to float64, exactly."""

    def sqrt(self, tensor: Tensor) -> Tensor:
        """The square root of a float64 tensor, to one unit in the last place; 0 of 0."""


def philox_words(index: Tensor, seed: int, offset: int) -> Words:
    """Give each element its block of four random words.

    Takes about ten times the memory of `index` while it works. Callers go through large tensors in pieces: some ten
    thousand elements at a time stay in the cache, which is several times faster than all at once.

    Args:
        index: int64 tensor of counters, taken as 64-bit patterns; usually global element indices.
        seed: the key; its low 64 bits count.
        offset: number of the random call under this seed; its low 64 bits count.

    Returns:
        Words w0..w3, each of the shape of `index`.
    """
    key0, key1 = seed & _MASK, (seed >> 32) & _MASK
    # The words of the offset are plain integers for the first rounds, and become tensors as they mix with the others.
    word0: Any = index & _MASK
    word1: Any = (index >> 32) & _MASK
    word2: Any = offset & _MASK
    word3: Any = (offset >> 32) & _MASK
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(word0, _MULTIPLIERS[0])
        high1, low1 = _multiply(word2, _MULTIPLIERS[1])
        word0, word1, word2, word3 = high1 ^ word1 ^ key0, low1, high0 ^ word3 ^ key1, low0
        key0 = (key0 + _INCREMENTS[0]) & _MASK
        key1 = (key1 + _INCREMENTS[1]) & _MASK
    return word0, word1, word2, word3


def uniform_from_words(words: Words, dtype: str, ops: FloatOps) -> Tensor:
    """Uniform numbers in [0, 1), as float64 that casts to the dtype exactly.

    Args:
        words: from `philox_words`.
        dtype: one of `UNIFORM_BITS`.
        ops: the platform's.

    Returns:
        A float64 tensor whose values `dtype` represents exactly.
    """
    bits = UNIFORM_BITS[dtype]
    top = words[0] >> (32 - bits) if bits <= 32 else top_53(words[0], words[1])
    return ops.to_float64(top) * 2.0**-bits


def normal_from_words(words: Words, ops: FloatOps) -> Tensor:
    """Standard normal numbers in float64, to be rounded to the dtype asked for.

    Args:
        words: from `philox_words`.
        ops: the platform's.

    Returns:
        A float64 tensor; values lie within +-8.58.
    """
    twice_log = 2.0 * minus_log(top_53(words[0], words[1]) + 1, ops)
    # cos(2 pi v) = sin(pi/2 t) with t = 4 |v - 1/2| - 1 in [-1, 1], exact in float64: one odd series, no cases.
    t = abs(ops.to_float64(top_53(words[2], words[3]) - (1 << 52))) * 2.0**-51 - 1.0
    return _rounded_sqrt(twice_log, ops) * sine(t)


def global_indices(
    bounds: Sequence[tuple[int, int]], global_shape: Sequence[int], arange: Callable[[int, int], Tensor]
) -> Tensor:
    """Row-major index, in the global tensor, of each element of a local one.

    Args:
        bounds: what is held of each dim, as half-open intervals (`Layout.bounds`).
        global_shape: of the global tensor.
        arange: makes the int64 tensor start, ..., stop - 1.

    Returns:
        An int64 tensor of the local shape.
    """
    if not bounds:
        return arange(0, 1)[0]
    index = arange(*bounds[0])
    for (start, stop), size in zip(bounds[1:], global_shape[1:], strict=True):
        index = index[..., None] * size + arange(start, stop)
    return index


def _multiply(word: Any, multiplier: int) -> tuple[Any, Any]:
    """High and low 32 bits of `word` times `multiplier` + 2^32, with products that fit int64 (|multiplier| < 2^30)."""
    product = word * multiplier
    # In place where the framework can: the two results are new tensors already.
    high = product >> 32
    high += word
    product &= _MASK
    return high, product


def top_53(first: Tensor, second: Tensor) -> Tensor:
    """The top 53 bits of the 64-bit number that two words make."""
    return (first << 21) ^ (second >> 11)


def minus_log(n: Tensor, ops: FloatOps) -> Tensor:
    """-ln(n / 2^53) of integers 1 <= n <= 2^53, as a sum of terms that are never negative."""
    # n = m 2^(52 - e) with m in [1, 2] by bisection, so that the series sees (2 - m) / (2 + m) in [0, 1/3].
    exponent: Any = 0
    for step in (32, 16, 8, 4, 2, 1):
        shift = (n < (1 << (53 - step))) * step
        n = n << shift
        exponent = exponent + shift
    m = ops.to_float64(n) * 2.0**-52
    s = (2.0 - m) / (2.0 + m)
    return ops.to_float64(exponent) * _LN2 + s * polynomial(_ATANH, s * s)


def sine(t: Tensor) -> Tensor:
    """Sine of pi/2 t for t in [-1, 1]."""
    return t * polynomial(_SINE, t * t)


def _rounded_sqrt(x: Tensor, ops: FloatOps) -> Tensor:
    """The square root rounded to nearest, as IEEE 754 has it, of 0 and of ordinary numbers.

    PyTorch on CPU takes square roots from a vector library that misses the nearest number about once in a hundred. One
    Newton step with the exact residual mends that (Markstein, "Computation of elementary functions on the IBM RISC
    System/6000 processor", 1990). A kernel just takes the processor's square root.
    """
    root = ops.sqrt(x)
    # The square as an exact sum of two numbers, by Veltkamp's split and Dekker's product.
    scaled = root * (2.0**27 + 1.0)
    high = scaled - (scaled - root)
    low = root - high
    square = root * root
    rest = ((high * high - square) + 2.0 * (high * low)) + low * low
    residual = (x - square) - rest
    return root + residual / (2.0 * root + 1e-300)  # the small number only makes 0 / 0 a zero


def polynomial(coefficients: Sequence[float], y: Tensor) -> Tensor:
    """Horner's scheme; the first coefficient is the constant."""
    result = coefficients[-1] * y + coefficients[-2]
    for coefficient in reversed(coefficients[:-2]):
        result = result * y + coefficient
    return result
