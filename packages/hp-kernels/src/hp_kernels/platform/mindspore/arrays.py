"""MindSpore's CPU tensors as memory that the kernels may touch: NumPy arrays on the tensors' own memory."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindspore.common import np_dtype

from hp_kernels.errors import KernelArgumentError
from hp_kernels.memory import Array, array

__all__ = ["array_of", "as_tensor", "empty", "memory_of", "name_of", "writable"]

Values = np.ndarray[Any, Any]

_NAMES = ("float32", "float64", "float16", "int32", "int64", "uint8")
_DTYPES: dict[Any, np.dtype[Any]] = {getattr(ms, name): np.dtype(name) for name in _NAMES}
_DTYPES |= {ms.bool_: np.dtype(np.bool_), ms.bfloat16: np.dtype(np_dtype.bfloat16)}


def name_of(dtype: Any) -> str:
    """The name of an element type."""
    return str(dtype).lower()


def empty(shape: tuple[int, ...], dtype: Any) -> Values:
    """An uninitialised array.

    Raises:
        KernelArgumentError: no kernel takes this element type.
    """
    if dtype not in _DTYPES:
        raise KernelArgumentError(f"no kernel takes elements of {dtype}.")
    return np.empty(shape, _DTYPES[dtype])


def memory_of(tensor: Tensor) -> Values:
    """The values of a tensor for reading, dense and row-major."""
    return np.ascontiguousarray(tensor.asnumpy()).reshape(tuple(tensor.shape))


def writable(tensor: Tensor) -> Values:
    """The memory of a tensor, for writing to it.

    Raises:
        KernelArgumentError: it isn't dense, or is a view of another tensor: MindSpore hands out copies of those on the CPU.
    """
    values: Values = tensor.asnumpy()
    if not values.flags.c_contiguous or (values.size and not np.may_share_memory(values, tensor.asnumpy())):
        raise KernelArgumentError(
            f"a tensor of shape {list(tensor.shape)} that is a view of another, or isn't dense, can't be written to; write to a "
            f"copy."
        )
    return values


def array_of(values: Values) -> Array:
    """Name the memory of an array to the native kernels."""
    return array(values.ctypes.data, values.nbytes, str(values.dtype), values.shape)


def as_tensor(values: Values) -> Tensor:
    """A tensor on the memory of an array."""
    return Tensor.from_numpy(values)
