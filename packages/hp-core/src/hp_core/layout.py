"""How one tensor lies on a mesh: immutable, interned by value, without any framework.

The canonical form keeps, for each tensor dim, the ordered mesh axes that cut it (outermost first), so order is never
lost; plus the axes on which a reduction is pending, and one that shares the flattened piece. Everything that asks "what
does a rank hold" goes through `bounds`, or `boxes` where that may be flat.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import Any

from hp_core.errors import LayoutError
from hp_core.geometry import (
    Box,
    Interval,
    box_numel,
    box_shape,
    chunk_interval,
    flat_boxes,
    flat_share,
    ragged_interval,
)
from hp_core.mesh import DeviceMesh, as_mesh
from hp_core.placement import FlatShard, Partial, Placement, RaggedShard, Replicate, Shard

__all__ = ["Layout", "layout_of"]

DimAxes = tuple[tuple[int, ...], ...]
Partials = tuple[tuple[int, str], ...]
Flat = tuple[int, int, int]
Key = tuple[DeviceMesh, DimAxes, Partials, "tuple[int, ...] | None", "Flat | None"]

_interned: dict[Key, Layout] = {}


class Layout:
    """The layout of a tensor on a mesh; two equal layouts are one object, so `==` and `hash` cost nothing.

    `Layout(mesh_shape, axis_names)` and `Layout.from_device_mesh(mesh)` give the replicated layout; calling it lays out
    a tensor, one entry per tensor dim (trailing dims may be left out)::

        layout = Layout((2, 2), ("dp", "tp"))
        layout("dp", None, "tp")          # dim 0 over dp, dim 2 over tp
        layout(("dp", "tp"))              # dim 0 over dp, each piece over tp
        layout(Shard(0), Partial())       # one placement per mesh axis, as in torch

    Attributes:
        mesh: the mesh.
        dim_axes: per tensor dim, the indices of the mesh axes that cut it, outermost first; trailing uncut dims are left out.
        partials: pairs (axis index, reduce op) of pending reductions, by axis.
        ragged: the shares of `RaggedShard`, if dim 0 is cut by one axis in unequal parts, else None.
        flat: (axis index, chunk, offset) of `FlatShard`, if one axis shares the flattened piece, else None.
    """

    __slots__ = ("__weakref__", "_placements", "_sharded", "dim_axes", "flat", "mesh", "partials", "ragged")

    mesh: DeviceMesh
    dim_axes: DimAxes
    partials: Partials
    ragged: tuple[int, ...] | None
    flat: Flat | None
    _placements: tuple[Placement, ...] | None
    _sharded: frozenset[int]

    def __new__(
        cls, mesh_shape: Sequence[int], axis_names: Sequence[str], rank_list: Iterable[int] | None = None
    ) -> Layout:
        """The replicated layout on the mesh of this shape and these axis names."""
        return intern(DeviceMesh(mesh_shape, axis_names, rank_list))

    @classmethod
    def from_device_mesh(cls, mesh: Any) -> Layout:
        """The replicated layout on `mesh` (ours or torch's)."""
        return intern(as_mesh(mesh))

    def __call__(self, *entries: str | tuple[str, ...] | Placement | None) -> Layout:
        """Lay out a tensor on this layout's mesh.

        Args:
            *entries: one per tensor dim: an axis name, None or "None", or a tuple of names (outermost first); or one
                placement per mesh axis.

        Raises:
            LayoutError: an unknown axis, an axis used twice, or the two spellings mixed.
        """
        if any(isinstance(entry, Placement) for entry in entries):
            return from_placements(self.mesh, entries)
        dims: list[tuple[int, ...]] = []
        for entry in entries:
            names = () if entry is None or entry == "None" else (entry,) if isinstance(entry, str) else tuple(entry)  # type: ignore[arg-type]
            unknown = [name for name in names if name not in self.mesh.mesh_dim_names]
            if unknown:
                raise LayoutError(
                    f"layout{entries}: no mesh axis {unknown[0]!r}; the axes are "
                    f"{dict(zip(self.mesh.mesh_dim_names, self.mesh.shape, strict=True))}."
                )
            dims.append(tuple(self.mesh.axis_index(name) for name in names))
        return intern(self.mesh, tuple(dims))

    # -- views of the value -----------------------------------------------------------------------------------------

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis.

        Raises:
            LayoutError: a tensor dim is cut by several axes in an order that placements (read left to right) can't say.
        """
        if self._placements is None:
            for dim, axes in enumerate(self.dim_axes):
                if list(axes) != sorted(axes):
                    raise LayoutError(
                        f"layout {self.compact_str} cuts dim {dim} by axes {self._names(axes)} in this order, which a list "
                        f"of placements can't express (they are read in mesh order); keep the Layout, or redistribute first."
                    )
            placements: list[Placement] = [Replicate()] * self.mesh.ndim
            for dim, axes in enumerate(self.dim_axes):
                for axis in axes:
                    placements[axis] = Shard(dim) if self.ragged is None or dim else RaggedShard(self.ragged)
            for axis, reduce_op in self.partials:
                placements[axis] = Partial(reduce_op)
            if self.flat is not None:
                axis, chunk, offset = self.flat
                placements[axis] = FlatShard(chunk, offset)
            self._placements = tuple(placements)
        return self._placements

    @property
    def alias_tensor_map(self) -> tuple[str | tuple[str, ...], ...]:
        """Per tensor dim the axis name, a tuple of names, or "None"."""
        return tuple(
            "None" if not axes else self._names(axes)[0] if len(axes) == 1 else self._names(axes)
            for axes in self.dim_axes
        )

    @property
    def tensor_map(self) -> tuple[int | tuple[int, ...], ...]:
        """Per tensor dim the axis (or tuple of axes) counted from the innermost mesh axis, which is 0; -1 where uncut."""
        last = self.mesh.ndim - 1
        return tuple(
            -1 if not axes else last - axes[0] if len(axes) == 1 else tuple(last - axis for axis in axes)
            for axes in self.dim_axes
        )

    @property
    def partial(self) -> tuple[str | None, ...]:
        """Per mesh axis the pending reduce op, or None."""
        pending = dict(self.partials)
        return tuple(pending.get(axis) for axis in range(self.mesh.ndim))

    @property
    def compact_str(self) -> str:
        """A short form for people, such as `(dp, -, tp) P(sum):cp`."""
        dims = ", ".join("-" if not axes else "*".join(self._names(axes)) for axes in self.dim_axes)
        text = f"({dims})" if dims else "" if self.partials or self.flat else "replicated"
        if self.ragged is not None:
            text += f" ragged{self.ragged}"
        if self.flat is not None:
            axis, chunk, offset = self.flat
            text += f" flat({chunk}+{offset}):{self.mesh.mesh_dim_names[axis]}"
        for axis, reduce_op in self.partials:
            text += f" P({reduce_op}):{self.mesh.mesh_dim_names[axis]}"
        return text.lstrip()

    def is_partial(self) -> bool:
        """Whether a reduction is pending on some axis."""
        return bool(self.partials)

    @property
    def sharded_axes(self) -> frozenset[int]:
        """Indices of the mesh axes that cut some dim, or share the flattened piece."""
        return self._sharded

    @property
    def active_axes(self) -> frozenset[int]:
        """Indices of the axes of more than one rank on which the tensor is sharded or partial."""
        axes = self._sharded.union(axis for axis, _ in self.partials)
        return frozenset(axis for axis in axes if self.mesh.shape[axis] > 1)

    def axes_of(self, dim: int) -> tuple[int, ...]:
        """Axes that cut tensor dim `dim`, outermost first."""
        return self.dim_axes[dim] if dim < len(self.dim_axes) else ()

    # -- related layouts --------------------------------------------------------------------------------------------

    @property
    def gradient(self) -> Layout:
        """The layout of the gradient of a tensor laid out so (the law of gradients): shards stay, partial is replicated."""
        return intern(self.mesh, self.dim_axes, (), self.ragged, self.flat) if self.partials else self

    def with_partials(self, partials: Partials) -> Layout:
        """The same cuts with other pending reductions."""
        return intern(self.mesh, self.dim_axes, tuple(sorted(partials)), self.ragged, self.flat)

    @property
    def unflat(self) -> Layout:
        """The same layout with the piece whole on every rank of the axis that shared it; itself if none does."""
        return self if self.flat is None else intern(self.mesh, self.dim_axes, self.partials, self.ragged)

    @property
    def replicated(self) -> Layout:
        """The fully replicated layout on the same mesh."""
        return intern(self.mesh)

    # -- geometry ---------------------------------------------------------------------------------------------------

    def check_shape(self, global_shape: Sequence[int]) -> None:
        """Raise `LayoutError` when a tensor of this shape can't be laid out so."""
        if any(size < 0 for size in global_shape):
            raise LayoutError(f"shape {tuple(global_shape)} has a negative size; give the global shape in full.")
        if len(self.dim_axes) > len(global_shape):
            dim = len(self.dim_axes) - 1
            raise LayoutError(
                f"layout {self.compact_str} cuts dim {dim} over {self._names(self.dim_axes[dim])}, but the tensor has only "
                f"{len(global_shape)} dims: shape {tuple(global_shape)}."
            )
        if self.ragged is not None and global_shape[0] % sum(self.ragged):
            raise LayoutError(
                f"ragged shares {self.ragged} sum to {sum(self.ragged)}, which doesn't divide dim 0 of shape "
                f"{tuple(global_shape)}; give shares in units that do."
            )
        if self.flat is not None:
            axis, chunk, offset = self.flat
            reach = self.mesh.shape[axis] * chunk - offset
            numel = prod(self.unflat.largest_local_shape(global_shape))
            if numel > reach:
                raise LayoutError(
                    f"layout {self.compact_str}: chunks of {chunk} elements on the {self.mesh.shape[axis]} ranks of axis "
                    f"{self.mesh.mesh_dim_names[axis]!r} reach {max(reach, 0)} elements beyond offset {offset}, but a rank's "
                    f"piece of shape {tuple(global_shape)} has up to {numel}; give larger chunks, or a smaller offset."
                )

    def bounds(self, global_shape: Sequence[int], rank: int | None = None) -> Box:
        """What `rank` (default: this process) holds: an interval per tensor dim.

        Raises:
            LayoutError: as `check_shape`; or the layout is flat, so that it holds no box (see `boxes`).
        """
        return _bounds(self, tuple(global_shape), self.mesh.require_coordinate(rank))

    def boxes(self, global_shape: Sequence[int], rank: int | None = None) -> tuple[Box, ...]:
        """What `rank` (default: this process) holds, in the order in which its local tensor does, as boxes with elements.

        One at most, if the layout isn't flat; else up to 2d - 1 of a tensor of d dims. Raises as `check_shape`.
        """
        return _boxes(self, tuple(global_shape), self.mesh.require_coordinate(rank))

    def flat_interval(self, global_shape: Sequence[int], rank: int | None = None) -> Interval:
        """Which elements of the flattened piece, which other axes left to it, `rank` (default: this process) holds.

        Raises:
            LayoutError: as `check_shape`; or the layout isn't flat.
        """
        return _flat_interval(self, tuple(global_shape), self.mesh.require_coordinate(rank))

    def local_shape(self, global_shape: Sequence[int], rank: int | None = None) -> tuple[int, ...]:
        """Shape of the local tensor of `rank` (default: this process); it has one dim if the layout is flat."""
        return _local_shape(self, tuple(global_shape), self.mesh.require_coordinate(rank))

    def bounds_at(self, global_shape: Sequence[int], coordinate: tuple[int, ...]) -> Box:
        """Like `bounds`, by mesh coordinate."""
        return _bounds(self, tuple(global_shape), coordinate)

    def largest_local_shape(self, global_shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the local tensor of a rank that holds most."""
        coordinate = [0] * self.mesh.ndim  # the first rank along an axis, but where unequal shares say another
        if self.ragged is not None:
            coordinate[self.axes_of(0)[0]] = self.ragged.index(max(self.ragged))
        if self.flat is None:
            return _local_shape(self, tuple(global_shape), tuple(coordinate))
        axis = self.flat[0]
        places = ((*coordinate[:axis], index, *coordinate[axis + 1 :]) for index in range(self.mesh.shape[axis]))
        return max(_local_shape(self, tuple(global_shape), place) for place in places)

    def infer_global_shape(self, local_shape: Sequence[int]) -> tuple[int, ...]:
        """The global shape when every rank holds `local_shape` (even chunks)."""
        if self.ragged is not None or self.flat is not None:
            raise LayoutError(
                f"layout {self.compact_str}: ranks hold unequal shares, so the global shape can't be told from one local "
                f"shape {tuple(local_shape)}; pass shape=."
            )
        if len(self.dim_axes) > len(local_shape):
            self.check_shape(local_shape)
        result = list(local_shape)
        for dim, axes in enumerate(self.dim_axes):
            for axis in axes:
                result[dim] *= self.mesh.shape[axis]
        return tuple(result)

    # -- copying, printing ------------------------------------------------------------------------------------------

    def _names(self, axes: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(self.mesh.mesh_dim_names[axis] for axis in axes)

    def __reduce__(self) -> tuple[Any, ...]:
        return intern, (self.mesh, self.dim_axes, self.partials, self.ragged, self.flat)

    def __copy__(self) -> Layout:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        return self

    def __repr__(self) -> str:
        axes = ", ".join(f"{n}={s}" for n, s in zip(self.mesh.mesh_dim_names, self.mesh.shape, strict=True))
        return f"Layout[{axes}]{self.compact_str}" if self.dim_axes else f"Layout[{axes}] {self.compact_str}"


def intern(
    mesh: DeviceMesh,
    dim_axes: DimAxes = (),
    partials: Partials = (),
    ragged: tuple[int, ...] | None = None,
    flat: Flat | None = None,
) -> Layout:
    """The one Layout of this value; checked when it is new.

    Raises:
        LayoutError: an axis is used twice, or pending reductions of different kinds are mixed.
    """
    while dim_axes and not dim_axes[-1]:
        dim_axes = dim_axes[:-1]
    key = (mesh, dim_axes, partials, ragged, flat)
    layout = _interned.get(key)
    if layout is None:
        _check(mesh, dim_axes, partials, ragged, flat)
        layout = object.__new__(Layout)
        layout.mesh, layout.dim_axes, layout.partials, layout.ragged, layout.flat = key
        layout._placements = None
        layout._sharded = frozenset(axis for axes in dim_axes for axis in axes).union(flat[:1] if flat else ())
        layout = _interned.setdefault(key, layout)
    return layout


def from_placements(mesh: DeviceMesh, placements: Sequence[Any], ndim: int | None = None) -> Layout:
    """The layout of one placement per mesh axis; several shards of one dim nest in mesh order.

    Args:
        mesh: the mesh.
        placements: ours, or torch's (translated exactly, or refused).
        ndim: number of dims of the tensor; needed for negative dims.
    """
    if len(placements) != mesh.ndim:
        raise LayoutError(
            f"{len(placements)} placements {_texts(placements)} for the {mesh.ndim} axes of {mesh!r}; give one per axis."
        )
    dims: dict[int, list[int]] = {}
    partials: list[tuple[int, str]] = []
    ragged = None
    flat: Flat | None = None
    for axis, given in enumerate(placements):
        placement = given if isinstance(given, Placement) else _from_native(given)
        if isinstance(placement, Shard):
            dim = placement.dim
            if dim < 0:
                if ndim is None:
                    raise LayoutError(
                        f"placement {placement} counts dims from the end; say so with a tensor, or use a dim >= 0."
                    )
                dim += ndim
            if dim < 0 or (ndim is not None and dim >= ndim):
                raise LayoutError(
                    f"placement {placement} on axis {mesh.mesh_dim_names[axis]!r}: the tensor has {ndim} dims."
                )
            dims.setdefault(dim, []).append(axis)
        elif isinstance(placement, Partial):
            partials.append((axis, placement.reduce_op))
        elif isinstance(placement, RaggedShard):
            dims.setdefault(0, []).append(axis)
            ragged = placement.units
        elif isinstance(placement, FlatShard):
            if flat is not None:
                names = [mesh.mesh_dim_names[one] for one in (flat[0], axis)]
                raise LayoutError(
                    f"placements {_texts(placements)} are flat on axes {names}; one axis at most may share the flattened piece "
                    f"(mesh.flatten() makes one axis of several)."
                )
            flat = (axis, placement.chunk, placement.offset)
    dim_axes = tuple(tuple(dims.get(dim, ())) for dim in range(max(dims, default=-1) + 1))
    return intern(mesh, dim_axes, tuple(partials), ragged, flat)


def layout_of(mesh_or_layout: Any, placements: Sequence[Any] | None = None, ndim: int | None = None) -> Layout:
    """What users pass to say a layout: a `Layout`, or a mesh with placements (default: replicated).

    Raises:
        LayoutError: neither, both, or they don't fit together.
    """
    if isinstance(mesh_or_layout, Layout):
        if placements is not None:
            raise LayoutError("give a Layout, or a mesh with placements, not both.")
        return mesh_or_layout
    mesh = as_mesh(mesh_or_layout)
    return intern(mesh) if placements is None else _from_placements(mesh, tuple(placements), ndim)


@lru_cache(maxsize=1 << 12)
def _from_placements(mesh: DeviceMesh, placements: tuple[Any, ...], ndim: int | None) -> Layout:
    return from_placements(mesh, placements, ndim)


@lru_cache(maxsize=1 << 16)
def _bounds(layout: Layout, global_shape: tuple[int, ...], coordinate: tuple[int, ...]) -> Box:
    if layout.flat is not None:
        raise LayoutError(
            f"layout {layout.compact_str} shares flattened pieces, which are no boxes: ask boxes() or flat_interval() what a rank "
            f"holds, or redistribute to layout.unflat."
        )
    layout.check_shape(global_shape)
    box = []
    for dim, size in enumerate(global_shape):
        interval = (0, size)
        for axis in layout.axes_of(dim):
            if dim == 0 and layout.ragged is not None:
                interval = ragged_interval(interval, layout.ragged, coordinate[axis], size)
            else:
                interval = chunk_interval(interval, layout.mesh.shape[axis], coordinate[axis], size)
        box.append(interval)
    return tuple(box)


@lru_cache(maxsize=1 << 16)
def _flat_interval(layout: Layout, global_shape: tuple[int, ...], coordinate: tuple[int, ...]) -> Interval:
    if layout.flat is None:
        raise LayoutError(f"layout {layout.compact_str} shares no flattened pieces; ask bounds() what a rank holds.")
    layout.check_shape(global_shape)
    axis, chunk, offset = layout.flat
    numel = box_numel(_bounds(layout.unflat, global_shape, coordinate))
    return flat_share(numel, chunk, offset, coordinate[axis])


def _boxes(layout: Layout, global_shape: tuple[int, ...], coordinate: tuple[int, ...]) -> tuple[Box, ...]:
    box = _bounds(layout.unflat, global_shape, coordinate)
    if layout.flat is None:
        return (box,) if box_numel(box) else ()
    return flat_boxes(box, *_flat_interval(layout, global_shape, coordinate))


def _local_shape(layout: Layout, global_shape: tuple[int, ...], coordinate: tuple[int, ...]) -> tuple[int, ...]:
    if layout.flat is None:
        return box_shape(_bounds(layout, global_shape, coordinate))
    start, stop = _flat_interval(layout, global_shape, coordinate)
    return (stop - start,)


def _check(
    mesh: DeviceMesh, dim_axes: DimAxes, partials: Partials, ragged: tuple[int, ...] | None, flat: Flat | None
) -> None:
    used = (
        [axis for axes in dim_axes for axis in axes] + [axis for axis, _ in partials] + list(flat[:1] if flat else ())
    )
    for axis in used:
        if used.count(axis) > 1:
            raise LayoutError(
                f"mesh axis {mesh.mesh_dim_names[axis]!r} is used twice in one layout "
                f"(dims {[dim for dim, axes in enumerate(dim_axes) if axis in axes]}); an axis cuts one dim, or is partial, or "
                f"flat."
            )
    kinds = {reduce_op for _, reduce_op in partials}
    if len(kinds) > 1:
        names = {mesh.mesh_dim_names[axis]: reduce_op for axis, reduce_op in partials}
        raise LayoutError(f"pending reductions of different kinds can't be mixed: {names}; reduce one of them first.")
    if ragged is not None and (not dim_axes or len(dim_axes[0]) != 1):
        raise LayoutError(f"ragged shares {ragged} must be the only cut of dim 0.")
    if ragged is not None and len(ragged) != mesh.shape[dim_axes[0][0]]:
        name, size = mesh.mesh_dim_names[dim_axes[0][0]], mesh.shape[dim_axes[0][0]]
        raise LayoutError(f"ragged shares {ragged} are {len(ragged)}, but axis {name!r} has {size} ranks.")


def _from_native(placement: Any) -> Placement:
    kind = type(placement).__name__
    if kind == "Shard":
        return Shard(placement.dim)
    if kind == "Replicate":
        return Replicate()
    if kind in ("Partial", "_Partial"):
        return Partial(str(placement.reduce_op))
    raise LayoutError(
        f"placement {placement!r} ({kind}) has no equal here; say several axes on one dim as layout((outer, inner))."
    )


def _texts(placements: Sequence[Any]) -> str:
    return "[" + ", ".join(map(str, placements)) + "]"
