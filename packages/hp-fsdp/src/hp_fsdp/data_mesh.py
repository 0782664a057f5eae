"""The data axes of a unit: over which ranks it is sharded and replicated, and how its shards lie on the whole mesh."""

from __future__ import annotations

from functools import cached_property

from hp_core.errors import MeshError
from hp_core.layout import Layout, from_placements
from hp_core.mesh import DeviceMesh, as_mesh, mesh_of_both
from hp_core.placement import FlatShard, Placement, Replicate
from hp_core.platform.protocol import Group
from hp_core.process_group import group_of_ranks

__all__ = ["DataMesh"]


class DataMesh:
    """The mesh that `fully_shard` was given: `(shard,)`, or `(replicate, shard)` for HSDP.

    Attributes:
        mesh: the mesh.
        shards: number of ranks that share a unit.
        shard_index: which of them this process is.
        replicas: number of ranks that hold the same shard.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        mesh = as_mesh(mesh)
        if mesh.ndim > 2:
            raise MeshError(
                f"fully_shard() takes a mesh of one axis (FSDP) or two (HSDP: replicate, shard), got {mesh!r}; pick the data "
                f"axes, mesh['dp'] for example."
            )
        coordinate = mesh.require_coordinate()
        members = mesh.members((mesh.ndim - 1,))
        if list(members) != sorted(members):
            raise MeshError(
                f"fully_shard(): along its shard axis {mesh!r} has the ranks in the order {list(members)}; give a mesh whose ranks "
                f"ascend along that axis."
            )
        self.mesh = mesh
        self.shards = mesh.shape[-1]
        self.shard_index = coordinate[-1]
        self.replicas = mesh.shape[0] if mesh.ndim == 2 else 1

    @property
    def size(self) -> int:
        """Number of ranks that compute on different data."""
        return self.shards * self.replicas

    @cached_property
    def gather_group(self) -> Group:
        """The ranks that share a unit."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    @cached_property
    def reduce_group(self) -> Group:
        """The same ranks on a group of its own, so that reductions and gathers don't queue behind each other."""
        return group_of_ranks(self.gather_group.ranks, "reductions")

    @cached_property
    def replica_group(self) -> Group | None:
        """The ranks that hold the same shard, for HSDP."""
        return self.mesh.get_group(0) if self.mesh.ndim == 2 else None

    def neighbours(self, count: int) -> tuple[int, ...]:
        """The `count` ranks that share a unit and hold, together, all of it after a reshard among them."""
        ranks = self.gather_group.ranks
        start = self.shard_index // count * count
        return ranks[start : start + count]

    def sharded_layout(self, outer: Layout | None, chunk: int, offset: int) -> Layout:
        """The layout of a shard on the mesh of the data axes and of those that the parameter was laid out on before."""
        own: list[Placement] = [Replicate()] * (self.mesh.ndim - 1) + [FlatShard(chunk, offset)]
        if outer is None:
            return from_placements(self.mesh, own)
        mesh = mesh_of_both(self.mesh, outer.mesh)
        placements: dict[str, Placement] = dict(zip(self.mesh.mesh_dim_names, own, strict=True))
        placements |= dict(zip(outer.mesh.mesh_dim_names, outer.placements, strict=True))
        return from_placements(mesh, [placements[name] for name in mesh.mesh_dim_names])

    def __reduce__(self) -> tuple[type, tuple[DeviceMesh]]:
        return DataMesh, (self.mesh,)

    def __repr__(self) -> str:
        return f"DataMesh({self.mesh!r})"
