"""MindSpore's CPU tensors as NumPy arrays, and back, on the same memory.

MindSpore's CPU back end has no writable views, no in-place arithmetic, and no kernel for many ops. So what the layers
above do to local buffers (cutting, pasting, sending, filling) is done by NumPy here, on memory that the tensors share.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindspore.common import np_dtype

from hp_core.errors import PlatformError

__all__ = ["array_dtype", "as_array", "as_tensor", "framework_dtype", "writable_array"]

Array = np.ndarray[Any, Any]

_from_numpy = Tensor.from_numpy
_NAMES = (
    "float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "complex64",
    "complex128",
)  # fmt: skip
_ARRAY_DTYPES: dict[Any, np.dtype[Any]] = {getattr(ms, name): np.dtype(name) for name in _NAMES}
_ARRAY_DTYPES |= {ms.bool_: np.dtype(np.bool_), ms.bfloat16: np.dtype(np_dtype.bfloat16)}
_FRAMEWORK_DTYPES: dict[np.dtype[Any], Any] = {array: dtype for dtype, array in _ARRAY_DTYPES.items()}


def as_array(tensor: Any) -> Array:
    """The values of a tensor for reading: its own memory if it is dense, else a copy. Waits for ops that still run."""
    if isinstance(tensor, (np.ndarray, np.generic)):  # NumPy makes numbers of arrays without dims
        return np.asarray(tensor)
    array: Array = tensor.asnumpy()
    return array


def writable_array(tensor: Any) -> Array:
    """The memory of a tensor, for writing to it.

    Raises:
        PlatformError: the tensor is a view of another: MindSpore hands out a copy of those on CPU.
    """
    if type(tensor) is np.ndarray:
        return tensor
    array: Array = tensor.asnumpy()
    if array.size and not np.may_share_memory(array, tensor.asnumpy()):
        raise PlatformError(
            f"a tensor of shape {tuple(tensor.shape)} that is a view of another can't be written to on MindSpore's CPU back end; "
            f"write to the tensor that it is a view of, or to a copy."
        )
    return array


def as_tensor(buffer: Any) -> Any:
    """A tensor on the memory of an array; tensors come back as they are."""
    if type(buffer) is not np.ndarray:
        if not isinstance(buffer, np.generic):
            return buffer
        buffer = np.asarray(buffer)
    return _from_numpy(buffer if buffer.flags.c_contiguous else np.ascontiguousarray(buffer))


def array_dtype(dtype: Any) -> np.dtype[Any]:
    """NumPy's element type for MindSpore's."""
    return _ARRAY_DTYPES[dtype]


def framework_dtype(dtype: np.dtype[Any]) -> Any:
    """MindSpore's element type for NumPy's."""
    return _FRAMEWORK_DTYPES[dtype]
