"""Packing and unpacking of MindSpore's tensors on the CPU, through MindSpore's custom functions; see `hp_kernels.packing`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore.common._grad_function import _Function

from hp_kernels.dtypes import DTYPE_CODES
from hp_kernels.errors import KernelArgumentError
from hp_kernels.loading import native
from hp_kernels.platform.mindspore.arrays import array_of, as_tensor, empty, memory_of, name_of, writable
from hp_kernels.platform.mindspore.building import island

__all__ = ["cast_into", "pack", "pack_into", "unpack", "unpack_into"]

Tensors = Sequence[Tensor]
Values = np.ndarray[Any, Any]

_FLOATING = ("float32", "float64", "float16", "bfloat16")


class _Pack(_Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, dtype: Any, *tensors: Tensor) -> Tensor:
        ctx.like = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        module = island()
        names = {name_of(kind) for kind in (dtype, *(tensor.dtype for tensor in tensors))}
        if module is not None and names <= set(_FLOATING):
            return module.pack(list(tensors), DTYPE_CODES[name_of(dtype)])
        sources = [memory_of(tensor) for tensor in tensors]
        flat = empty((sum(source.size for source in sources),), dtype)
        _check_types("pack", [(flat, source) for source in sources])
        _write_packed(flat, sources, _ends_before(sources))
        return as_tensor(flat)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, *[as_tensor(part) for part in _cut(memory_of(gradient), ctx.like)]


class _Unpack(_Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, like: Any, flat: Tensor) -> Any:
        ctx.dtype = flat.dtype
        return tuple(as_tensor(part) for part in _cut(memory_of(flat), like))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        sources = [memory_of(gradient) for gradient in gradients]
        flat = empty((sum(source.size for source in sources),), ctx.dtype)
        _write_packed(flat, sources, _ends_before(sources))
        return None, as_tensor(flat)


def pack(tensors: Tensors, dtype: Any) -> Tensor:
    """Lay tensors end to end in a new flat one."""
    return _Pack.apply(dtype, *tensors)


def unpack(flat: Tensor, like: Tensors) -> list[Tensor]:
    """Cut a flat tensor into new ones."""
    numel = sum(_numel(tensor) for tensor in like)
    if tuple(flat.shape) != (numel,):
        raise KernelArgumentError(
            f"unpack: flat has the shape {list(flat.shape)}, the tensors together {numel} elements; it must be [{numel}]."
        )
    return list(_Unpack.apply([(tuple(tensor.shape), tensor.dtype) for tensor in like], flat))


def pack_into(flat: Tensor, tensors: Tensors, offsets: Sequence[int]) -> None:
    """Copy tensors to their places in a flat one."""
    target, sources = writable(flat), [memory_of(tensor) for tensor in tensors]
    _check_types("pack_into", [(target, source) for source in sources])
    _check_places("pack_into", target, sources, offsets)
    _check_apart("pack_into", [target[offset : offset + source.size] for offset, source in _placed(offsets, sources)])
    _check_disjoint("pack_into", [target], sources)
    _write_packed(target, sources, offsets)


def unpack_into(tensors: Tensors, flat: Tensor, offsets: Sequence[int]) -> None:
    """Copy parts of a flat tensor to others."""
    targets, source = [writable(tensor) for tensor in tensors], memory_of(flat)
    _check_types("unpack_into", [(target, source) for target in targets])
    _check_places("unpack_into", source, targets, offsets)
    _check_apart("unpack_into", targets)
    _check_disjoint("unpack_into", targets, [source])
    _write_unpacked(targets, source, offsets)


def cast_into(targets: Tensors, sources: Tensors) -> None:
    """Copy each source to its target."""
    written, read = [writable(target) for target in targets], [memory_of(source) for source in sources]
    _check_types("cast_into", list(zip(written, read, strict=True)))
    for target, source in zip(written, read, strict=True):
        if target.shape != source.shape:
            raise KernelArgumentError(
                f"cast_into: a target has the shape {list(target.shape)}, its source {list(source.shape)}."
            )
    _check_apart("cast_into", written)
    _check_disjoint("cast_into", written, read)
    module = native()
    if module is not None:
        module.cast([array_of(target) for target in written], [array_of(source) for source in read])
        return
    for target, source in zip(written, read, strict=True):
        _convert(target, source)


# -- checks ---------------------------------------------------------------------------------------------------------


def _check_types(name: str, pairs: list[tuple[Values, Values]]) -> None:
    for target, source in pairs:
        if target.dtype != source.dtype and not {str(target.dtype), str(source.dtype)} <= set(_FLOATING):
            raise KernelArgumentError(
                f"{name}: {source.dtype} isn't converted to {target.dtype}; only floating-point types are."
            )


def _check_places(name: str, flat: Values, values: list[Values], offsets: Sequence[int]) -> None:
    if flat.ndim != 1:
        raise KernelArgumentError(f"{name}: flat must have one dim, not the shape {list(flat.shape)}.")
    if len(offsets) != len(values):
        raise KernelArgumentError(f"{name}: {len(offsets)} offsets for {len(values)} tensors.")
    for offset, one in _placed(offsets, values):
        if offset < 0 or offset + one.size > flat.size:
            raise KernelArgumentError(
                f"{name}: a tensor of {one.size} elements at offset {offset} doesn't fit into the {flat.size} of flat."
            )


def _check_apart(name: str, written: list[Values]) -> None:
    spans = sorted((one.ctypes.data, one.ctypes.data + one.nbytes) for one in written if one.size)
    if any(second[0] < first[1] for first, second in pairwise(spans)):
        raise KernelArgumentError(f"{name}: what is written overlaps itself; each element may be written once.")


def _check_disjoint(name: str, written: list[Values], read: list[Values]) -> None:
    if any(np.may_share_memory(target, source) for target in written for source in read):
        raise KernelArgumentError(
            f"{name}: a tensor that is written shares memory with one that is read; copy one of them."
        )


# -- the native kernels, and the twins in NumPy -----------------------------------------------------------------------


def _cut(flat: Values, like: Sequence[tuple[tuple[int, ...], Any]]) -> list[Values]:
    parts = [empty(shape, dtype) for shape, dtype in like]
    _check_types("unpack", [(part, flat) for part in parts])
    _write_unpacked(parts, flat, _ends_before(parts))
    return parts


def _write_packed(flat: Values, sources: list[Values], offsets: Sequence[int]) -> None:
    module = native()
    if module is not None:
        module.pack(array_of(flat), list(offsets), [array_of(source) for source in sources])
        return
    for offset, source in _placed(offsets, sources):
        _convert(flat[offset : offset + source.size], source.reshape(-1))


def _write_unpacked(targets: list[Values], flat: Values, offsets: Sequence[int]) -> None:
    module = native()
    if module is not None:
        module.unpack([array_of(target) for target in targets], array_of(flat), list(offsets))
        return
    for offset, target in _placed(offsets, targets):
        _convert(target.reshape(-1), flat[offset : offset + target.size])


def _convert(target: Values, source: Values) -> None:
    """A double goes to the short types by way of float32, and a number too large becomes infinity without a word."""
    with np.errstate(all="ignore"):
        if source.dtype == np.float64 and target.itemsize == 2:
            source = source.astype(np.float32)
        target[...] = source.astype(target.dtype)


def _placed(offsets: Sequence[int], values: list[Values]) -> list[tuple[int, Values]]:
    return list(zip(offsets, values, strict=True))


def _ends_before(values: list[Values]) -> list[int]:
    """Where each begins when they lie end to end."""
    return [0, *accumulate(one.size for one in values)][:-1]


def _numel(tensor: Tensor) -> int:
    numel = 1
    for size in tensor.shape:
        numel *= size
    return numel
