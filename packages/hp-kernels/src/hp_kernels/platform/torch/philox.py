"""Random numbers by global element index as a torch op, and its twin in torch's own ops for devices without the kernel.

The format, bit for bit, is that of `hp_core/random/philox.py`, which this package may not import; a test holds the two
against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import factorial, log, pi, prod
from typing import Any

import torch

from hp_kernels.errors import KernelArgumentError
from hp_kernels.loading import native
from hp_kernels.philox import FILLS, philox_fill
from hp_kernels.platform.torch.arrays import array_of, floating_types, island_errors, on_cpu, require_dense

__all__ = ["fill_random"]

torch.library.define(
    "hp_kernels::philox_fill",
    "(Tensor(a!) out, str kind, int[] global_shape, int[] starts, int[] stops, int seed, int offset, float p) -> ()",
)

_PIECE = 1 << 15  # elements that the twin works on at a time, so that they stay in a cache
_WORD = 0xFFFFFFFF
_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_LN2 = log(2.0)
_ATANH = tuple(2.0 / (2 * i + 1) for i in range(17))
_SINE = tuple((-1) ** i * (pi / 2) ** (2 * i + 1) / factorial(2 * i + 1) for i in range(11))


def fill_random(
    out: torch.Tensor,
    kind: str,
    global_shape: Sequence[int],
    box: Sequence[tuple[int, int]],
    seed: int,
    offset: int,
    p: float = 0.0,
) -> None:
    """See `hp_kernels.philox.fill_random`."""
    starts, stops = [low for low, _ in box], [high for _, high in box]
    with island_errors():
        torch.ops.hp_kernels.philox_fill(out, kind, global_shape, starts, stops, _signed(seed), _signed(offset), p)


def _fill(
    out: torch.Tensor,
    kind: str,
    global_shape: Sequence[int],
    starts: Sequence[int],
    stops: Sequence[int],
    seed: int,
    offset: int,
    p: float,
) -> None:
    if len(starts) != len(stops):
        raise KernelArgumentError(f"philox_fill: {len(starts)} starts for {len(stops)} stops.")
    box = list(zip(starts, stops, strict=True))
    _check(out, kind, global_shape, box, p)
    parameters = (p,) if kind == "keep" else ()
    if on_cpu(out) and native() is not None:
        philox_fill(kind, array_of(out), global_shape, box, seed, offset, *parameters)
        return
    flat = out.view(-1)
    for first in range(0, flat.numel(), _PIECE):
        last = min(first + _PIECE, flat.numel())
        words = _words(_global_indices(global_shape, box, first, last, out.device), seed, offset)
        flat[first:last] = _values(words, kind, out.dtype, p)


torch.library.impl("hp_kernels::philox_fill", "CompositeExplicitAutograd", _fill)


@torch.library.register_fake("hp_kernels::philox_fill")  # type: ignore[untyped-decorator]
def _fill_fake(out: torch.Tensor, *_: Any) -> None:
    return None


def _check(out: torch.Tensor, kind: str, global_shape: Sequence[int], box: Sequence[tuple[int, int]], p: float) -> None:
    if kind not in FILLS:
        raise KernelArgumentError(f"philox_fill: kind is one of {', '.join(FILLS)}, not {kind!r}.")
    allowed = (torch.uint8, torch.bool) if kind == "keep" else floating_types
    if out.dtype not in allowed:
        raise KernelArgumentError(f"philox_fill: {kind} goes into {', '.join(map(str, allowed))}, not {out.dtype}.")
    require_dense("philox_fill", out)
    if len(global_shape) != len(box) or any(
        not 0 <= low <= high <= size for size, (low, high) in zip(global_shape, box, strict=False)
    ):
        raise KernelArgumentError(
            f"philox_fill: the box {list(box)} is no part of a tensor of the shape {list(global_shape)}."
        )
    numel = prod(high - low for low, high in box)
    if prod(global_shape) >= 1 << 63:
        raise KernelArgumentError(f"philox_fill: the shape {list(global_shape)} has more elements than 63 bits count.")
    if out.numel() != numel:
        raise KernelArgumentError(f"philox_fill: out has {out.numel()} elements, the box {numel}.")
    if kind == "keep" and not 0.0 <= p <= 1.0:
        raise KernelArgumentError(f"philox_fill: p={p} is not a probability.")


# -- the twin -------------------------------------------------------------------------------------------------------


def _global_indices(
    shape: Sequence[int], box: Sequence[tuple[int, int]], first: int, last: int, device: torch.device
) -> torch.Tensor:
    """Row-major indices, in the global tensor, of the elements [first, last) of the box."""
    rest = torch.arange(first, last, dtype=torch.int64, device=device)
    index, stride = torch.zeros_like(rest), 1
    for size, (low, high) in zip(reversed(shape), reversed(box), strict=True):
        index += (rest % (high - low) + low) * stride
        rest //= high - low
        stride *= size
    return index


def _words(index: torch.Tensor, seed: int, offset: int) -> list[torch.Tensor]:
    """Ten rounds of Philox4x32 in int64 arithmetic: four words for each index."""
    key0, key1 = seed & _WORD, (seed >> 32) & _WORD
    words = [
        index & _WORD,
        (index >> 32) & _WORD,
        torch.full_like(index, offset & _WORD),
        torch.full_like(index, (offset >> 32) & _WORD),
    ]
    for _ in range(10):
        high0, low0 = _product(words[0], 0xD2511F53)
        high1, low1 = _product(words[2], 0xCD9E8D57)
        words = [high1 ^ words[1] ^ key0, low1, high0 ^ words[3] ^ key1, low0]
        key0, key1 = (key0 + 0x9E3779B9) & _WORD, (key1 + 0xBB67AE85) & _WORD
    return words


def _product(word: torch.Tensor, multiplier: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low word of a product of 64 bits, which may be negative as int64."""
    product = word * _signed(multiplier)
    return (product >> 32) & _WORD, product & _WORD


def _values(words: list[torch.Tensor], kind: str, dtype: torch.dtype, p: float) -> torch.Tensor:
    if kind == "normal":
        numbers = _normal(words)
        return numbers.to(torch.float32).to(dtype) if dtype in (torch.float16, torch.bfloat16) else numbers.to(dtype)
    bits = 24 if kind == "keep" else _BITS[dtype]
    top = words[0] >> (32 - bits) if bits <= 32 else _top_53(words[0], words[1])
    numbers = top.to(torch.float64) * 2.0**-bits
    return numbers >= torch.tensor(p, dtype=torch.float32).item() if kind == "keep" else numbers.to(dtype)


def _normal(words: list[torch.Tensor]) -> torch.Tensor:
    """Box-Muller in float64, of the operations that are rounded alike everywhere, in the format's order."""
    n = _top_53(words[0], words[1]) + 1
    exponent = torch.zeros_like(n)
    for step in (32, 16, 8, 4, 2, 1):
        shift = (n < (1 << (53 - step))).to(torch.int64) * step
        n = n << shift
        exponent += shift
    m = n.to(torch.float64) * 2.0**-52
    s = (2.0 - m) / (2.0 + m)
    twice_log = 2.0 * (exponent.to(torch.float64) * _LN2 + s * _polynomial(_ATANH, s * s))
    t = (_top_53(words[2], words[3]) - (1 << 52)).to(torch.float64).abs() * 2.0**-51 - 1.0
    return _rounded_sqrt(twice_log) * (t * _polynomial(_SINE, t * t))


def _top_53(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return (first << 21) ^ (second >> 11)


def _polynomial(coefficients: Sequence[float], y: torch.Tensor) -> torch.Tensor:
    result = coefficients[-1] * y + coefficients[-2]
    for coefficient in reversed(coefficients[:-2]):
        result = result * y + coefficient
    return result


def _rounded_sqrt(x: torch.Tensor) -> torch.Tensor:
    """The square root to nearest: torch's own misses it at times, which a step with the exact residual mends (Markstein 1990)."""
    root = x.sqrt()
    scaled = root * (2.0**27 + 1.0)
    high = scaled - (scaled - root)
    low = root - high
    square = root * root
    rest = ((high * high - square) + 2.0 * (high * low)) + low * low
    return root + ((x - square) - rest) / (2.0 * root + 1e-300)


def _signed(value: int) -> int:
    """The same 64 bits as the schema's signed integer."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value
