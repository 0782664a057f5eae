"""Mistakes in the arguments of a call: wrong memory, shapes, element types, numbers, or things of another kind altogether.

What an array says it holds is always true: the kernels take the owner's word for that. Everything else may be wrong.
"""

from __future__ import annotations

import ctypes
import random
from dataclasses import replace

from blocks import Array, Nonsense

__all__ = ["make_mistake"]

_NUMBERS = (-1, 0, 1, 2, 7, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63), 1 << 63, 1 << 70, -(1 << 70))
_THINGS = (None, -1, 3.5, "text", b"bytes", (), [], (1, 2), {}, object())


def make_mistake(source: random.Random, arguments: list[object]) -> None:
    """Change one argument, or something inside of it, in place; may by chance leave the call right."""
    if not arguments:
        return
    index = source.randrange(len(arguments))
    chosen = arguments[index]
    if source.random() < 0.1:
        arguments[index] = source.choice(_THINGS)
    elif isinstance(chosen, Array):
        arguments[index] = _wrong_array(source, chosen, [a for a in _all(arguments) if a is not chosen])
    elif isinstance(chosen, list | tuple) and chosen:
        inner = list(chosen)
        make_mistake(source, inner)
        arguments[index] = inner if source.random() < 0.9 else inner[: source.randint(0, len(inner))]
    elif isinstance(chosen, Nonsense):
        return
    elif isinstance(chosen, float):
        arguments[index] = source.choice((-1.0, 2.0, float("nan"), float("inf")))
    elif source.random() < 0.1:
        del arguments[index]
    else:
        arguments[index] = source.choice(_NUMBERS)


def _wrong_array(source: random.Random, array: Array, others: list[Array]) -> object:
    """The array with a mistake; memory of another array counts as one."""
    kind = source.randrange(8)
    if kind == 0:
        return replace(array, code=source.choice((*range(8), -1, 99, 1 << 40)))
    if kind == 1:
        shape = list(array.shape)
        if shape:
            shape[source.randrange(len(shape))] = source.choice(_NUMBERS)
        return replace(array, shape=tuple(shape))
    if kind == 2:
        shape = list(array.shape)
        source.shuffle(shape)
        return replace(array, shape=tuple(shape[: source.randint(0, len(shape))]) + (1,) * source.randint(0, 70))
    if kind == 3:
        return replace(array, address=source.choice((0, array.address)), held=source.choice((0, -1, array.held)))
    if kind == 4 and array.held > 0:
        return array.moved(source.randint(0, array.held))
    if kind == 5 and others:
        # Overlap: the same element type and shape where the other block is long enough, or what is left of it.
        other = source.choice(others)
        return replace(array, address=other.address, held=other.held)
    if kind == 6 and array.address and array.held > 0:
        # Numbers of rows and experts, and whatever else is read.
        ctypes.memmove(
            array.address,
            source.choice((source.randbytes(array.held), b"\xff" * array.held, bytes(array.held))),
            array.held,
        )
        return array
    told = list(array.told())
    told[source.randrange(4)] = source.choice((*_THINGS, *_NUMBERS[8:]))
    if told[0] != array.address or told[1] != array.held:
        # A lie about memory, unless it can't be one.
        told[1] = source.choice((None, 0, -1, "text"))
    return Nonsense(tuple(told[: source.choice((3, 4, 4, 4))]))


def _all(arguments: object) -> list[Array]:
    if isinstance(arguments, Array):
        return [arguments]
    if isinstance(arguments, list | tuple):
        return [array for inner in arguments for array in _all(inner)]
    return []
