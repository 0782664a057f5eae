"""What a tensor is along one mesh axis: sharded, replicated, pending a reduction, or shared in unequal or flat parts.

A placement is a small immutable value without any framework type. A list of placements, one per mesh axis, is the
spelling users bring from torch; `hp_core.layout` turns it into the canonical form.
"""

from __future__ import annotations

from dataclasses import dataclass

from hp_core.errors import LayoutError

__all__ = ["REDUCE_OPS", "FlatShard", "Partial", "Placement", "RaggedShard", "Replicate", "Shard"]

REDUCE_OPS = ("sum", "avg", "max", "min")


class Placement:
    """Base of all placements."""

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether this is an even `Shard` (of tensor dim `dim`, if given)."""
        return isinstance(self, Shard) and (dim is None or self.dim == dim)

    def is_replicate(self) -> bool:
        """Whether every rank of the axis holds the same."""
        return isinstance(self, Replicate)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether a reduction over the axis is pending (with `reduce_op`, if given)."""
        return isinstance(self, Partial) and (reduce_op is None or self.reduce_op == reduce_op)


@dataclass(frozen=True, slots=True)
class Shard(Placement):
    """Tensor dim `dim` is cut into ceil-sized chunks (the semantics of `torch.chunk`), one per rank of the axis.

    A negative `dim` counts from the end; it is resolved when the layout meets a tensor's number of dims.
    """

    dim: int

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Every rank of the axis holds the same values."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Partial(Placement):
    """The value is the reduction, over the ranks of the axis, of what each holds.

    Args:
        reduce_op: "sum", "avg", "max" or "min".
    """

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in REDUCE_OPS:
            raise LayoutError(f"Partial({self.reduce_op!r}): unknown reduce op; use one of {', '.join(REDUCE_OPS)}.")

    def __str__(self) -> str:
        return f"P({self.reduce_op})"


@dataclass(frozen=True, slots=True)
class RaggedShard(Placement):
    """The leading tensor dim is shared in unequal parts: rank i of the axis gets `units[i] / sum(units)` of it.

    Args:
        units: one share per rank of the axis; zero is legal. Their sum must divide the size of the dim.
    """

    units: tuple[int, ...]

    def __init__(self, units: tuple[int, ...] | list[int]) -> None:
        object.__setattr__(self, "units", tuple(int(unit) for unit in units))
        if any(unit < 0 for unit in self.units) or sum(self.units) == 0:
            raise LayoutError(f"RaggedShard{self.units}: shares must be >= 0 and not all zero.")

    def __str__(self) -> str:
        return f"Ragged{self.units}"


@dataclass(frozen=True, slots=True)
class FlatShard(Placement):
    """What the other axes leave to a rank is flattened, row-major, and shared by elements: a part of a flat buffer.

    The buffer holds pieces one after another and is cut into one chunk for each rank of the axis. The piece at hand
    starts at element `offset` of it, so rank i has the elements [i * chunk - offset, (i + 1) * chunk - offset) of the
    flattened piece, as far as there are such. The local tensor has one dim; a share without elements is legal.

    Args:
        chunk: elements of the buffer that each rank of the axis holds.
        offset: where in the buffer the piece starts, in elements.
    """

    chunk: int
    offset: int = 0

    def __post_init__(self) -> None:
        if self.chunk < 0 or self.offset < 0:
            raise LayoutError(
                f"FlatShard({self.chunk}, {self.offset}): chunk and offset are numbers of elements, >= 0."
            )

    def __str__(self) -> str:
        return f"Flat({self.chunk}+{self.offset})"
