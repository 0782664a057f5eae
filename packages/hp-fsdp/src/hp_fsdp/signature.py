"""One check, when a root is first used: all ranks have sharded the same modules, in the same order, with the same choices."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from hp_core.errors import PlanError
from hp_core.mesh import DeviceMesh
from hp_core.platform import get_platform
from hp_core.process_group import get_rank

if TYPE_CHECKING:
    from hp_fsdp.unit import Unit

__all__ = ["check_alike", "exchange"]


def check_alike(units: list[Unit]) -> None:
    """Compare this rank's units with those of the other ranks; two small all-gathers when all is well.

    Raises:
        PlanError: they differ: the first difference is named, alike on all ranks.
    """
    for mesh in dict.fromkeys(unit.data.mesh for unit in units):
        lines = [line for unit in units if unit.data.mesh is mesh for line in _lines(unit)]
        _compare(mesh, lines, [unit for unit in units if unit.data.mesh is mesh])


def _lines(unit: Unit) -> list[str]:
    tensors = get_platform().tensors
    keeps = unit.switches.keep_among or unit.switches.reshard_after_forward
    found = [f"unit of {unit.name}: {unit.policy}, reshard_after_forward={keeps}, overlap={unit.overlap}"]
    for segment in unit.segments:
        for member in segment.members:
            found.append(
                f"{member.name} {member.shape} {tensors.dtype_name(member.dtype)} trained={member.requires_grad} "
                f"at {member.offset} of {segment.plan.chunk} x {segment.plan.ranks}{' replicated' if member.replicated else ''}"
            )
    return found


def _compare(mesh: DeviceMesh, lines: list[str], units: list[Unit]) -> None:
    sample = next((segment.chunk for unit in units for segment in unit.segments), None)
    if mesh.size() == 1 or sample is None:
        return
    text = "\n".join(lines)
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    table = exchange(mesh, [digest, len(text.encode())], sample)
    if all(row == table[0] for row in table):
        return
    longest = max(row[1] for row in table)
    octets = list(text.encode()) + [0] * (longest - len(text.encode()))
    texts = [bytes(row).rstrip(b"\0").decode().splitlines() for row in exchange(mesh, octets, sample)]
    first = texts[0]
    for position, other in enumerate(texts):
        if other != first:
            place = next(
                (i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), min(len(first), len(other))
            )
            here, there = (one[place] if place < len(one) else "nothing more" for one in (first, other))
            raise PlanError(
                f"rank {get_rank()}: ranks have sharded other modules, or in another order: rank {mesh.rank_list[0]} has ({here}), "
                f"rank {mesh.rank_list[position]} has ({there}). Build the same model and call fully_shard() alike on all ranks."
            )


def exchange(mesh: DeviceMesh, row: list[int], like: Any) -> list[list[int]]:
    """Everybody's row of integers, in the order of the mesh's ranks."""
    platform = get_platform()
    group = mesh.get_group(mesh.mesh_dim_names)
    own = platform.tensors.from_ints(row, like)
    rows = platform.tensors.from_ints([0] * (len(row) * group.size), like)
    platform.collectives.all_gather(rows, own, group)
    values = platform.tensors.to_ints(rows)
    by_rank = {rank: values[i * len(row) : (i + 1) * len(row)] for i, rank in enumerate(group.ranks)}
    return [by_rank[rank] for rank in mesh.rank_list]
