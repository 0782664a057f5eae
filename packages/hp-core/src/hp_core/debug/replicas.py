"""Which ranks hold the same part of a tensor, and whether they hold the same bits: a pure function of what all ranks told.

Without any framework: the hashes of parts come in, the hash of the global tensor and the differences go out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hp_core.debug.mixing import mixed, wrapped

__all__ = ["Holding", "ReplicaDifference", "compare_replicas"]

ABSENT = -1
"""The number of elements that stands for a tensor that isn't there, as a gradient may be."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What one rank holds of a tensor.

    Attributes:
        place: a number of which part it is; ranks with equal ones should hold equal bits.
        elements: how many; `ABSENT` if there is no such tensor here.
        bits: the hash of their bits.
    """

    place: int
    elements: int
    bits: int

    @property
    def text(self) -> str:
        """For people."""
        return "none" if self.elements == ABSENT else f"{wrapped(self.bits):016x}"


@dataclass(frozen=True, slots=True)
class ReplicaDifference:
    """Ranks that should hold the same part of a tensor, bit for bit, and don't.

    Attributes:
        name: of the parameter.
        shape: global shape.
        groups: ranks that do agree with each other, with the hash of what they hold ("none": there is no gradient); those that
            most ranks are of first.
    """

    name: str
    shape: tuple[int, ...]
    groups: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def odd_ranks(self) -> tuple[int, ...]:
        """The ranks that differ from most; empty if there is no majority, so that nobody can tell who is right."""
        (_, most), (_, second), *_ = self.groups
        if len(most) == len(second):
            return ()
        return tuple(sorted(rank for _, ranks in self.groups[1:] for rank in ranks))

    def __str__(self) -> str:
        parts = "; ".join(
            f"{_ranks(ranks)} {'holds' if len(ranks) == 1 else 'hold'} {text}" for text, ranks in self.groups
        )
        who = f": {_ranks(self.odd_ranks)} differs from the others" if len(self.odd_ranks) == 1 else ""
        return f"{self.name!r} {list(self.shape)}{who} ({parts})"


def compare_replicas(
    name: str, shape: tuple[int, ...], numel: int, holdings: Mapping[int, Holding], whole: bool = True
) -> tuple[int | None, list[ReplicaDifference]]:
    """Compare what ranks hold, and add up the hash of the global tensor.

    Args:
        name: of the parameter.
        shape: global shape.
        numel: elements of the global tensor.
        holdings: what each rank holds.
        whole: whether the parts make up one tensor; else each is a tensor of its own, and their order counts.

    Returns:
        The hash, or None if replicas differ, or if no rank has it; and the differences, one for each part.
    """
    parts: dict[int, dict[int, Holding]] = {}
    for rank, holding in sorted(holdings.items()):
        if holding.elements:  # who holds no element has no say
            parts.setdefault(holding.place, {})[rank] = holding
    differences = []
    for replicas in parts.values():
        if len({(one.elements, one.bits) for one in replicas.values()}) > 1:
            by_text: dict[str, list[int]] = {}
            for rank, one in replicas.items():
                by_text.setdefault(one.text, []).append(rank)
            groups = sorted(by_text.items(), key=lambda item: (-len(item[1]), item[1]))
            differences.append(ReplicaDifference(name, shape, tuple((text, tuple(ranks)) for text, ranks in groups)))
    firsts = [next(iter(replicas.values())) for replicas in parts.values()]
    if differences or any(first.elements == ABSENT for first in firsts):
        return None, differences
    if not whole:
        return wrapped(sum(mixed(first.bits + mixed(order)) for order, first in enumerate(firsts))), []
    if sum(first.elements for first in firsts) != numel:
        return None, []  # some parts are on ranks that weren't asked
    return wrapped(sum(first.bits for first in firsts)), []


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
