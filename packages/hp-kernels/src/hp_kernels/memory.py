"""How arrays are named to `_native`: where they lie, how many bytes their owner holds from there, and what is in them."""

from __future__ import annotations

from collections.abc import Sequence

from hp_kernels.dtypes import DTYPE_CODES
from hp_kernels.errors import KernelArgumentError

__all__ = ["Array", "array"]

Array = tuple[int, int, int, tuple[int, ...]]
"""Address, bytes held from there on, code of the element type, shape; dense and row-major."""


def array(address: int, nbytes: int, dtype: str, shape: Sequence[int]) -> Array:
    """Name a dense row-major array in the host's memory, which the caller keeps alive for the length of the call.

    Args:
        address: of its first byte.
        nbytes: bytes that its owner holds from there on: the kernels refuse a shape that needs more.
        dtype: name of the element type; "bool" counts as "uint8".
        shape: its sizes.

    Raises:
        KernelArgumentError: no kernel takes this element type.
    """
    code = DTYPE_CODES.get("uint8" if dtype == "bool" else dtype)
    if code is None:
        raise KernelArgumentError(f"no kernel takes elements of {dtype}; they take {', '.join(DTYPE_CODES)} and bool.")
    return address, nbytes, code, tuple(shape)
