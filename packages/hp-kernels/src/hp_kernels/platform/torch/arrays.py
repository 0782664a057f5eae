"""What torch's tensors are to the kernels: which ones these may touch, and how their memory is named."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from hp_kernels.errors import KernelArgumentError
from hp_kernels.memory import Array, array

__all__ = ["array_of", "floating_types", "island_errors", "on_cpu", "require_dense", "require_one_device", "spans_of"]

floating_types = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""What the kernels compute with, and convert between."""

_NAMES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint8: "uint8",
    torch.bool: "bool",
}


def array_of(tensor: torch.Tensor) -> Array:
    """Name the memory of a dense tensor on the CPU."""
    held = int(tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.itemsize)
    return array(tensor.data_ptr(), held, _NAMES.get(tensor.dtype, str(tensor.dtype)), tensor.shape)


@contextmanager
def island_errors() -> Iterator[None]:
    """What the C++ island throws is a RuntimeError with a mark: give it the class that the Python ops raise."""
    try:
        yield
    except RuntimeError as error:
        _, mark, message = str(error).partition("hp_kernels: ")
        if not mark:
            raise
        raise KernelArgumentError(message.splitlines()[0]) from None


def on_cpu(tensor: torch.Tensor) -> bool:
    """Whether the native kernels reach it."""
    return tensor.device.type == "cpu"


def require_dense(name: str, *tensors: torch.Tensor) -> None:
    """Refuse what isn't one dense row-major block of memory.

    Raises:
        KernelArgumentError: a tensor is sparse, or not contiguous.
    """
    for tensor in tensors:
        if tensor.layout is not torch.strided or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            raise KernelArgumentError(
                f"{name}: a tensor of shape {list(tensor.shape)} and strides {list(tensor.stride())} isn't dense and row-major; "
                f"call .contiguous() first."
            )


def require_one_device(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse tensors of several devices.

    Raises:
        KernelArgumentError: naming the devices.
    """
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise KernelArgumentError(
            f"{name}: all tensors must be on one device, not on {sorted(str(device) for device in devices)}."
        )


def spans_of(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """First byte and end of each tensor that has elements, by storage and place; only for tensors with storage."""
    return [
        (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.itemsize)
        for tensor in tensors
        if tensor.numel()
    ]
