"""Random calls of each native kernel that are right, as lists of arguments in which mistakes can then be made."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from blocks import Array, Blocks

__all__ = ["KERNELS", "Call"]

FLOATS = ("float32", "float64", "float16", "bfloat16")


@dataclass
class Call:
    """A call: the function of `_native` and its arguments, in which arrays (also inside of lists) are still `Array`s."""

    name: str
    arguments: list[object]


def philox(source: random.Random, blocks: Blocks) -> Call:
    """A box of a global tensor, filled."""
    shape = [source.choice((1, 2, 3, 7, 40, 1 << 15)) for _ in range(source.randint(0, 4))]
    box = []
    for size in shape:
        start = source.randint(0, size)
        box.append((start, min(size, start + source.randint(0, 9))))
    sizes = [end - start for start, end in box]
    kind = source.choice(("uniform", "normal", "keep"))
    out = blocks.array("uint8" if kind == "keep" else source.choice(FLOATS), *sizes)
    tail: list[object] = [source.choice((0.0, 0.1, 1.0))] if kind == "keep" else []
    return Call(f"philox_{kind}", [out, shape, box, source.getrandbits(64), source.getrandbits(64), *tail])


def pack(source: random.Random, blocks: Blocks) -> Call:
    """Arrays into a flat one, out of it, or into others."""
    arrays: list[object] = []
    offsets = []
    end = 0
    for _ in range(source.randint(0, 6)):
        shape = [source.randint(0, 5) for _ in range(source.randint(0, 3))]
        array = blocks.array(source.choice(FLOATS), *shape)
        arrays.append(array)
        end += source.choice((0, 0, 1, 3))
        offsets.append(end)
        end += _numel(array)
    name = source.choice(("pack", "unpack", "cast"))
    if name == "cast":
        others: list[object] = [
            blocks.array(source.choice(FLOATS), *array.shape) for array in arrays if isinstance(array, Array)
        ]
        return Call(name, [others, arrays])
    flat = blocks.array(source.choice(FLOATS), end + source.choice((0, 0, 2)))
    return Call(name, [flat, offsets, arrays] if name == "pack" else [arrays, flat, offsets])


def lse_merge(source: random.Random, blocks: Blocks) -> Call:
    """The merge of two partials, in place or not, or its gradient."""
    outer, middle, inner = (source.randint(0, 4) for _ in range(3))
    dim = source.choice((0, 1, 3, 16, 33))
    if source.random() < 0.05:
        outer, dim = 0, 1 << 62
    first, second = source.choice(
        [*((dtype, dtype) for dtype in FLOATS), ("float32", "float16"), ("float32", "bfloat16")]
    )
    wide = "float64" if first == "float64" else "float32"
    swapped = source.random() < 0.5
    rows = (outer, inner, middle) if swapped else (outer, middle, inner)

    def out(dtype: str) -> Array:
        return blocks.array(dtype, outer, middle, inner, dim)

    def lse() -> Array:
        return blocks.array(wide, *rows)

    partials: list[object] = [out(first), lse(), out(second), lse()]
    if source.random() < 0.5:
        given = lse() if source.random() < 0.5 else None
        return Call(
            "lse_merge_backward", [out(first), given, *partials, out(first), lse(), out(second), lse(), swapped]
        )
    results = partials[:2] if source.random() < 0.3 else [out(first), lse()]
    return Call("lse_merge", [*partials, *results, swapped])


def permute(source: random.Random, blocks: Blocks) -> Call:
    """Rows of experts found, filled, summed, or the gradient of the sum."""
    tokens, top_k, experts = source.randint(0, 5), source.randint(0, 4), source.randint(1, 5)
    dim = source.choice((0, 1, 3, 16, 33))
    if source.random() < 0.05:
        # Nothing at all, with one size beyond any memory.
        tokens, top_k, dim = source.choice(((1 << 62, 0, 0), (0, 1 << 62, 0), (0, 2, 1 << 62)))
    name = source.choice(("moe_sort", "moe_dispatch", "moe_combine", "moe_combine_backward"))
    slots = tokens * top_k
    if name == "moe_sort":
        chosen = [source.randrange(experts) for _ in range(slots)]
        arrays = [blocks.array(source.choice(("int32", "int64")), tokens, top_k, values=chosen)]
        shapes = ((tokens, top_k), (experts,), (experts + 1,))
        return Call(name, [*arrays, *(blocks.array("int64", *shape) for shape in shapes)])
    dtype = source.choice(FLOATS)
    weight = dtype if dtype == "float64" or source.random() < 0.5 else "float32"
    order = list(range(slots))
    source.shuffle(order)
    rows = blocks.array("int64", tokens, top_k, values=order)
    token_rows, permuted = blocks.array(dtype, tokens, dim), blocks.array(dtype, slots, dim)
    weights = blocks.array(weight, tokens, top_k)
    if name == "moe_dispatch":
        return Call(name, [token_rows, rows, permuted])
    if name == "moe_combine":
        return Call(name, [permuted, rows, weights if source.random() < 0.6 else None, token_rows])
    gradients = blocks.array(dtype, slots, dim), blocks.array(weight, tokens, top_k)
    return Call(name, [token_rows, permuted, rows, weights, *gradients])


KERNELS: dict[str, Callable[[random.Random, Blocks], Call]] = {
    "philox": philox,
    "pack": pack,
    "lse_merge": lse_merge,
    "permute": permute,
}
"""The kernels by name: what makes a random call of each."""


def _numel(array: Array) -> int:
    product = 1
    for size in array.shape:
        product *= size
    return product
