"""Many tensors into one flat buffer and back, in one call, converting the element type: to nearest even, NaN to NaN.

For fused communication and for swapping many small tensors. The work is in `platform/`, whose kind the tensors decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from hp_kernels.errors import KernelArgumentError
from hp_kernels.frameworks import platform_module

__all__ = ["cast_into", "pack", "pack_into", "unpack", "unpack_into"]

TensorT = TypeVar("TensorT")


def pack(tensors: Sequence[TensorT], dtype: Any) -> TensorT:
    """Lay tensors end to end in a new flat one.

    Args:
        tensors: of any shapes and floating-point types (or all of `dtype`), on one device; at least one.
        dtype: element type of the result; values are rounded to nearest even, a double to a 16-bit type by way of float32.

    Returns:
        A 1-D tensor, differentiable: gradients go back in the element types of the tensors.

    Raises:
        KernelArgumentError: no tensors, several devices, or a type that isn't converted.
    """
    if not tensors:
        raise KernelArgumentError("pack: no tensors, so it isn't known on which device the result should be.")
    return _platform(tensors, "pack").pack(tensors, dtype)  # type: ignore[no-any-return]


def unpack(flat: TensorT, like: Sequence[TensorT]) -> list[TensorT]:
    """Cut a flat tensor into new ones, end to end, of the shapes and element types of `like`; differentiable in `flat`.

    Raises:
        KernelArgumentError: `flat` has another number of elements than all of `like`, or a type that isn't converted.
    """
    return _platform([flat], "unpack").unpack(flat, like)  # type: ignore[no-any-return]


def pack_into(flat: TensorT, tensors: Sequence[TensorT], offsets: Sequence[int]) -> None:
    """Copy tensors to their places in a flat one; no gradients.

    Args:
        flat: 1-D and dense; written to.
        tensors: dense; none may share memory with `flat`.
        offsets: for each, where it begins in `flat`, in elements; the places may not overlap.

    Raises:
        KernelArgumentError: any of that doesn't hold; nothing has been written then.
    """
    _platform([flat], "pack_into").pack_into(flat, tensors, offsets)


def unpack_into(tensors: Sequence[TensorT], flat: TensorT, offsets: Sequence[int]) -> None:
    """Copy parts of a flat tensor to others, each from its offset in elements; the reverse of `pack_into`.

    Raises:
        KernelArgumentError: as there; the tensors written to may not share memory either.
    """
    _platform([flat], "unpack_into").unpack_into(tensors, flat, offsets)


def cast_into(targets: Sequence[TensorT], sources: Sequence[TensorT]) -> None:
    """Copy each source to its target of the same shape, converting the element type; no gradients.

    Raises:
        KernelArgumentError: shapes differ, a tensor isn't dense, or one that is written to shares memory with another.
    """
    if len(targets) != len(sources):
        raise KernelArgumentError(f"cast_into: {len(targets)} targets for {len(sources)} sources.")
    if targets:
        _platform(targets, "cast_into").cast_into(targets, sources)


def _platform(tensors: Sequence[object], name: str) -> Any:
    return platform_module(tensors[0], "packing", name)
