"""The state of the generator, and local tensors filled with their part of a global random tensor."""

from __future__ import annotations

from hp_core.errors import LayoutError
from hp_core.layout import Layout
from hp_core.platform import get_platform
from hp_core.platform.protocol import Tensor
from hp_core.random.philox import UNIFORM_BITS, global_indices, normal_from_words, philox_words, uniform_from_words

__all__ = ["manual_seed", "next_offset", "random_like"]

_PIECE = 1 << 15
"""Elements worked on at a time: what Philox needs for them stays in a CPU's cache."""

_state = {"seed": 0, "offset": 0}


def manual_seed(seed: int) -> None:
    """Start the stream of random tensors anew; call it alike on all ranks.

    Args:
        seed: its low 64 bits count. Before the first call the seed is 0.
    """
    _state["seed"], _state["offset"] = int(seed), 0


def next_offset() -> tuple[int, int]:
    """Seed and offset of the next random call."""
    offset = _state["offset"]
    _state["offset"] = offset + 1
    return _state["seed"], offset


def random_like(empty: Tensor, layout: Layout, global_shape: tuple[int, ...], kind: str) -> Tensor:
    """Fill a local tensor with its part of a global random tensor, and take the next offset.

    Args:
        empty: dense local tensor of the layout's local shape; written to.
        layout: how the global tensor lies; pending reductions count as replicated.
        global_shape: its shape.
        kind: "uniform" in [0, 1), or "normal" with mean 0 and variance 1.

    Raises:
        LayoutError: the element type isn't floating point.
    """
    tensors = get_platform().tensors
    name = tensors.dtype_name(tensors.dtype(empty))
    if name not in UNIFORM_BITS:
        raise LayoutError(f"random tensors are floating point ({', '.join(UNIFORM_BITS)}), not {name}.")
    seed, offset = next_offset()
    index = global_indices(
        layout.bounds(global_shape), global_shape, lambda start, stop: tensors.arange(start, stop, empty)
    )
    flat_index, flat = tensors.reshape(index, (-1,)), tensors.reshape(empty, (-1,))
    count = tensors.shape(flat)[0]
    for start in range(0, count, _PIECE):
        words = philox_words(flat_index[start : start + _PIECE], seed, offset)
        if kind == "uniform":
            values = uniform_from_words(words, name, tensors)
        else:
            values = normal_from_words(words, tensors)
            if name in ("float16", "bfloat16"):
                values = tensors.cast(values, tensors.dtype_of_name("float32"))
        flat[start : start + _PIECE] = values
    return empty
