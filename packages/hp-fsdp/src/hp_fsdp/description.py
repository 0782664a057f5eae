"""What a unit says of itself to `hp_core.debug.describe`: its state, its bytes, and what waits for a reduction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_core.platform import get_platform
from hp_core.protocols import UnitDescription
from hp_fsdp.platform import get_tools

if TYPE_CHECKING:
    from hp_fsdp.unit import Unit

__all__ = ["describe_unit"]


def describe_unit(unit: Unit) -> UnitDescription:
    """Describe a unit as it is now; nothing is gathered, moved or communicated."""
    tensors, tools = get_platform().tensors, get_tools()
    cut = [segment for segment in unit.segments if not segment.members[0].replicated]
    shard = whole = padding = 0
    for segment in cut:
        width = tensors.itemsize(segment.compute_dtype)
        shard += segment.plan.chunk * tensors.itemsize(segment.dtype)
        whole += segment.plan.ranks * segment.plan.chunk * width
        padding += segment.plan.padding * width
    waiting = "gradients not reduced" if unit.accumulating else ""
    if unit.partial:
        waiting = "gradients not reduced over replicas"
    data = unit.data
    return UnitDescription(
        identity=id(unit),
        name=unit.name,
        state=unit.state.value,
        parameters=len(unit.members),
        holders=tuple(holder for member in unit.members for holder in member.holders),
        ranks=({"replicas": data.replicas} if data.mesh.ndim == 2 else {}) | {"shards": data.shards},
        shard_bytes=shard,
        whole_bytes=whole,
        gathered=any(segment.buffer is not None and tools.is_allocated(segment.buffer) for segment in cut),
        padding=padding / whole if whole else 0.0,
        waiting=waiting,
    )
