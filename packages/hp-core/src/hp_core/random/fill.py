"""Local tensors filled with their part of a global random tensor."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from struct import pack, unpack
from typing import Any

from hp_core.errors import LayoutError
from hp_core.geometry import box_numel, box_pieces
from hp_core.kernels import philox_filler
from hp_core.layout import Layout
from hp_core.platform import get_platform
from hp_core.platform.protocol import Tensor
from hp_core.random.distributions import LEAST_EXPONENTIAL, cauchy, exponential, geometric, integers, log_normal
from hp_core.random.philox import (
    UNIFORM_BITS,
    Words,
    global_indices,
    normal_from_words,
    philox_words,
    uniform_from_words,
)
from hp_core.random.state import next_offset

__all__ = ["random_integers", "random_like", "random_mask"]

_PIECE = 1 << 15
"""Elements worked on at a time: what Philox needs for them stays in a CPU's cache."""

_DISTRIBUTIONS: dict[str, Callable[..., Tensor]] = {
    "normal": normal_from_words,
    "exponential": exponential,
    "cauchy": cauchy,
    "geometric": geometric,
    "log_normal": log_normal,
}
"""What makes float64 numbers of words, the platform's arithmetic, and the distribution's parameters."""


def random_like(empty: Tensor, layout: Layout, global_shape: tuple[int, ...], kind: str, *parameters: float) -> Tensor:
    """Fill a local tensor with its part of a global random tensor, and take the next offset.

    Args:
        empty: dense local tensor of the layout's local shape; written to.
        layout: how the global tensor lies; pending reductions count as replicated.
        global_shape: its shape.
        kind: "uniform" in [0, 1), "normal" with mean 0 and variance 1, "exponential" (rate), "cauchy" (median, sigma),
            "geometric" (p; also into integers), or "log_normal" (mean and deviation of the logarithm).
        *parameters: of the distribution.

    Raises:
        LayoutError: the element type isn't floating point.
    """
    tensors = get_platform().tensors
    name = tensors.dtype_name(tensors.dtype(empty))
    if name not in UNIFORM_BITS and kind != "geometric":
        raise LayoutError(f"random tensors are floating point ({', '.join(UNIFORM_BITS)}), not {name}.")
    if kind in ("uniform", "normal") and _fill_natively(empty, layout, global_shape, kind):
        return empty

    def values(words: Words) -> Tensor:
        if kind == "uniform":
            return uniform_from_words(words, name, tensors)
        drawn = _DISTRIBUTIONS[kind](words, tensors, *parameters)
        least = LEAST_EXPONENTIAL.get(name)
        if kind == "exponential" and least is not None:
            drawn = drawn + (drawn < least) * least
        # to nearest in two steps, as the format says
        return tensors.cast(drawn, tensors.dtype_of_name("float32")) if name in ("float16", "bfloat16") else drawn

    return _fill(empty, layout, global_shape, values)


def random_integers(empty: Tensor, layout: Layout, global_shape: tuple[int, ...], low: int, high: int) -> Tensor:
    """Fill a local tensor with its part of a global tensor of integers in [low, high), and take the next offset.

    Args:
        empty: dense local tensor of the layout's local shape, of any element type that holds the integers; written to.
        layout: how the global tensor lies; pending reductions count as replicated.
        global_shape: its shape.
        low: the least integer.
        high: one past the greatest.

    Raises:
        ShardingRuleError: the interval is empty, or too long.
    """
    return _fill(empty, layout, global_shape, lambda words: integers(words, low, high))


def random_mask(empty: Tensor, layout: Layout, global_shape: tuple[int, ...], p: float) -> Tensor:
    """Fill a local tensor of bools with its part of a global mask, and take the next offset.

    Args:
        empty: dense local tensor of the layout's local shape, of bools; written to.
        layout: how the global tensor lies; pending reductions count as replicated.
        global_shape: its shape.
        p: an element is false with this probability: where the uniform float32 number is less than p, rounded to float32.
    """
    if _fill_natively(empty, layout, global_shape, "keep", p):
        return empty
    [rounded] = unpack("f", pack("f", p))
    least = ceil(rounded * 2.0 ** UNIFORM_BITS["float32"])  # exact: the numbers are whole multiples of 2^-24
    return _fill(empty, layout, global_shape, lambda words: words[0] >> (32 - UNIFORM_BITS["float32"]) >= least)


def _fill_natively(empty: Tensor, layout: Layout, global_shape: tuple[int, ...], kind: str, *parameters: float) -> bool:
    """Let a native kernel do it, whose bits are the same; whether there is one that reaches the tensor."""
    fill = philox_filler()
    memory = None if fill is None else get_platform().tensors.memory(empty)
    if fill is None or memory is None:
        return False
    seed, offset = next_offset()
    fill(kind, memory, global_shape, layout.boxes(global_shape), seed, offset, parameters)
    return True


def _fill(empty: Tensor, layout: Layout, global_shape: tuple[int, ...], values: Callable[[Words], Any]) -> Tensor:
    tensors = get_platform().tensors
    seed, offset = next_offset()
    flat = tensors.reshape(empty, (-1,))
    start = 0
    for box in (piece for whole in layout.boxes(global_shape) for piece in box_pieces(whole, _PIECE)):
        index = global_indices(box, global_shape, lambda low, high: tensors.arange(low, high, empty))
        stop = start + box_numel(box)
        flat[start:stop] = values(philox_words(tensors.reshape(index, (-1,)), seed, offset))
        start = stop
    return empty
