"""What the layers above do to local buffers themselves, on Ascend: views of tensors, which may be written to there.

Not verified on hardware: MindSpore's CPU back end has no such views, so a CPU can only check shapes and calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from mindspore import mint

from hp_core.geometry import Box
from hp_core.platform.mindspore.arrays import as_array, as_tensor
from hp_core.platform.mindspore.tensors import HostTensorTools

__all__ = ["DeviceTensorTools"]


class DeviceTensorTools(HostTensorTools):
    """See `hp_core.platform.protocol.TensorTools`. Integers and what draws random numbers stay on the host."""

    def full(self, shape: Sequence[int], value: Any, dtype: Any, device_type: str | None) -> Any:
        """Filled with one value, or uninitialised."""
        return super().full(shape, value, dtype, None)

    def empty(self, shape: Sequence[int], like: Any) -> Any:
        """Uninitialised, of the dtype of `like`."""
        return mint.empty(tuple(shape), dtype=self.dtype(like))

    def zeros(self, shape: Sequence[int], like: Any) -> Any:
        """Zeros, of the dtype of `like`."""
        return mint.zeros(tuple(shape), dtype=self.dtype(like))

    def cast(self, tensor: Any, dtype: Any) -> Any:
        """The same values as another element type."""
        return as_tensor(tensor).astype(dtype)

    def contiguous(self, tensor: Any) -> Any:
        """Dense and row-major."""
        return as_tensor(tensor).contiguous()

    def clone(self, tensor: Any) -> Any:
        """A dense row-major copy."""
        return mint.clone(as_tensor(tensor).contiguous())

    def reshape(self, tensor: Any, shape: Sequence[int]) -> Any:
        """A view if possible."""
        return tensor.reshape(tuple(shape))

    def movedim(self, tensor: Any, source: int, destination: int) -> Any:
        """A view with one dim moved."""
        order = [dim for dim in range(tensor.ndim) if dim != source]
        order.insert(destination, source)
        return mint.permute(tensor, tuple(order))

    def narrow(self, tensor: Any, dim: int, start: int, length: int) -> Any:
        """The view of an interval of one dim."""
        return mint.narrow(tensor, dim, start, length)

    def crop(self, tensor: Any, box: Box) -> Any:
        """The view of a box."""
        for dim, (start, stop) in enumerate(box):
            if stop - start != tensor.shape[dim]:
                tensor = self.narrow(tensor, dim, start, stop - start)
        return tensor

    def beginning(self, tensor: Any, shape: Sequence[int]) -> Any:
        """The first elements of a dense tensor, on the same storage."""
        return self.narrow(tensor.reshape(-1), 0, 0, prod(shape)).reshape(tuple(shape))

    def paste(self, target: Any, box: Box, source: Any) -> None:
        """Copy into a box of `target`."""
        self.crop(target, box).copy_(as_tensor(source))

    def scale_(self, tensor: Any, factor: float) -> Any:
        """Multiply in place."""
        return tensor.mul_(factor)

    def device_type_of(self, tensor: Any) -> str:
        """The type of its device."""
        return "meta" if self.is_meta(tensor) else "npu"

    def tie_count(self, tensor: Any, value: Any) -> tuple[Any, Any]:
        """Where `tensor` equals `value`, as numbers, and a copy to be summed over ranks."""
        mask = (as_tensor(tensor) == as_tensor(value)).astype(tensor.dtype)
        return mask, mint.clone(mask)

    def to_ints(self, tensor: Any) -> list[int]:
        """The values of a 1-D integer tensor."""
        return as_array(tensor).tolist()  # type: ignore[no-any-return]
