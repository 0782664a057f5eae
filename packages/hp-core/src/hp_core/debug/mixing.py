"""Hashes of the bits of tensors that add up: those of two pieces are the sum of the pieces' hashes.

Each element is hashed with its index in the global tensor, and the hashes are added modulo 2^64. So the hash of a global
tensor is that of its shards added up, however it was cut, and one number for each shard is all that ranks must exchange.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from hp_core.geometry import Box, box_numel, box_pieces, contiguous_strides
from hp_core.platform import get_platform
from hp_core.platform.protocol import Tensor

__all__ = ["hash_of_bits", "hash_of_text", "mixed", "signed", "wrapped"]

_MODULUS = 1 << 64
_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_PIECE = {"cpu": 1 << 15}
"""Elements worked on at a time: on a CPU what is needed for them stays in the cache."""
_LARGE_PIECE = 1 << 22


def wrapped(number: int) -> int:
    """The number modulo 2^64."""
    return number % _MODULUS


def signed(number: int) -> int:
    """The number modulo 2^64 as an int64 has it."""
    number %= _MODULUS
    return number - _MODULUS if number >= _MODULUS >> 1 else number


def mixed(number: int) -> int:
    """A 64-bit number that each bit of the given one has a say in; no two give the same.

    This is the output function of SplitMix64 with Stafford's variant 13 (Steele, Lea and Flood, "Fast splittable pseudorandom
    number generators", OOPSLA 2014).
    """
    number %= _MODULUS
    number = (number ^ (number >> 30)) * _FACTORS[0] % _MODULUS
    number = (number ^ (number >> 27)) * _FACTORS[1] % _MODULUS
    return number ^ (number >> 31)


def hash_of_text(text: str) -> int:
    """A 64-bit number of a text, equal in all processes and versions."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def hash_of_bits(tensor: Tensor, boxes: Iterable[Box], shape: tuple[int, ...]) -> int:
    """The sum, modulo 2^64, of a hash for each element: of its bits and its row-major index in the global tensor.

    An element that changes always changes the sum; several do but for a chance of 2^-64. Zeros of either sign differ, and so do
    NaNs of different bits. That makes it a check against faults, not against forgers.

    Args:
        tensor: the local tensor, on any device.
        boxes: what of the global tensor it holds, in the order in which it does.
        shape: global shape.
    """
    tensors = get_platform().tensors
    bits, words = tensors.bit_patterns(tensor)
    most = _PIECE.get(tensors.device_type_of(bits), _LARGE_PIECE)
    start, total = 0, 0
    for box in (piece for whole in boxes for piece in box_pieces(whole, most)):
        index = _indices(box, shape, bits)
        stop = start + box_numel(box)
        for word in range(words):
            mine = bits[start * words + word : stop * words : words]
            total += int(_mixed_sum(mine, index * words + word))
        start = stop
    return total % _MODULUS


def _mixed_sum(bits: Any, index: Any) -> Any:
    """The sum of `mixed(bits + golden ratio * (index + 1))`, of integers up to 64 bits and of int64, whose arithmetic wraps.

    Within a tensor two elements of up to 32 bits never meet in the sum that is mixed: multiples of the golden ratio up to 2^31
    are further apart than that.
    """
    z = index + 1
    z *= signed(_GOLDEN)
    z += bits
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        z ^= (z >> shift) & ((1 << (64 - shift)) - 1)
        z *= signed(factor)
    z ^= (z >> 31) & ((1 << 33) - 1)
    return z.sum()


def _indices(box: Box, shape: tuple[int, ...], like: Tensor) -> Any:
    """Row-major index in the global tensor of each element of a box, `[elements]`, as a tensor of its own."""
    tensors = get_platform().tensors
    # Where only one row of a dim is held, it is a number to add: what remains often is a single run.
    strides = contiguous_strides(shape)
    first = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
    index: Any = None
    for (start, stop), stride in zip(box, strides, strict=True):
        if stop - start > 1:
            steps = tensors.arange(0, stop - start, like) * stride
            index = steps if index is None else index[..., None] + steps
    index = tensors.arange(0, 1, like) if index is None else index
    return tensors.reshape(index, (-1,)) + first
