"""The few things that layers above do to tensors themselves, on torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hp_core.errors import PlatformError
from hp_core.geometry import Box, contiguous_strides
from hp_core.platform.foreign import refuse_foreign

__all__ = ["TorchTensorTools"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TorchTensorTools:
    """See `hp_core.platform.protocol.TensorTools`."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type

    def is_tensor(self, value: object) -> bool:
        """Whether it is a torch tensor."""
        return isinstance(value, torch.Tensor)

    def shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Its `torch.Size`.

        Raises:
            PlatformError: it is another framework's tensor, or none.
        """
        if not isinstance(tensor, torch.Tensor):
            refuse_foreign(tensor, "torch.Tensor")
        return tensor.shape

    def as_shape(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The sizes as a `torch.Size`."""
        return torch.Size(sizes)

    def dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """Its element type."""
        return tensor.dtype

    def itemsize(self, dtype: torch.dtype) -> int:
        """Bytes per element."""
        return dtype.itemsize

    def is_floating(self, dtype: torch.dtype) -> bool:
        """Whether the element type is floating point or complex."""
        return dtype.is_floating_point or dtype.is_complex

    def dtype_name(self, dtype: torch.dtype) -> str:
        """Its name: "float32", "int64", ..."""
        return str(dtype).removeprefix("torch.")

    def dtype_of_name(self, name: str) -> torch.dtype:
        """The element type called so."""
        return getattr(torch, name)  # type: ignore[no-any-return]

    def arange(self, start: int, stop: int, like: torch.Tensor) -> torch.Tensor:
        """The int64 numbers start, ..., stop - 1."""
        return torch.arange(start, stop, dtype=torch.int64, device=like.device)

    def from_ints(self, values: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """A 1-D int64 tensor."""
        return torch.tensor(values, dtype=torch.int64, device=like.device)

    def to_ints(self, tensor: torch.Tensor) -> list[int]:
        """The values of a 1-D integer tensor."""
        return tensor.tolist()

    def to_float64(self, tensor: torch.Tensor) -> torch.Tensor:
        """Integers as float64."""
        return tensor.to(torch.float64)

    def sqrt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Square roots."""
        return tensor.sqrt()

    def full(
        self, shape: Sequence[int], value: Any, dtype: torch.dtype | None, device_type: str | None
    ) -> torch.Tensor:
        """Filled with one value, or uninitialised; inside a `torch.device` context, on that context's device."""
        context = torch.get_default_device()
        device = context if context.type == "meta" else torch.device(device_type or self.device_type)
        if value is None:
            return torch.empty(shape, dtype=dtype, device=device)
        if dtype is None and type(value) is int:
            dtype = torch.get_default_dtype()
        return torch.full(shape, value, dtype=dtype, device=device)

    def empty(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Uninitialised, of the dtype and on the device of `like`."""
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    def zeros(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Zeros, of the dtype and on the device of `like`."""
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The same values as another element type."""
        return tensor.to(dtype)

    def contiguous(self, tensor: torch.Tensor) -> torch.Tensor:
        """Dense and row-major."""
        return tensor.contiguous()

    def clone(self, tensor: torch.Tensor) -> torch.Tensor:
        """A dense row-major copy."""
        return tensor.clone(memory_format=torch.contiguous_format)

    def reshape(self, tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """A view if possible."""
        return tensor.reshape(shape)

    def movedim(self, tensor: torch.Tensor, source: int, destination: int) -> torch.Tensor:
        """A view with one dim moved."""
        return tensor.movedim(source, destination)

    def narrow(self, tensor: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
        """The view of an interval of one dim."""
        return tensor.narrow(dim, start, length)

    def crop(self, tensor: torch.Tensor, box: Box) -> torch.Tensor:
        """The view of a box."""
        for dim, (start, stop) in enumerate(box):
            if stop - start != tensor.shape[dim]:
                tensor = tensor.narrow(dim, start, stop - start)
        return tensor

    def beginning(self, tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """The first elements of a dense tensor, on the same storage, but no view."""
        return tensor.new_empty(0).set_(tensor.untyped_storage(), 0, tuple(shape), contiguous_strides(shape))

    def paste(self, target: torch.Tensor, box: Box, source: torch.Tensor) -> None:
        """Copy into a box of `target`."""
        self.crop(target, box).copy_(source)

    def scale_(self, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        """Multiply in place."""
        return tensor.mul_(factor)

    def device_type_of(self, tensor: torch.Tensor) -> str:
        """The type of its device."""
        return tensor.device.type

    def is_meta(self, tensor: torch.Tensor) -> bool:
        """Whether it has no storage."""
        return tensor.is_meta

    def bit_patterns(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Its bits as integers.

        Raises:
            PlatformError: it is sparse or quantized, or has no storage.
        """
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            what = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}, dtype {tensor.dtype}"
            raise PlatformError(f"a tensor {what} has no dense storage whose bits could be read.")
        flat = tensor.detach()
        if flat.device.type not in ("cpu", "cuda"):
            flat = flat.cpu()  # whether int64 arithmetic wraps elsewhere isn't known
        flat = flat.resolve_conj().resolve_neg().contiguous().view(-1)
        words = max(1, flat.dtype.itemsize // 8)
        return flat.view(_SIGNED[flat.dtype.itemsize // words]), words

    def memory(self, tensor: torch.Tensor) -> tuple[int, int, str] | None:
        """Of a plain dense tensor on the CPU; not of those that trace or transform."""
        if (
            type(tensor) not in _PLAIN
            or tensor.device.type != "cpu"
            or tensor.layout is not torch.strided
            or not tensor.is_contiguous()
            or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        ):
            return None
        held = int(tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.itemsize)
        return tensor.data_ptr(), held, self.dtype_name(tensor.dtype)

    def tie_count(self, tensor: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where `tensor` equals `value`, as numbers, and a copy to be summed over ranks."""
        mask = (tensor == value).to(tensor.dtype)
        return mask, mask.clone()
