"""torch's own DTensor and DeviceMesh: conversion without a copy, and the fallback for ops without a rule.

Layouts convert exactly or not at all. Several axes on one dim in another order than the mesh's are `_StridedShard` in torch,
which means the same pieces where the dim divides evenly, and for some uneven sizes; that is checked piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hp_core.errors import LayoutError
from hp_core.geometry import chunk_interval, contiguous_strides

__all__ = ["fallback", "mesh_to_native", "native_parts", "placements_to_native", "to_native"]

_meshes: dict[Any, tuple[Any, TorchMesh]] = {}  # with the world whose groups it uses


def mesh_to_native(mesh: Any, device_type: str) -> TorchMesh:
    """A torch DeviceMesh of the same shape, names and ranks, on our process groups."""
    world = dist.group.WORLD if dist.is_initialized() else None
    known = _meshes.get(mesh)
    if known is not None and known[0] is world:
        return known[1]
    device_type = mesh.device_type or device_type
    ranks = torch.tensor(mesh.rank_list, dtype=torch.int).view(mesh.shape)
    groups = [mesh.get_group(axis).native for axis in range(mesh.ndim)]
    groups = [dist.new_group([dist.get_rank()], use_local_synchronization=True) if g is None else g for g in groups]
    native = TorchMesh.from_group(
        groups if mesh.ndim > 1 else groups[0], device_type, mesh=ranks, mesh_dim_names=mesh.mesh_dim_names
    )
    _meshes[mesh] = world, native
    return native


def to_native(tensor: Any) -> TorchDTensor:
    """One of our DTensors as torch's, sharing the local tensor and its graph."""
    layout = tensor.layout
    shape = torch.Size(tensor.shape)
    placements = placements_to_native(layout, tuple(shape))
    return TorchDTensor.from_local(
        tensor.to_local(),
        layout.mesh.to_torch(),
        placements,
        run_check=False,
        shape=shape,
        stride=contiguous_strides(shape),
    )


def native_parts(tensor: TorchDTensor) -> tuple[torch.Tensor, TorchMesh, tuple[Placement, ...], dict[int, Any]]:
    """What one of torch's DTensors is made of: local tensor (in the graph), mesh, placements, and orders of axes.

    Strided shards are told as plain ones; the dims that they cut have an entry in the orders: their axes, outermost first.

    Raises:
        LayoutError: a strided shard means no order of axes, or other pieces than that order would make.
    """
    if not isinstance(tensor, TorchDTensor):
        raise LayoutError(f"from_torch() takes a torch.distributed.tensor.DTensor, got a {type(tensor).__name__}.")
    mesh, placements = tensor.device_mesh, tensor.placements
    sizes = tuple(mesh.size(axis) for axis in range(mesh.ndim))
    orders: dict[int, tuple[int, ...]] = {}
    for dim in {one.dim for one in placements if isinstance(one, _StridedShard)}:
        cuts = tuple((axis, _split_factor(one)) for axis, one in enumerate(placements) if _dim_of(one) == dim)
        order = _order_of(cuts, sizes)
        if order is None or not _same_pieces(tensor.shape[dim], order, cuts, sizes):
            raise LayoutError(
                f"torch's placements {placements} on a mesh of shape {sizes} cut dim {dim} of shape {tuple(tensor.shape)} into "
                f"pieces that no order of mesh axes makes; redistribute the torch DTensor to plain Shards first."
            )
        orders[dim] = order
    for entry in getattr(tensor._spec, "shard_order", None) or ():
        if list(entry.mesh_dims) != sorted(entry.mesh_dims):
            orders[entry.tensor_dim] = tuple(entry.mesh_dims)
    plain = tuple(Shard(one.dim) if isinstance(one, _StridedShard) else one for one in placements)
    return tensor.to_local(), mesh, plain, orders


# -- placements -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1 << 12)
def placements_to_native(layout: Any, shape: tuple[int, ...]) -> tuple[Placement, ...]:
    """Torch's placements of a layout of a tensor of this shape, exactly.

    Raises:
        LayoutError: placements can't say it: ragged shares, or axes in another order than the mesh's on an uneven dim.
    """
    if layout.ragged is not None or layout.flat is not None:
        kind = "ragged shares" if layout.flat is None else "flat shares"
        raise LayoutError(f"layout {layout} has {kind}, which torch's placements can't express; redistribute first.")
    sizes = layout.mesh.shape
    result: list[Placement] = [Replicate()] * layout.mesh.ndim
    for dim, axes in enumerate(layout.dim_axes):
        cuts = []
        for position, axis in enumerate(axes):
            factor = prod(sizes[outer] for outer in axes[:position] if outer > axis)
            result[axis] = Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)
            cuts.append((axis, factor))
        if list(axes) != sorted(axes) and not _same_pieces(shape[dim], axes, tuple(sorted(cuts)), sizes):
            raise LayoutError(
                f"layout {layout} cuts dim {dim} of shape {shape} by axes in an order that torch has only as _StridedShard, "
                f"and for this uneven size that means other pieces; redistribute to the order of the mesh first."
            )
    for axis, reduce_op in layout.partials:
        result[axis] = Partial(reduce_op)
    return tuple(result)


def _dim_of(placement: Placement) -> int | None:
    return placement.dim if isinstance(placement, (Shard, _StridedShard)) else None


def _split_factor(placement: Any) -> int:
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 1


def _order_of(cuts: tuple[tuple[int, int], ...], sizes: Sequence[int]) -> tuple[int, ...] | None:
    """The axes of a dim, outermost first, from the split factor of each: the product of the later axes that come before it."""
    order: list[int] = []
    for axis, factor in reversed(cuts):
        before = [prod(sizes[other] for other in order[:place]) for place in range(len(order) + 1)]
        if factor not in before:
            return None
        order.insert(before.index(factor), axis)
    return tuple(order)


@lru_cache(maxsize=1 << 12)
def _same_pieces(size: int, order: tuple[int, ...], cuts: tuple[tuple[int, int], ...], sizes: tuple[int, ...]) -> bool:
    """Whether cutting by the axes in `order` and torch's reading of `cuts`, left to right, give every rank the same."""
    if size % prod(sizes[axis] for axis in order) == 0:
        return True
    for coordinate in product(*(range(sizes[axis]) for axis, _ in cuts)):
        index = {axis: place for (axis, _), place in zip(cuts, coordinate, strict=True)}
        ours = (0, size)
        for axis in order:
            ours = chunk_interval(ours, sizes[axis], index[axis], size)
        theirs = list(range(size))
        for axis, factor in cuts:
            pieces = [chunk_interval((0, len(theirs)), factor, part, len(theirs)) for part in range(factor)]
            theirs = [
                theirs[place]
                for piece in pieces
                for place in range(*chunk_interval(piece, sizes[axis], index[axis], len(theirs)))
            ]
        if theirs != list(range(*ours)):
            return False
    return True


def fallback(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], wrap: Callable[..., Any]) -> Any:
    """Run `function` on torch's DTensors made of ours; differentiable, as both conversions are.

    torch's gradients follow the same law (its `from_local` and `to_local` replicate what is pending). Flat shares are
    put together and pending reductions done first: several of torch's backward formulas write in place to what they take
    for final values.
    """
    convert = torch.utils._pytree.tree_map
    native_args, native_kwargs = convert(
        lambda value: (
            to_native(value.redistribute(value.layout.gradient.unflat))
            if hasattr(value, "_spec") and hasattr(value, "_local")
            else value
        ),
        (args, kwargs),
    )
    result = function(*native_args, **native_kwargs)

    def wrapped(value: Any) -> Any:
        if not isinstance(value, TorchDTensor):
            return value
        local, mesh, placements, orders = native_parts(value)
        if orders:
            raise LayoutError(
                f"torch gave the result placements {value.placements}, which cut in an order of their own."
            )
        return wrap(local, mesh, placements, tuple(value.shape))

    return convert(wrapped, result)
