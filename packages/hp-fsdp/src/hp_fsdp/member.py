"""One parameter of a unit: where modules hold it, what it looks like whole, and where it lies in the flat buffer."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hp_core.layout import Layout
from hp_core.platform.protocol import DType, Tensor

if TYPE_CHECKING:
    from hp_fsdp.unit import Unit

__all__ = ["Holder", "Member"]

Holder = tuple[Any, str]
"""A module and the name under which it holds a parameter."""


@dataclass(eq=False)
class Member:
    """A parameter of a unit.

    Attributes:
        name: its dotted name below the unit's module, for messages.
        holders: where it is held; more than one for a tied parameter.
        shape: global shape.
        local_shape: shape of this rank's piece before sharding over the data axes: the global one, or the tp-local one.
        outer: layout on the other axes, for a parameter that was a DTensor before; else None.
        dtype: element type of the shard.
        requires_grad: whether its gradient was wanted when it was sharded.
        granule: chunk borders fall on multiples of this many elements.
        replicated: whether every rank keeps the whole, so that only its gradient is communicated.
        unit: the unit that it is part of.
        offset: where it starts in the flat buffer.
        start: first element of the shard, counted in the flattened local piece.
        stop: one past the last.
        sharded: the DTensor parameter on this rank's chunk: what modules hold between uses.
        shard: its local tensor, a view of the chunk.
        address: where in memory that was put.
        full: the parameter on the flat buffer: what modules hold while they compute.
        leaf: the tensor of `full` on which the engine accumulates.
        landing: where in the flat gradient buffer its gradient belongs, in the shape of `leaf`.
        handles: of the hooks on `leaf`.
    """

    name: str
    holders: list[Holder]
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    outer: Layout | None
    dtype: DType
    requires_grad: bool
    granule: int = 1
    replicated: bool = False
    unit: Unit = None  # type: ignore[assignment]
    offset: int = 0
    start: int = 0
    stop: int = 0
    sharded: Any = None
    shard: Tensor = None
    address: int = 0
    full: Any = None
    leaf: Tensor = None
    landing: Tensor = None
    handles: list[Any] = field(default_factory=list)

    @property
    def numel(self) -> int:
        """Elements of this rank's piece before sharding over the data axes."""
        numel = 1
        for size in self.local_shape:
            numel *= size
        return numel

    def __getstate__(self) -> dict[str, Any]:
        """What a file has of it: nothing that is made anew when the parameter is first used."""
        return self.__dict__ | {"shard": None, "full": None, "leaf": None, "landing": None, "handles": []}

    def copied(self, memo: dict[int, Any]) -> Member:
        """The member of a copy of its module: the same place, a parameter of its own, nothing gathered."""
        twin = copy.copy(self)
        memo[id(self)] = twin
        twin.holders = [(copy.deepcopy(module, memo), name) for module, name in self.holders]
        twin.sharded = copy.deepcopy(self.sharded, memo)
        twin.shard = getattr(twin.sharded, "_local", twin.sharded)
        twin.full = twin.leaf = twin.landing = None
        twin.handles = []
        return twin
