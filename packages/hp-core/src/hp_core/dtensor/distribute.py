"""From plain tensors and modules to distributed ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from hp_core.dtensor.api import DTensorMethods, dtensor_type
from hp_core.errors import LayoutError
from hp_core.geometry import clipped, origin_box
from hp_core.layout import Layout, layout_of
from hp_core.mesh import DeviceMesh, as_mesh, get_current_mesh
from hp_core.placement import Placement
from hp_core.platform import get_platform
from hp_core.platform.protocol import Tensor
from hp_core.redistribute import program_for

if TYPE_CHECKING:
    from hp_core.dtensor.api import DTensor

__all__ = [
    "Lay",
    "Replaced",
    "as_held",
    "distribute_module",
    "distribute_tensor",
    "layout_from",
    "mesh_or_current",
    "replace_parameters",
    "require_layout",
]

Lay = Layout | Sequence[Placement | str | tuple[str, ...] | None]
"""How users say a layout where the mesh is known: a `Layout`, placements (one per mesh axis), or axis names by tensor dim."""

Replaced = dict[int, tuple[Any, Any, str]]
"""Parameters already distributed, by identity: the old one (kept alive), the new one, and the module that had it first."""


def distribute_tensor(
    tensor: Tensor,
    layout: Layout | DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Lay out a global tensor that every rank has (in shape, at least).

    Args:
        tensor: the global tensor, of the same shape and dtype on all ranks.
        layout: a Layout, or a mesh with `placements`; default the current mesh.
        placements: one per mesh axis; default replicated.
        src_data_rank: position in the mesh's rank list of the rank whose values count: they are sent to the others.
            None trusts every rank to have the same values, and communicates nothing.

    Returns:
        A graph leaf that requires a gradient if `tensor` does.

    Raises:
        LayoutError: the shape contradicts the layout, or the tensor is a DTensor already (in another layout).
    """
    cls = dtensor_type()
    platform = get_platform()
    shape = tuple(platform.tensors.shape(tensor))
    target = layout_of(
        mesh_or_current(layout) if placements is not None or layout is None else layout, placements, len(shape)
    )
    if isinstance(tensor, cls):
        if tensor._spec.layout is target:  # type: ignore[attr-defined]
            return tensor  # type: ignore[return-value]
        raise LayoutError(
            f"distribute_tensor() takes a plain tensor, got a DTensor laid out {tensor._spec.layout}; "  # type: ignore[attr-defined]
            f"use .redistribute() to lay it out {target}."
        )
    target.check_shape(shape)
    mesh = target.mesh
    mesh.require_coordinate()
    if src_data_rank is not None and not 0 <= src_data_rank < mesh.size():
        raise LayoutError(f"src_data_rank={src_data_rank} is outside of {mesh!r}, which has {mesh.size()} ranks.")
    values = platform.autograd.detach(tensor)
    cut = target.gradient
    if src_data_rank is None or mesh.size() == 1 or platform.tensors.is_meta(tensor):
        local = platform.tensors.clone(_piece(values, cut, shape, None))
    else:
        local = _send_pieces(values, cut, shape, mesh.rank_list[src_data_rank])
    if target is not cut:
        itemsize = platform.tensors.itemsize(platform.tensors.dtype(tensor))
        local = program_for(cut, target, shape, itemsize)(local)
    result = DTensorMethods.from_local(local, target, shape=shape)
    if platform.autograd.requires_grad(tensor):
        result.requires_grad_(True)
    return result


def distribute_module(
    module: Any,
    mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, Any, DeviceMesh], None] | None = None,
    input_fn: Callable[[Any, Any, DeviceMesh], Any] | None = None,
    output_fn: Callable[[Any, Any, DeviceMesh], Any] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> Any:
    """Make a module's parameters and buffers DTensors on a mesh; what `partition_fn` leaves plain is replicated.

    Args:
        module: the module, changed in place. Tied parameters stay tied.
        mesh: the mesh; default the current one.
        partition_fn: called as `partition_fn(name, submodule, mesh)` for every submodule, to shard what it wants.
        input_fn: called as `input_fn(module, args, mesh)` before each forward; returns the arguments to use.
        output_fn: called as `output_fn(module, output, mesh)` after each forward; returns the output to use.
        src_data_rank: see `distribute_tensor`.

    Returns:
        The same module.
    """
    mesh = mesh_or_current(mesh)
    modules = get_platform().modules
    replaced: Replaced = {}
    replicated = layout_of(mesh)
    for name, submodule in modules.named_modules(module):
        if partition_fn is not None:
            partition_fn(name, submodule, mesh)
        replace_parameters(submodule, name, lambda _, __: replicated, src_data_rank, replaced)
        for buffer_name, buffer in modules.own_buffers(submodule):
            if not isinstance(buffer, dtensor_type()):
                modules.set_buffer(
                    submodule, buffer_name, distribute_tensor(buffer, replicated, src_data_rank=src_data_rank)
                )
                modules.convert_on_load(submodule, as_held)
    if input_fn is not None:
        modules.hook_inputs(module, lambda args, kwargs: (_as_tuple(input_fn(module, args, mesh)), kwargs))
    if output_fn is not None:
        modules.hook_output(module, lambda output: output_fn(module, output, mesh))
    return module


def replace_parameters(
    module: Any,
    path: str,
    layout_for: Callable[[str, Tensor], Layout | None],
    src_data_rank: int | None,
    replaced: Replaced,
) -> None:
    """Distribute the parameters that a module itself holds.

    Args:
        module: the module.
        path: its name, for messages.
        layout_for: from a parameter's name and value to its layout; None leaves it as it is.
        src_data_rank: see `distribute_tensor`.
        replaced: what was distributed before, so that tied parameters stay tied; extended here.

    Raises:
        LayoutError: a tied parameter is asked to lie in two ways.
    """
    modules = get_platform().modules
    for name, parameter in modules.own_parameters(module):
        if isinstance(parameter, dtensor_type()):
            continue
        target = layout_for(name, parameter)
        if target is None:
            continue
        known = replaced.get(id(parameter))
        if known is not None:
            if known[1].layout is not target:
                raise LayoutError(
                    f"parameter {name!r} of module {path!r} is tied to one of module {known[2]!r}, which is laid out "
                    f"{known[1].layout}; it can't be {target} as well. Use styles that lay out both alike "
                    f"(RowwiseParallel for the embedding and ColwiseParallel for the head, say)."
                )
            modules.tie_parameter(module, name, known[1])
            continue
        modules.set_parameter(module, name, distribute_tensor(parameter, target, src_data_rank=src_data_rank))
        replaced[id(parameter)] = (parameter, dict(modules.own_parameters(module))[name], path)
    modules.convert_on_load(module, as_held)


def as_held(held: Any, value: Any) -> Any:
    """What a state dict has for a tensor, laid out as the tensor; a plain one of the global shape is the global value.

    Every rank that loads has read the same file, so nothing is sent.
    """
    cls, tensors = dtensor_type(), get_platform().tensors
    if not isinstance(held, cls) or not tensors.is_tensor(value) or isinstance(value, cls):
        return value
    if tuple(tensors.shape(value)) != tuple(held.shape):  # type: ignore[attr-defined]
        return value  # the framework's own message has both shapes
    return distribute_tensor(value, held.layout, src_data_rank=None)  # type: ignore[attr-defined]


def mesh_or_current(mesh: Any) -> Any:
    """The mesh or layout given, or the current mesh.

    Raises:
        LayoutError: neither is there.
    """
    if mesh is None:
        mesh = get_current_mesh()
        if mesh is None:
            raise LayoutError("no mesh given and none current; pass a mesh, or call inside `with mesh:`.")
    return mesh if isinstance(mesh, Layout) else as_mesh(mesh)


def layout_from(mesh: DeviceMesh, given: Lay, ndim: int) -> Layout:
    """The layout that `given` says for a tensor of `ndim` dims on a mesh.

    Raises:
        LayoutError: it is no layout, or one on another mesh.
    """
    if isinstance(given, Layout):
        if given.mesh is not mesh:
            raise LayoutError(f"layout {given} is on another mesh than {mesh!r}.")
        return given
    require_layout(given)
    if given and all(hasattr(entry, "is_replicate") for entry in given):
        return layout_of(mesh, given, ndim)
    return layout_of(mesh)(*given)


def require_layout(given: Any) -> None:
    """Raise `LayoutError` unless `given` says a layout in one of the ways that there are."""
    if not isinstance(given, (Layout, Sequence)) or isinstance(given, str):
        raise LayoutError(
            f"{given!r} is no layout: give a Layout, a list of placements (one per mesh axis), or a tuple of axis names (one "
            f"entry per tensor dim)."
        )


def _send_pieces(values: Tensor, layout: Layout, shape: tuple[int, ...], source: int) -> Tensor:
    """This rank's piece of the source rank's values: one scatter, or one broadcast if all are equal."""
    platform = get_platform()
    tensors = platform.tensors
    mesh = layout.mesh
    group = mesh.get_group(mesh.mesh_dim_names)
    if not layout.active_axes:
        whole = tensors.clone(_piece(values, layout, shape, None))
        platform.collectives.broadcast(whole, source, group)
        return whole
    sizes = [layout.local_shape(shape, rank) for rank in group.ranks]
    largest = tuple(map(max, zip(*sizes, strict=True)))
    pieces = None
    if platform.processes.rank() == source:
        pieces = []
        for rank, size in zip(group.ranks, sizes, strict=True):
            piece = tensors.zeros(largest, values)
            tensors.paste(piece, origin_box(size), _piece(values, layout, shape, rank))
            pieces.append(piece)
    received = tensors.empty(largest, values)
    platform.collectives.scatter(received, pieces, source, group)
    own = layout.local_shape(shape)
    return received if own == largest else tensors.clone(tensors.crop(received, origin_box(own)))


def _piece(values: Tensor, layout: Layout, shape: tuple[int, ...], rank: int | None) -> Tensor:
    """What `rank` (None: this process) holds of the global values."""
    tensors = get_platform().tensors
    box = tensors.crop(values, clipped(layout.unflat.bounds(shape, rank)))
    if layout.flat is None:
        return box
    start, stop = layout.flat_interval(shape, rank)
    return tensors.narrow(tensors.reshape(box, (prod(tensors.shape(box)),)), 0, start, stop - start)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
