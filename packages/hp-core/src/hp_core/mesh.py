"""Named N-D arrangements of ranks.

A mesh is pure rank arithmetic and interned by value: equal shape, names and ranks are one object. Communication groups
are made lazily, by their members only, when something first communicates over an axis (see `process_group`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from math import prod
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hp_core.errors import MeshError

if TYPE_CHECKING:
    from hp_core.platform.protocol import Group

__all__ = ["DeviceMesh", "get_current_mesh", "init_device_mesh", "mesh_of_both"]

_DEVICE_TYPES = ("cpu", "cuda", "npu", None)

_interned: dict[tuple[tuple[int, ...], tuple[str, ...], tuple[int, ...]], DeviceMesh] = {}
_entered: list[DeviceMesh] = []


class DeviceMesh:
    """Ranks arranged in a named grid, row-major. Made by `init_device_mesh`; equal meshes are the same object.

    Attributes:
        shape: number of ranks along each axis.
        mesh_dim_names: name of each axis, outermost first.
        rank_list: the global ranks in row-major order.
        device_type: "cpu", "cuda", "npu", or None for the platform's own choice.
    """

    shape: tuple[int, ...]
    mesh_dim_names: tuple[str, ...]
    rank_list: tuple[int, ...]
    device_type: str | None

    def __new__(
        cls,
        shape: Sequence[int],
        mesh_dim_names: Sequence[str],
        rank_list: Iterable[int] | None = None,
        device_type: str | None = None,
    ) -> DeviceMesh:
        """Return the interned mesh of this value, checking it when it is new."""
        shape = tuple(int(size) for size in shape)
        names = tuple(mesh_dim_names)
        ranks = tuple(range(prod(shape))) if rank_list is None else tuple(int(rank) for rank in rank_list)
        if device_type not in _DEVICE_TYPES:
            raise MeshError(
                f"unknown device type {device_type!r}; a mesh is of {', '.join(repr(d) for d in _DEVICE_TYPES if d)}, or None for "
                f"the platform's own."
            )
        key = (shape, names, ranks)
        mesh = _interned.get(key)
        if mesh is None:
            _check(shape, names, ranks)
            mesh = super().__new__(cls)
            mesh.shape, mesh.mesh_dim_names, mesh.rank_list = key
            mesh.device_type = device_type
            mesh._axis_index = {name: index for index, name in enumerate(names)}
            mesh._position = {rank: position for position, rank in enumerate(ranks)}
            mesh._members = {}
            mesh = _interned.setdefault(key, mesh)
        elif device_type is not None and mesh.device_type != device_type:
            if mesh.device_type is not None:
                raise MeshError(
                    f"{mesh!r} already exists on device type {mesh.device_type!r}; it can't also be on {device_type!r}. "
                    f"Give the second mesh other axis names."
                )
            mesh.device_type = device_type
        return mesh

    _axis_index: dict[str, int]
    _position: dict[int, int]
    _members: dict[tuple[tuple[int, ...], int], tuple[int, ...]]

    # -- values -----------------------------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def axis_index(self, axis: str | int) -> int:
        """Position of a mesh axis given by name (or checked index).

        Raises:
            MeshError: there is no such axis.
        """
        if isinstance(axis, int) and -self.ndim <= axis < self.ndim:
            return axis % self.ndim
        index = self._axis_index.get(axis) if isinstance(axis, str) else None
        if index is None:
            raise MeshError(
                f"no mesh axis {axis!r}: this mesh has {dict(zip(self.mesh_dim_names, self.shape, strict=True))}. "
                f"Use one of {', '.join(map(repr, self.mesh_dim_names))}."
            )
        return index

    def size(self, axis: str | int | None = None) -> int:
        """Number of ranks along `axis`, or of the whole mesh."""
        return len(self.rank_list) if axis is None else self.shape[self.axis_index(axis)]

    def get_coordinate(self, rank: int | None = None) -> tuple[int, ...] | None:
        """Position of `rank` (default: this process) along each axis, or None if it isn't in the mesh."""
        position = self._position.get(self._own_rank() if rank is None else rank)
        if position is None:
            return None
        coordinate = []
        for size in reversed(self.shape):
            position, index = divmod(position, size)
            coordinate.append(index)
        return tuple(reversed(coordinate))

    def require_coordinate(self, rank: int | None = None) -> tuple[int, ...]:
        """Like `get_coordinate`, but being outside the mesh is an error."""
        coordinate = self.get_coordinate(rank)
        if coordinate is None:
            rank = self._own_rank() if rank is None else rank
            raise MeshError(f"rank {rank} is not part of {self!r}. Only its ranks may use tensors laid out on it.")
        return coordinate

    def get_local_rank(self, axis: str | int | None = None) -> int:
        """This process' position along `axis` (may be left out on a 1-D mesh)."""
        if axis is None and self.ndim != 1:
            raise MeshError(f"get_local_rank() needs an axis on a {self.ndim}-D mesh: one of {self.mesh_dim_names}.")
        return self.require_coordinate()[0 if axis is None else self.axis_index(axis)]

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """Global rank at a coordinate."""
        position = 0
        for size, index in zip(self.shape, coordinate, strict=True):
            position = position * size + index
        return self.rank_list[position]

    def members(self, axes: tuple[int, ...], rank: int | None = None) -> tuple[int, ...]:
        """Ranks that differ from `rank` only along `axes`, row-major in the order in which `axes` is given."""
        rank = self._own_rank() if rank is None else rank
        found = self._members.get((axes, rank))
        if found is None:
            base = list(self.require_coordinate(rank))
            ranks = []
            for indices in product(*(range(self.shape[axis]) for axis in axes)):
                for axis, index in zip(axes, indices, strict=True):
                    base[axis] = index
                ranks.append(self.rank_at(base))
            found = self._members[axes, rank] = tuple(ranks)
        return found

    # -- sub-meshes -------------------------------------------------------------------------------------------------

    def __getitem__(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        """The sub-mesh along the named axes that this process lies in."""
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        indices = self._distinct(names)
        shape = tuple(self.shape[index] for index in indices)
        return DeviceMesh(shape, names, self.members(indices), self.device_type)

    def flatten(self, mesh_dim_name: str | None = None) -> DeviceMesh:
        """The same ranks as one axis, called `mesh_dim_name` (default: the names joined by "_")."""
        name = "_".join(self.mesh_dim_names) if mesh_dim_name is None else mesh_dim_name
        return DeviceMesh((len(self.rank_list),), (name,), self.rank_list, self.device_type)

    def _distinct(self, axes: Sequence[str | int]) -> tuple[int, ...]:
        indices = tuple(self.axis_index(axis) for axis in axes)
        if len(set(indices)) != len(indices):
            raise MeshError(f"a mesh axis is named twice in {tuple(axes)}; name each axis once.")
        return indices

    # -- framework --------------------------------------------------------------------------------------------------

    def get_group(self, axis: str | int | tuple[str | int, ...] | None = None) -> Group:
        """The process group of this rank along one axis, or along several flattened to one.

        Members are ordered by global rank. A group of one rank needs no communication and no process world.
        """
        from hp_core.process_group import group_of_ranks

        if axis is None:
            if self.ndim != 1:
                raise MeshError(f"get_group() needs an axis on a {self.ndim}-D mesh: one of {self.mesh_dim_names}.")
            axis = 0
        indices = self._distinct(axis if isinstance(axis, tuple) else (axis,))
        return group_of_ranks(tuple(sorted(self.members(indices))))

    def to_torch(self) -> Any:
        """The same mesh as a `torch.distributed.DeviceMesh`, on the same process groups."""
        from hp_core.platform import get_platform

        return get_platform().mesh_to_native(self)

    @classmethod
    def from_torch(cls, mesh: Any) -> DeviceMesh:
        """The mesh of the same shape, names and ranks as a `torch.distributed.DeviceMesh`."""
        return as_mesh(mesh)

    def _own_rank(self) -> int:
        from hp_core.process_group import get_rank

        return get_rank()

    # -- context, copying, printing ---------------------------------------------------------------------------------

    def __enter__(self) -> DeviceMesh:
        """Make this the current mesh (`get_current_mesh`)."""
        _entered.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Restore the mesh that was current before."""
        _entered.pop()

    def __reduce__(self) -> tuple[Any, ...]:
        return DeviceMesh, (self.shape, self.mesh_dim_names, self.rank_list, self.device_type)

    def __copy__(self) -> DeviceMesh:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceMesh:
        return self

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in zip(self.mesh_dim_names, self.shape, strict=True))
        ranks = "" if self.rank_list == tuple(range(len(self.rank_list))) else f", ranks={list(self.rank_list)}"
        return f"DeviceMesh({axes}{ranks})"


def init_device_mesh(
    device_type: str | None,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    rank_list: Iterable[int] | None = None,
) -> DeviceMesh:
    """Arrange ranks in a named grid.

    Args:
        device_type: "cpu", "cuda" or "npu"; None takes the platform's own.
        mesh_shape: number of ranks along each axis, outermost first.
        mesh_dim_names: one name per axis; default "axis0", "axis1", ...
        rank_list: the ranks, row-major; default all ranks of the world, whose number must then be the mesh's size.

    Raises:
        MeshError: the sizes, names or ranks don't fit together or don't fit the world.
        PlatformError: the environment has come to name another framework than the one in use.
    """
    from hp_core.platform.select import require_choice_unchanged
    from hp_core.process_group import get_world_size

    require_choice_unchanged()
    shape = tuple(mesh_shape)
    names = tuple(f"axis{i}" for i in range(len(shape))) if mesh_dim_names is None else tuple(mesh_dim_names)
    world = get_world_size()
    if rank_list is None:
        if prod(shape) != world:
            raise MeshError(
                f"a mesh of shape {shape} needs {prod(shape)} ranks, but the world has {world}. "
                f"Launch {prod(shape)} processes (and call init_process_group first), change the shape, or give rank_list."
            )
    else:
        rank_list = tuple(rank_list)
        outside = [rank for rank in rank_list if not 0 <= rank < world]
        if outside:
            raise MeshError(f"rank_list names ranks {outside}, but the world has ranks 0 to {world - 1}.")
    return DeviceMesh(shape, names, rank_list, device_type)


def get_current_mesh() -> DeviceMesh | None:
    """The innermost mesh whose `with` block this process is in, or None."""
    return _entered[-1] if _entered else None


def as_mesh(mesh: Any) -> DeviceMesh:
    """Take one of our meshes or torch's, give ours. Every public function that takes a mesh goes through here."""
    if isinstance(mesh, DeviceMesh):
        return mesh
    names = getattr(mesh, "mesh_dim_names", None)
    grid = getattr(mesh, "mesh", None)
    if grid is None:
        raise MeshError(f"expected a DeviceMesh, got {type(mesh).__name__}: {mesh!r}.")
    shape = tuple(int(size) for size in grid.shape)
    if names is None:
        names = tuple(f"axis{i}" for i in range(len(shape)))
    ranks = [int(rank) for rank in grid.flatten().tolist()]
    return DeviceMesh(shape, names, ranks, mesh.device_type)


def mesh_of_both(left: DeviceMesh, right: DeviceMesh) -> DeviceMesh:
    """The mesh with the axes of two that have none in common, this process in the row of one and the column of the other.

    It is a sub-mesh of a mesh that both were taken from, and has that mesh's order of axes.

    Raises:
        MeshError: they share an axis, or there is no such mesh.
    """
    names = {*left.mesh_dim_names, *right.mesh_dim_names}
    shared = set(left.mesh_dim_names) & set(right.mesh_dim_names)
    if shared:
        raise MeshError(f"{left!r} and {right!r} both have the axis {sorted(shared)[0]!r}; take sub-meshes without it.")
    for mesh in list(_interned.values()):
        if not names <= set(mesh.mesh_dim_names) or mesh.get_coordinate() is None:
            continue
        if mesh[left.mesh_dim_names] is left and mesh[right.mesh_dim_names] is right:
            return mesh[tuple(name for name in mesh.mesh_dim_names if name in names)]
    raise MeshError(
        f"no mesh has the axes of both {left!r} and {right!r}; make one mesh of all axes with init_device_mesh() and take both "
        f"from it, such as mesh['dp'] and mesh['tp']."
    )


def _check(shape: tuple[int, ...], names: tuple[str, ...], ranks: tuple[int, ...]) -> None:
    if not shape or any(size < 1 for size in shape):
        raise MeshError(f"mesh shape {shape}: it needs at least one axis, and every axis at least one rank.")
    if len(names) != len(shape):
        raise MeshError(f"mesh shape {shape} has {len(shape)} axes, but {len(names)} names were given: {names}.")
    if len(set(names)) != len(names) or any(not isinstance(name, str) or not name or name == "None" for name in names):
        raise MeshError(f"mesh axis names {names} must be distinct non-empty strings other than 'None'.")
    if len(ranks) != prod(shape):
        raise MeshError(f"mesh shape {shape} needs {prod(shape)} ranks, but {len(ranks)} were given: {list(ranks)}.")
    if len(set(ranks)) != len(ranks):
        raise MeshError(f"a rank stands twice in the mesh: {list(ranks)}.")
