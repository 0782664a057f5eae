"""torch's own DTensor and DeviceMesh: conversion without a copy, and the fallback for ops without a rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from hp_core.errors import LayoutError
from hp_core.geometry import contiguous_strides

__all__ = ["fallback", "from_native", "mesh_to_native", "placements_to_native", "to_native"]

_meshes: dict[Any, TorchMesh] = {}


def mesh_to_native(mesh: Any, device_type: str) -> TorchMesh:
    """A torch DeviceMesh of the same shape, names and ranks, on our process groups."""
    found = _meshes.get(mesh)
    if found is None:
        device_type = mesh.device_type or device_type
        ranks = torch.tensor(mesh.rank_list, dtype=torch.int).view(mesh.shape)
        groups = [mesh.get_group(axis).native for axis in range(mesh.ndim)]
        groups = [dist.new_group([dist.get_rank()], use_local_synchronization=True) if g is None else g for g in groups]
        found = TorchMesh.from_group(
            groups if mesh.ndim > 1 else groups[0], device_type, mesh=ranks, mesh_dim_names=mesh.mesh_dim_names
        )
        _meshes[mesh] = found
    return found


def placements_to_native(layout: Any) -> tuple[Placement, ...]:
    """Torch's placements of a layout, exactly.

    Raises:
        LayoutError: placements can't say it (ragged shares, axes in another order than the mesh's).
    """
    if layout.ragged is not None:
        raise LayoutError(
            f"layout {layout} has ragged shares, which torch's placements can't express; redistribute first."
        )
    result: list[Placement] = []
    for placement in layout.placements:
        if placement.is_shard():
            result.append(Shard(placement.dim))
        elif placement.is_partial():
            result.append(Partial(placement.reduce_op))
        else:
            result.append(Replicate())
    return tuple(result)


def to_native(tensor: Any) -> TorchDTensor:
    """One of our DTensors as torch's, sharing the local tensor and its graph."""
    layout = tensor.layout
    mesh = layout.mesh.to_torch()
    shape = torch.Size(tensor.shape)
    return TorchDTensor.from_local(
        tensor.to_local(),
        mesh,
        placements_to_native(layout),
        run_check=False,
        shape=shape,
        stride=contiguous_strides(shape),
    )


def from_native(tensor: TorchDTensor, wrap: Callable[..., Any]) -> Any:
    """One of torch's DTensors as ours; `wrap(local, mesh, placements, shape)` makes it."""
    return wrap(tensor.to_local(), tensor.device_mesh, tensor.placements, tuple(tensor.shape))


def fallback(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], wrap: Callable[..., Any]) -> Any:
    """Run `function` on torch's DTensors made of ours; differentiable, as both conversions are.

    torch's gradients follow the same law (its `from_local` and `to_local` replicate what is pending). Pending reductions
    are done first: several of torch's backward formulas write in place to what they take for final values.
    """
    convert = torch.utils._pytree.tree_map
    native_args, native_kwargs = convert(
        lambda value: (
            to_native(value.reduce_partial()) if hasattr(value, "_spec") and hasattr(value, "_local") else value
        ),
        (args, kwargs),
    )
    result = function(*native_args, **native_kwargs)
    return convert(lambda value: from_native(value, wrap) if isinstance(value, TorchDTensor) else value, result)
