"""Where each parameter of a unit lies in the flat buffer that is cut into equal chunks, one per rank. Pure integers.

The buffer has `ranks * chunk` elements; rank r owns [r * chunk, (r + 1) * chunk). A border between two chunks may cut a
parameter only between two of its granules: elements, rows, or not at all. How items are packed is in `packing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from hp_core.errors import PlanError
from hp_fsdp.packing import pack

__all__ = ["FREE_PADDING", "MAX_PADDING", "MAX_WHOLE_PADDING", "BufferPlan", "Item", "granule_of", "plan_buffer"]

MAX_PADDING = 1.0
"""Padding that a plan may have by default, as a multiple of the items themselves."""

MAX_WHOLE_PADDING = 3.0
"""The same where a chunk is just the largest item that was to stay whole. Who asks for whole items in a unit of fewer items
than ranks asks for idle chunks: up to four times the buffer may be worth an optimizer that doesn't communicate.
"""

FREE_PADDING = 1 << 20
"""Elements of padding that are never refused, whatever the items."""


@dataclass(frozen=True)
class Item:
    """A parameter, as the planner sees it.

    Attributes:
        name: for messages.
        numel: number of elements, >= 0.
        granule: a chunk border may fall on multiples of this many elements, counted from the start of the parameter;
            `numel` keeps it whole.
    """

    name: str
    numel: int
    granule: int = 1


@dataclass(frozen=True)
class BufferPlan:
    """The layout of a flat buffer.

    Attributes:
        ranks: number of chunks.
        chunk: elements of each.
        offsets: where each item starts, in the order in which the items were given.
        numels: elements of each item.
        names: of each item, for `describe`.
    """

    ranks: int
    chunk: int
    offsets: tuple[int, ...]
    numels: tuple[int, ...]
    names: tuple[str, ...] = ()

    @cached_property
    def padding(self) -> int:
        """Elements of the buffer that belong to no item."""
        return self.ranks * self.chunk - sum(self.numels)

    def interval(self, item: int, rank: int) -> tuple[int, int]:
        """The elements of an item that lie in a rank's chunk, counted from the item's start; (n, n) or (0, 0) if none."""
        offset, numel = self.offsets[item], self.numels[item]
        start = min(max(rank * self.chunk - offset, 0), numel)
        stop = min(max((rank + 1) * self.chunk - offset, 0), numel)
        return start, stop

    def describe(self, itemsize: int = 1) -> str:
        """The plan as text for people: chunk, padding, and where each item lies, in the order of the buffer.

        Args:
            itemsize: bytes per element.
        """
        items = sum(self.numels)
        share = f"{100 * self.padding / items:.1f}% of the items" if items else "no items"
        lines = [
            f"{self.ranks} chunks of {self.chunk:,} elements ({self.chunk * itemsize:,} bytes), padding {self.padding:,} elements "
            f"({self.padding * itemsize:,} bytes, {share})"
        ]
        names = self.names or tuple(f"item {index}" for index in range(len(self.numels)))
        width = max(map(len, names), default=0)
        for index in sorted(range(len(names)), key=lambda index: (self.offsets[index], self.numels[index])):
            start, stop = self.offsets[index], self.offsets[index] + self.numels[index]
            first, last = (start // self.chunk, (stop - 1) // self.chunk) if stop > start else (0, -1)
            where = "no rank" if last < first else f"rank {first}" if first == last else f"ranks {first} to {last}"
            lines.append(f"  {names[index]:<{width}}  [{start:,}, {stop:,})  {where}")
        return "\n".join(lines)


def granule_of(granularity: str | int, shape: Sequence[int], name: str = "") -> int:
    """How many elements of a parameter a chunk border must not cut apart.

    Args:
        granularity: "element", "row" (a slice of dim 0), a number of rows, or "whole".
        shape: shape of what a rank holds of the parameter before the data axes cut it.
        name: of the parameter, for messages.

    Raises:
        PlanError: the granularity is something else.
    """
    shape = tuple(shape)
    numel = prod(shape)
    rows = granularity if isinstance(granularity, int) and not isinstance(granularity, bool) else None
    if granularity == "row":
        rows = 1
    if granularity == "element":
        granule = 1
    elif granularity == "whole":
        granule = numel
    elif rows is not None and rows >= 1:
        granule = min(rows * prod(shape[1:]), numel)
    else:
        raise PlanError(
            f"granularity {granularity!r}{f' of {name!r}' if name else ''} (shape {shape}): give 'element', 'row', a number of "
            f"rows >= 1, or 'whole'."
        )
    return max(granule, 1)


def plan_buffer(items: Sequence[Item], ranks: int, align: int = 1, *, max_padding: float | None = None) -> BufferPlan:
    """Lay items out in the smallest buffer that is found, borders on granules.

    The order of items is kept where that costs nothing; else they are reordered, with gaps where borders ask for them.
    Equal arguments give equal plans.

    Args:
        items: what the buffer holds.
        ranks: number of chunks.
        align: chunks are a multiple of this many elements.
        max_padding: how much padding is accepted, as a multiple of the items' own elements (`math.inf`: any). By default
            `MAX_PADDING`, or `MAX_WHOLE_PADDING` where whole items are fewer than ranks, and always `FREE_PADDING` elements.

    Raises:
        PlanError: the granules cost more padding than is accepted; or a number makes no sense.
    """
    _check(items, ranks, align, max_padding)
    plan = _planned(items, ranks, align)
    if plan.padding > _accepted(items, plan, align, max_padding):
        raise PlanError(_refusal(items, plan, align, max_padding))
    return plan


def _planned(items: Sequence[Item], ranks: int, align: int) -> BufferPlan:
    numels = tuple(item.numel for item in items)
    chunk, offsets = pack(numels, [min(item.granule, item.numel) for item in items], ranks, align)
    return BufferPlan(ranks, chunk, offsets, numels, tuple(item.name for item in items))


def _accepted(items: Sequence[Item], plan: BufferPlan, align: int, max_padding: float | None) -> float:
    """Elements of padding that are accepted."""
    numel = sum(plan.numels)
    aligned = plan.ranks * align  # what rounding chunks up costs was asked for
    if max_padding is not None:
        return max_padding * numel + aligned
    largest_whole = max((item.numel for item in items if item.granule >= item.numel), default=0)
    share = MAX_WHOLE_PADDING if plan.chunk - align < largest_whole else MAX_PADDING
    return max(share * numel + aligned, FREE_PADDING)


def _refusal(items: Sequence[Item], plan: BufferPlan, align: int, max_padding: float | None) -> str:
    numel = max(sum(plan.numels), 1)
    worst = max(items, key=lambda item: min(item.granule, item.numel))
    kept = "whole" if worst.granule >= worst.numel else f"in pieces of {worst.granule:,}"
    freed, cheaper = _freed_until_accepted(items, plan, align, max_padding)
    which = f"{worst.name!r}" if freed == 1 else f"{worst.name!r} and {freed - 1} others with large pieces"
    accepted = int(_accepted(items, plan, align, max_padding))
    return (
        f"no plan for {len(items)} parameters ({numel:,} elements) over {plan.ranks} ranks pads as little as is accepted: the best "
        f"found has chunks of {plan.chunk:,} elements and {plan.padding:,} of padding ({plan.padding / numel:.0%}); accepted are "
        f"{accepted:,}. It is {worst.name!r} ({worst.numel:,} elements, to be kept {kept}) that forces such chunks. Choose "
        f"'element' or smaller pieces for {which} (padding {cheaper.padding / numel:.1%}), shard over fewer ranks, put more "
        f"parameters into the unit, or accept it with max_padding={plan.padding / numel + 0.01:.2f}."
    )


def _freed_until_accepted(
    items: Sequence[Item], plan: BufferPlan, align: int, max_padding: float | None
) -> tuple[int, BufferPlan]:
    """How many items, those of the largest granules, must be cut by elements until the padding is accepted; and the plan."""
    granules = sorted({min(item.granule, item.numel) for item in items} - {0}, reverse=True)
    for granule in granules:
        large = [min(item.granule, item.numel) >= granule for item in items]
        freed = [replace(item, granule=1) if is_large else item for item, is_large in zip(items, large, strict=True)]
        cheaper = _planned(freed, plan.ranks, align)
        if cheaper.padding <= _accepted(freed, cheaper, align, max_padding):
            break
    return sum(large), cheaper


def _check(items: Sequence[Item], ranks: int, align: int, max_padding: float | None) -> None:
    if ranks < 1 or align < 1:
        raise PlanError(f"plan_buffer(ranks={ranks}, align={align}): both must be >= 1.")
    if max_padding is not None and not max_padding >= 0:
        raise PlanError(
            f"plan_buffer(max_padding={max_padding}): it must be >= 0, as a multiple of the items' elements."
        )
    for item in items:
        if item.numel < 0 or item.granule < 1:
            raise PlanError(f"{item!r}: its numel must be >= 0 and its granule >= 1.")
