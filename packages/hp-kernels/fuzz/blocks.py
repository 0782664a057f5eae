"""Memory of exact size for calls of the native kernels, so that the address sanitizer sees the first byte too many.

Every block comes from malloc and goes back after the call; an `Array` says what a call is told about a block.
"""

from __future__ import annotations

import ctypes
import random
from dataclasses import dataclass, replace

from hp_kernels.dtypes import DTYPE_CODES, ITEM_SIZES

__all__ = ["Array", "Blocks", "Nonsense"]

_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]

Told = tuple[object, object, object, object]


@dataclass(frozen=True)
class Array:
    """An array in a block.

    Attributes:
        address: of its first element.
        held: bytes of the block from there on.
        code: of its element type.
        shape: its sizes.
    """

    address: int
    held: int
    code: int
    shape: tuple[int, ...]

    def told(self) -> Told:
        """As `_native` takes it."""
        return self.address, self.held, self.code, self.shape

    def moved(self, by: int) -> Array:
        """The same array some bytes further on in its block."""
        return replace(self, address=self.address + by, held=self.held - by)


@dataclass(frozen=True)
class Nonsense:
    """What is told in place of an array and describes none; left as it is by further mistakes, for they could make it a lie."""

    parts: tuple[object, ...]


class Blocks:
    """The blocks of one call."""

    def __init__(self, source: random.Random) -> None:
        self._source = source
        self._addresses: list[int] = []

    def array(self, dtype: str, *shape: int, values: list[int] | None = None) -> Array:
        """A new block that the array fills, of random bytes or of these integers."""
        numel = 1
        for size in shape:
            numel *= size
        held = numel * ITEM_SIZES[dtype]
        address = _libc.malloc(held)
        self._addresses.append(address)
        if values is None:
            content = self._source.randbytes(held)
        else:
            size = ITEM_SIZES[dtype]
            content = b"".join(value.to_bytes(size, "little", signed=True) for value in values)
        ctypes.memmove(address, content, held)
        return Array(address, held, DTYPE_CODES[dtype], shape)

    def free(self) -> None:
        """Give all blocks back."""
        for address in self._addresses:
            _libc.free(address)
