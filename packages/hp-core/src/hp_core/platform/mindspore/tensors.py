"""What the layers above do to local buffers themselves, on the CPU: NumPy on the tensors' own memory.

Every function takes tensors and arrays alike, and most give arrays: views that may be written to. They become tensors
again where they leave redistribution (`as_tensor`: on entering the graph, an op, or a DTensor).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint

from hp_core.errors import PlatformError
from hp_core.geometry import Box, box_shape
from hp_core.platform.foreign import refuse_foreign
from hp_core.platform.mindspore.arrays import (
    array_dtype,
    as_array,
    as_tensor,
    framework_dtype,
    writable_array,
)

__all__ = ["HostTensorTools"]

_FLOATING = frozenset({ms.float16, ms.bfloat16, ms.float32, ms.float64, ms.complex64, ms.complex128})


class HostTensorTools:
    """See `hp_core.platform.protocol.TensorTools`."""

    def is_tensor(self, value: object) -> bool:
        """Whether it is a MindSpore tensor."""
        return isinstance(value, Tensor)

    def shape(self, tensor: Any) -> tuple[int, ...]:
        """Its shape.

        Raises:
            PlatformError: it is another framework's tensor, or none.
        """
        if not isinstance(tensor, (Tensor, np.ndarray)):
            refuse_foreign(tensor, "mindspore.Tensor")
        return tensor.shape  # type: ignore[no-any-return]

    def as_shape(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The sizes as a tuple, which is MindSpore's own type."""
        return tuple(sizes)

    def dtype(self, tensor: Any) -> Any:
        """Its element type."""
        return framework_dtype(tensor.dtype) if type(tensor) is np.ndarray else tensor.dtype

    def itemsize(self, dtype: Any) -> int:
        """Bytes per element."""
        return array_dtype(dtype).itemsize

    def is_floating(self, dtype: Any) -> bool:
        """Whether the element type is floating point or complex."""
        return dtype in _FLOATING

    def dtype_name(self, dtype: Any) -> str:
        """Its name: "float32", "int64", ..."""
        return str(dtype).lower()

    def dtype_of_name(self, name: str) -> Any:
        """The element type called so."""
        return ms.bool_ if name == "bool" else getattr(ms, name)

    def arange(self, start: int, stop: int, like: Any) -> Any:
        """The int64 numbers start, ..., stop - 1."""
        return np.arange(start, stop, dtype=np.int64)

    def from_ints(self, values: Sequence[int], like: Any) -> Any:
        """A 1-D int64 tensor."""
        return as_tensor(np.array(values, dtype=np.int64))

    def to_ints(self, tensor: Any) -> list[int]:
        """The values of a 1-D integer tensor."""
        return as_array(tensor).tolist()  # type: ignore[no-any-return]

    def to_float64(self, tensor: Any) -> Any:
        """Integers as float64."""
        return as_array(tensor).astype(np.float64)

    def sqrt(self, tensor: Any) -> Any:
        """Square roots."""
        return np.sqrt(as_array(tensor))

    def full(self, shape: Sequence[int], value: Any, dtype: Any, device_type: str | None) -> Any:
        """Filled with one value, or uninitialised; float32 unless the value or `dtype` says otherwise."""
        if device_type not in (None, "cpu"):
            raise PlatformError(
                f"a tensor on {device_type!r} was asked for, but MindSpore runs on CPU here; call "
                f"mindspore.set_device({device_type!r}) first, or build the mesh for 'cpu'."
            )
        if dtype is None:
            dtype = ms.bool_ if isinstance(value, bool) else ms.float32
        if value is None:
            return as_tensor(np.empty(tuple(shape), array_dtype(dtype)))
        return as_tensor(np.full(tuple(shape), value, array_dtype(dtype)))

    def empty(self, shape: Sequence[int], like: Any) -> Any:
        """Uninitialised, of the dtype of `like`."""
        return np.empty(tuple(shape), array_dtype(self.dtype(like)))

    def zeros(self, shape: Sequence[int], like: Any) -> Any:
        """Zeros, of the dtype of `like`."""
        return np.zeros(tuple(shape), array_dtype(self.dtype(like)))

    def cast(self, tensor: Any, dtype: Any) -> Any:
        """The same values as another element type."""
        return as_array(tensor).astype(array_dtype(dtype), copy=False)

    def contiguous(self, tensor: Any) -> Any:
        """Dense and row-major."""
        array = as_array(tensor)
        return array if array.flags.c_contiguous else array.copy()

    def clone(self, tensor: Any) -> Any:
        """A dense row-major copy."""
        return tensor if self.is_meta(tensor) else as_array(tensor).copy()

    def reshape(self, tensor: Any, shape: Sequence[int]) -> Any:
        """A view if possible."""
        return as_array(tensor).reshape(tuple(shape))

    def movedim(self, tensor: Any, source: int, destination: int) -> Any:
        """A view with one dim moved."""
        return np.moveaxis(as_array(tensor), source, destination)

    def narrow(self, tensor: Any, dim: int, start: int, length: int) -> Any:
        """The view of an interval of one dim."""
        return as_array(tensor)[(slice(None),) * dim + (slice(start, start + length),)]

    def crop(self, tensor: Any, box: Box) -> Any:
        """The view of a box."""
        if self.is_meta(tensor):
            return mint.empty(box_shape(box), dtype=tensor.dtype, device="meta")
        return as_array(tensor)[_slices(box)]

    def beginning(self, tensor: Any, shape: Sequence[int]) -> Any:
        """The first elements of a dense tensor, on the same storage."""
        return as_array(tensor).reshape(-1)[: prod(shape)].reshape(tuple(shape))

    def paste(self, target: Any, box: Box, source: Any) -> None:
        """Copy into a box of `target`."""
        writable_array(target)[_slices(box)] = as_array(source)

    def scale_(self, tensor: Any, factor: float) -> Any:
        """Multiply in place."""
        array = writable_array(tensor)
        np.multiply(array, np.asarray(factor, array.dtype), out=array)
        return tensor

    def device_type_of(self, tensor: Any) -> str:
        """The type of its device."""
        return "meta" if self.is_meta(tensor) else "cpu"

    def is_meta(self, tensor: Any) -> bool:
        """Whether it has no storage."""
        return getattr(tensor, "is_meta", False) is True

    def bit_patterns(self, tensor: Any) -> tuple[Any, int]:
        """Its bits as integers, on the host.

        Raises:
            PlatformError: it has no storage.
        """
        if self.is_meta(tensor):
            raise PlatformError("a tensor on the meta device has no dense storage whose bits could be read.")
        flat = np.ascontiguousarray(as_array(tensor)).reshape(-1)
        words = max(1, flat.itemsize // 8)
        return flat.view(np.dtype(f"i{flat.itemsize // words}")), words

    def memory(self, tensor: Any) -> tuple[int, int, str] | None:
        """Of an array, or of a tensor that owns its memory."""
        if self.is_meta(tensor):
            return None
        array = writable_array(tensor)
        if not array.flags.c_contiguous or not array.flags.writeable:
            return None
        return array.ctypes.data, array.nbytes, self.dtype_name(self.dtype(tensor))

    def tie_count(self, tensor: Any, value: Any) -> tuple[Any, Any]:
        """Where `tensor` equals `value`, as numbers, and a copy to be summed over ranks."""
        array = as_array(tensor)
        mask = (array == as_array(value)).astype(array.dtype)
        return mask, mask.copy()


def _slices(box: Box) -> tuple[Any, ...]:
    """The index of a box; it ends in an ellipsis, so that even a box without dims gives a view and no number."""
    return (*(slice(start, stop) for start, stop in box), ...)
