"""How ranks come to one result about what they hold: each tensor is judged by one rank, and the judgements are shared.

So a rank receives a few numbers per tensor and a few per rank, never some for each tensor of each rank, which would not do on
thousands of ranks. Only tensors whose replicas differ are looked at by all, and of those not more than `MOST_DETAILED`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from hp_core.debug.mixing import hash_of_text, mixed, signed, wrapped
from hp_core.debug.replicas import Holding, ReplicaDifference, compare_replicas
from hp_core.platform import get_platform
from hp_core.process_group import get_rank, group_of_ranks

__all__ = ["MOST_DETAILED", "Agreement", "Subject", "agree", "gathered"]

MOST_DETAILED = 64
"""Tensors that differ of which it is told how."""

_KNOWN, _UNKNOWN, _DIFFERS = range(3)


@dataclass(frozen=True, slots=True)
class Subject:
    """A tensor that ranks hold parts of.

    Attributes:
        name: its name.
        shape: global shape.
        kind: shape and element type, as text: tensors of equal bits may differ by it.
        whole: whether the parts make up one tensor.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    whole: bool


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks have come to.

    Attributes:
        ranks: what each rank said of itself.
        hashes: by tensor, the hash of the global one, or None.
        differences: of the first tensors whose replicas differ.
        untold: names of the others.
    """

    ranks: dict[int, int]
    hashes: dict[str, int | None]
    differences: tuple[ReplicaDifference, ...]
    untold: tuple[str, ...]


def agree(subjects: Sequence[Subject], holdings: Sequence[Holding], own_hash: int, ranks: tuple[int, ...]) -> Agreement:
    """Judge all tensors together with the other ranks.

    Args:
        subjects: the tensors; the same on all ranks.
        holdings: what this rank holds of each.
        own_hash: what this rank says of itself.
        ranks: the ranks that take part, ascending.
    """
    size, own = len(ranks), ranks.index(get_rank())
    mine = -(-len(subjects) // size)  # of each rank, the last may be missing
    columns = _dealt(holdings, ranks, mine)
    said = [signed(own_hash)]
    for place, column in enumerate(columns):
        position = own + place * size
        state, found = (_UNKNOWN, None) if position >= len(subjects) else _judged(subjects[position], column)
        said += [state, signed(found or 0)]
    table = gathered(said, ranks)
    hashes: dict[str, int | None] = {}
    differing = []
    for position, subject in enumerate(subjects):
        state, found = table[ranks[position % size]][1 + 2 * (position // size) :][:2]
        hashes[subject.name] = wrapped(found) if state == _KNOWN else None
        if state == _DIFFERS:
            differing.append(position)
    told, untold = differing[:MOST_DETAILED], differing[MOST_DETAILED:]
    return Agreement(
        ranks={rank: wrapped(row[0]) for rank, row in table.items()},
        hashes=hashes,
        differences=_differences([(subjects[position], holdings[position]) for position in told], ranks),
        untold=tuple(subjects[position].name for position in untold),
    )


def gathered(numbers: Sequence[int], ranks: tuple[int, ...]) -> dict[int, list[int]]:
    """What each rank says: one int64 or more, as many on each."""
    if len(ranks) == 1:
        return {ranks[0]: list(numbers)}
    platform = get_platform()
    group = group_of_ranks(ranks)
    sent = platform.tensors.from_ints(numbers, _here())
    received = platform.tensors.empty((group.size * len(numbers),), sent)
    platform.collectives.all_gather(received, sent, group)
    flat = platform.tensors.to_ints(received)
    return {rank: flat[at * len(numbers) : (at + 1) * len(numbers)] for at, rank in enumerate(group.ranks)}


def _dealt(holdings: Sequence[Holding], ranks: tuple[int, ...], mine: int) -> list[dict[int, Holding]]:
    """What all ranks hold of the tensors that this one judges: every `len(ranks)`-th, beginning with its own position."""
    size = len(ranks)
    if size == 1:
        return [{ranks[0]: holding} for holding in holdings]
    if not holdings:
        return []
    nothing = Holding(0, 0, 0)
    numbers: list[int] = []
    for judge in range(size):
        theirs = [*holdings[judge::size], nothing][:mine]
        for holding in theirs:
            numbers += (holding.place, holding.elements, holding.bits)
    platform = get_platform()
    sent = platform.tensors.from_ints(numbers, _here())
    received = platform.tensors.empty((len(numbers),), sent)
    platform.collectives.all_to_all(received, sent, (), (), group_of_ranks(ranks))
    flat = platform.tensors.to_ints(received)
    return [
        {rank: Holding(*flat[3 * (at * mine + place) :][:3]) for at, rank in enumerate(ranks)} for place in range(mine)
    ]


def _judged(subject: Subject, column: dict[int, Holding]) -> tuple[int, int | None]:
    """Whether the parts of a tensor agree, and the hash of it."""
    found, differ = compare_replicas(subject.name, subject.shape, prod(subject.shape), column, subject.whole)
    if differ:
        return _DIFFERS, None
    return (_UNKNOWN, None) if found is None else (_KNOWN, mixed(found + hash_of_text(subject.kind)))


def _differences(differing: Sequence[tuple[Subject, Holding]], ranks: tuple[int, ...]) -> tuple[ReplicaDifference, ...]:
    """How they differ: all ranks look at what all hold of these."""
    if not differing:
        return ()
    numbers = [number for _, one in differing for number in (one.place, one.elements, one.bits)]
    table = gathered(numbers, ranks)
    found: list[ReplicaDifference] = []
    for at, (subject, _) in enumerate(differing):
        column = {rank: Holding(*row[3 * at : 3 * at + 3]) for rank, row in table.items()}
        found += compare_replicas(subject.name, subject.shape, prod(subject.shape), column, subject.whole)[1]
    return tuple(found)


def _here() -> object:
    """Nothing, on the device that communicates."""
    tensors = get_platform().tensors
    return tensors.full((0,), 0, tensors.dtype_of_name("int64"), None)
