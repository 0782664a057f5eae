"""Many tensors into one flat one and back, converting the element type: the ops and their twins.

`pack` and `unpack` make new tensors and have gradients; `pack_into`, `unpack_into` and `cast_into` write to tensors of
the caller's and have none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch

from hp_kernels.errors import KernelArgumentError
from hp_kernels.loading import native
from hp_kernels.platform.torch.arrays import (
    array_of,
    floating_types,
    island_errors,
    on_cpu,
    require_dense,
    require_one_device,
    spans_of,
)

__all__ = ["cast_into", "pack", "pack_into", "unpack", "unpack_into"]

Tensors = Sequence[torch.Tensor]

_SCHEMAS = {
    "pack": "(Tensor[] tensors, ScalarType dtype) -> Tensor",
    "unpack": "(Tensor flat, Tensor[] like) -> Tensor[]",
    "pack_into": "(Tensor(a!) flat, Tensor[] tensors, int[] offsets) -> ()",
    "unpack_into": "(Tensor(a!)[] tensors, Tensor flat, int[] offsets) -> ()",
    "cast_into": "(Tensor(a!)[] targets, Tensor[] sources) -> ()",
}
for _name, _schema in _SCHEMAS.items():
    torch.library.define(f"hp_kernels::{_name}", _schema)


# -- the public functions -------------------------------------------------------------------------------------------


def pack(tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
    """See `hp_kernels.packing`, also for the others."""
    return torch.ops.hp_kernels.pack(tensors, dtype)  # type: ignore[no-any-return]


def unpack(flat: torch.Tensor, like: Tensors) -> list[torch.Tensor]:
    """Cut a flat tensor into new ones."""
    return torch.ops.hp_kernels.unpack(flat, like)  # type: ignore[no-any-return]


def pack_into(flat: torch.Tensor, tensors: Tensors, offsets: Sequence[int]) -> None:
    """Copy tensors to their places in a flat one."""
    with island_errors():
        torch.ops.hp_kernels.pack_into(flat, tensors, offsets)


def unpack_into(tensors: Tensors, flat: torch.Tensor, offsets: Sequence[int]) -> None:
    """Copy parts of a flat tensor to others."""
    with island_errors():
        torch.ops.hp_kernels.unpack_into(tensors, flat, offsets)


def cast_into(targets: Tensors, sources: Tensors) -> None:
    """Copy each source to its target."""
    with island_errors():
        torch.ops.hp_kernels.cast_into(targets, sources)


# -- checks ---------------------------------------------------------------------------------------------------------


def _check_types(name: str, to: torch.dtype, origin: torch.dtype) -> None:
    if to != origin and not (to in floating_types and origin in floating_types):
        raise KernelArgumentError(f"{name}: {origin} isn't converted to {to}; only floating-point types are.")


def _check_places(name: str, flat: torch.Tensor, tensors: Tensors, offsets: Sequence[int], packing: bool) -> None:
    require_one_device(name, [flat, *tensors])
    require_dense(name, flat, *tensors)
    if flat.ndim != 1:
        raise KernelArgumentError(f"{name}: flat must have one dim, not the shape {list(flat.shape)}.")
    if len(offsets) != len(tensors):
        raise KernelArgumentError(f"{name}: {len(offsets)} offsets for {len(tensors)} tensors.")
    for tensor, offset in zip(tensors, offsets, strict=True):
        _check_types(name, *((flat.dtype, tensor.dtype) if packing else (tensor.dtype, flat.dtype)))
        if offset < 0 or offset + tensor.numel() > flat.numel():
            raise KernelArgumentError(
                f"{name}: a tensor of {tensor.numel()} elements at offset {offset} doesn't fit into the {flat.numel()} of flat."
            )
    if packing:
        places = sorted((offset, offset + tensor.numel()) for tensor, offset in zip(tensors, offsets, strict=True))
        _check_apart(name, [place for place in places if place[0] < place[1]])
        _check_disjoint(name, [flat], tensors)
    else:
        _check_apart(name, sorted(spans_of(tensors)))
        _check_disjoint(name, tensors, [flat])


def _check_apart(name: str, spans: list[tuple[int, int]]) -> None:
    if any(second[0] < first[1] for first, second in pairwise(spans)):
        raise KernelArgumentError(f"{name}: what is written overlaps itself; each element may be written once.")


def _check_disjoint(name: str, written: Tensors, read: Tensors) -> None:
    """No span of what is written meets one of what is read: spans of each kind are merged, then swept together."""
    events = sorted([(*span, True) for span in spans_of(written)] + [(*span, False) for span in spans_of(read)])
    ends = {True: 0, False: 0}
    for start, end, kind in events:
        if start < ends[not kind]:
            raise KernelArgumentError(
                f"{name}: a tensor that is written shares memory with one that is read; clone one of them."
            )
        ends[kind] = max(ends[kind], end)


def _check_pack(tensors: Tensors, dtype: torch.dtype) -> None:
    if not tensors:
        raise KernelArgumentError("pack: no tensors, so it isn't known on which device the result should be.")
    require_one_device("pack", tensors)
    for tensor in tensors:
        _check_types("pack", dtype, tensor.dtype)


def _check_unpack(flat: torch.Tensor, like: Tensors) -> None:
    numel = sum(tensor.numel() for tensor in like)
    if flat.ndim != 1 or flat.numel() != numel:
        raise KernelArgumentError(
            f"unpack: flat has the shape {list(flat.shape)}, the tensors together {numel} elements; it must be [{numel}]."
        )
    for tensor in like:
        _check_types("unpack", tensor.dtype, flat.dtype)


# -- what the ops do ------------------------------------------------------------------------------------------------


def _pack(tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
    _check_pack(tensors, dtype)
    dense = [tensor.contiguous() for tensor in tensors]
    flat = dense[0].new_empty(sum(tensor.numel() for tensor in dense), dtype=dtype)
    _write_packed(flat, dense, _ends_before(dense))
    return flat


def _unpack(flat: torch.Tensor, like: Tensors) -> list[torch.Tensor]:
    _check_unpack(flat, like)
    tensors = [flat.new_empty(tensor.shape, dtype=tensor.dtype) for tensor in like]
    _write_unpacked(tensors, flat.contiguous(), _ends_before(tensors))
    return tensors


def _pack_into(flat: torch.Tensor, tensors: Tensors, offsets: Sequence[int]) -> None:
    _check_places("pack_into", flat, tensors, offsets, packing=True)
    _write_packed(flat, tensors, offsets)


def _unpack_into(tensors: Tensors, flat: torch.Tensor, offsets: Sequence[int]) -> None:
    _check_places("unpack_into", flat, tensors, offsets, packing=False)
    _write_unpacked(tensors, flat, offsets)


def _cast_into(targets: Tensors, sources: Tensors) -> None:
    if len(targets) != len(sources):
        raise KernelArgumentError(f"cast_into: {len(targets)} targets for {len(sources)} sources.")
    require_one_device("cast_into", [*targets, *sources])
    require_dense("cast_into", *targets, *sources)
    for target, source in zip(targets, sources, strict=True):
        _check_types("cast_into", target.dtype, source.dtype)
        if target.shape != source.shape:
            raise KernelArgumentError(
                f"cast_into: a target has the shape {list(target.shape)}, its source {list(source.shape)}."
            )
    _check_apart("cast_into", sorted(spans_of(targets)))
    _check_disjoint("cast_into", targets, sources)
    module = native() if targets and on_cpu(targets[0]) else None
    if module is not None:
        module.cast([array_of(target) for target in targets], [array_of(source) for source in sources])
        return
    for target, source in zip(targets, sources, strict=True):
        _convert(target, source)


def _write_packed(flat: torch.Tensor, tensors: Tensors, offsets: Sequence[int]) -> None:
    module = native() if on_cpu(flat) else None
    if module is not None:
        module.pack(array_of(flat), offsets, [array_of(tensor) for tensor in tensors])
        return
    for tensor, offset in zip(tensors, offsets, strict=True):
        _convert(flat[offset : offset + tensor.numel()], tensor.reshape(-1))


def _write_unpacked(tensors: Tensors, flat: torch.Tensor, offsets: Sequence[int]) -> None:
    module = native() if on_cpu(flat) else None
    if module is not None:
        module.unpack([array_of(tensor) for tensor in tensors], array_of(flat), offsets)
        return
    for tensor, offset in zip(tensors, offsets, strict=True):
        _convert(tensor.view(-1), flat[offset : offset + tensor.numel()])


def _convert(target: torch.Tensor, source: torch.Tensor) -> None:
    """The twin of a conversion: a double goes to the short types by way of float32, whatever the device does by itself."""
    if source.dtype == torch.float64 and target.dtype in (torch.float16, torch.bfloat16):
        source = source.to(torch.float32)
    target.copy_(source)


def _ends_before(tensors: Tensors) -> list[int]:
    """Where each tensor begins when they lie end to end."""
    return [0, *accumulate(tensor.numel() for tensor in tensors)][:-1]


# -- registration ---------------------------------------------------------------------------------------------------

_Function = TypeVar("_Function", bound=Callable[..., object])


def _register_fake(name: str) -> Callable[[_Function], _Function]:
    """Torch's decorator, which has no types."""
    return torch.library.register_fake(name)  # type: ignore[no-any-return]


_IMPLEMENTATIONS: dict[str, Callable[..., object]] = {
    "pack": _pack,
    "unpack": _unpack,
    "pack_into": _pack_into,
    "unpack_into": _unpack_into,
    "cast_into": _cast_into,
}
for _name, _implementation in _IMPLEMENTATIONS.items():
    torch.library.impl(f"hp_kernels::{_name}", "CompositeExplicitAutograd", _implementation)


@_register_fake("hp_kernels::pack")
def _pack_fake(tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
    _check_pack(tensors, dtype)
    return tensors[0].new_empty(sum(tensor.numel() for tensor in tensors), dtype=dtype)


@_register_fake("hp_kernels::unpack")
def _unpack_fake(flat: torch.Tensor, like: Tensors) -> list[torch.Tensor]:
    _check_unpack(flat, like)
    return [flat.new_empty(tensor.shape, dtype=tensor.dtype) for tensor in like]


@_register_fake("hp_kernels::pack_into")
def _pack_into_fake(flat: torch.Tensor, tensors: Tensors, offsets: Sequence[int]) -> None:
    return None


@_register_fake("hp_kernels::unpack_into")
def _unpack_into_fake(tensors: Tensors, flat: torch.Tensor, offsets: Sequence[int]) -> None:
    return None


@_register_fake("hp_kernels::cast_into")
def _cast_into_fake(targets: Tensors, sources: Tensors) -> None:
    return None


def _pack_setup(ctx: Any, inputs: tuple[Tensors, torch.dtype], output: torch.Tensor) -> None:
    # Of tensors without elements: their shapes and types are all that backward needs.
    ctx.like = [(tensor.shape, tensor.dtype) for tensor in inputs[0]]


def _pack_backward(ctx: Any, gradient: torch.Tensor) -> tuple[list[torch.Tensor], None]:
    like = [gradient.new_empty(1, dtype=dtype).expand(shape) for shape, dtype in ctx.like]
    return unpack(gradient, like), None


def _unpack_setup(ctx: Any, inputs: tuple[torch.Tensor, Tensors], output: list[torch.Tensor]) -> None:
    ctx.dtype, ctx.count = inputs[0].dtype, len(inputs[1])


def _unpack_backward(ctx: Any, gradients: list[torch.Tensor]) -> tuple[torch.Tensor, list[None]]:
    return pack(gradients, ctx.dtype), [None] * ctx.count


torch.library.register_autograd("hp_kernels::pack", _pack_backward, setup_context=_pack_setup)
torch.library.register_autograd("hp_kernels::unpack", _unpack_backward, setup_context=_unpack_setup)
