"""Distributions as functions of Philox words, in the arithmetic that every machine rounds alike (+, -, *, / and sqrt).

Part of the format that `philox.py` states: a native kernel must give the same bits. With w0..w3 an element's words and
k the top 53 bits of (w0, w1), each value is computed in float64, in the order written here:

- *Exponential*: -ln(n / 2^53) / rate, with n = k with its last bit set, so that it is never 0.
- *Cauchy*: median + sigma tan(pi (u - 1/2)), with u = (2 k + 1) / 2^54, as the quotient of two sines.
- *Geometric*: floor(-ln(n / 2^53) / -log1p(-p)) + 1, n as above; log1p of the number p is the C library's.
- *Log-normal*: exp(std z + mean) of the normal number z, by the series below.
- *Integers* in [low, high): low + (m mod (high - low)), m the top 63 bits of (w0, w1); all 64 bits for all of int64.
"""

from __future__ import annotations

from math import factorial, log, log1p
from typing import Any

from hp_core.errors import ShardingRuleError
from hp_core.platform.protocol import Tensor
from hp_core.random.philox import FloatOps, Words, minus_log, normal_from_words, polynomial, sine, top_53

__all__ = ["LEAST_EXPONENTIAL", "cauchy", "exponential", "geometric", "integers", "log_normal", "portable_exp"]

LEAST_EXPONENTIAL = {"float16": 2.0**-24}
"""What a smaller exponential number is rounded up to, where the dtype would make it 0."""

_LN2 = log(2.0)
# ln 2 in two parts: a multiple of the first by an integer below 2^11 is exact.
_LN2_HIGH = float.fromhex("0x1.62e42fefa3800p-1")
_LN2_LOW = float.fromhex("0x1.ef35793c76730p-45")
# exp(r) = 1 + r + r^2/2! + ... for |r| <= ln(2) / 2; what is left out is below 1e-17.
_EXPONENTIAL = tuple(1.0 / factorial(i) for i in range(15))


def exponential(words: Words, ops: FloatOps, rate: float) -> Tensor:
    """Exponential numbers of this rate, never 0; float64."""
    return minus_log(_odd_53(words), ops) / rate


def cauchy(words: Words, ops: FloatOps, median: float, sigma: float) -> Tensor:
    """Cauchy numbers; float64."""
    # pi (u - 1/2) = pi/2 t with t = (2 k + 1) / 2^53 - 1, exact in float64 and never +-1
    t = ops.to_float64(top_53(words[0], words[1]) * 2 + 1 - (1 << 53)) * 2.0**-53
    return sine(t) / sine(1.0 - abs(t)) * sigma + median


def geometric(words: Words, ops: FloatOps, p: float) -> Tensor:
    """How many trials of probability p it takes to the first success, from 1; float64."""
    if not 0.0 < p < 1.0:
        raise ShardingRuleError(f"geometric: p must be between 0 and 1, got {p}.")
    return minus_log(_odd_53(words), ops) / -log1p(-p) // 1.0 + 1.0


def log_normal(words: Words, ops: FloatOps, mean: float, std: float) -> Tensor:
    """Numbers whose logarithm is normal; float64."""
    return portable_exp(normal_from_words(words, ops) * std + mean, ops)


def integers(words: Words, low: int, high: int) -> Tensor:
    """Integers in [low, high), as int64.

    Raises:
        ShardingRuleError: the interval is empty, or too long but not all of int64.
    """
    count = high - low
    if count <= 0 or 1 << 63 < count < 1 << 64:
        raise ShardingRuleError(f"random integers from [{low}, {high}): the interval must hold 1 to 2^63 numbers.")
    if count >= 1 << 64:
        return (words[0] << 32) ^ words[1]
    drawn: Any = (words[0] << 31) ^ (words[1] >> 1)
    return (drawn if count == 1 << 63 else drawn % count) + low


def portable_exp(x: Tensor, ops: FloatOps) -> Tensor:
    """The exponential of float64 numbers: exp(r) with |r| <= ln(2) / 2, doubled or halved n times, by exact factors."""
    n = (x / _LN2 + 0.5) // 1.0
    result = polynomial(_EXPONENTIAL, (x - n * _LN2_HIGH) - n * _LN2_LOW)
    left = abs(n)
    for step in (1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1):
        taken = ops.to_float64(left >= step)
        left = left - taken * step
        up = taken * ops.to_float64(n > 0)
        down = taken - up
        # 2^1024 is no number: by its root, twice
        for exponent in (step // 2, step - step // 2):
            result = result * (1.0 + up * (2.0**exponent - 1.0)) / (1.0 + down * (2.0**exponent - 1.0))
    return result


def _odd_53(words: Words) -> Tensor:
    return ((top_53(words[0], words[1]) >> 1) << 1) + 1
