"""How many elements ranks hold, send and miss, for cuts written as token lists: the numbers behind the planner's costs.

The planner looks at many layouts that no tensor ever has, so cuts are plain tuples here and not interned `Layout`s. A
token below the number of mesh axes is an axis cut evenly; a token above it stands for an axis cut by ragged shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from hp_core.geometry import Box, Interval, chunk_interval, intersect, ragged_interval

__all__ = ["EXACT_RANKS", "Cuts", "Dims", "Tokens"]

Tokens = tuple[int, ...]
Dims = tuple[Tokens, ...]

EXACT_RANKS = 64
"""Up to so many ranks, volumes come from the bounds of every rank; above, from even splits."""

_Table = dict[tuple[int, ...], tuple[int, int]]


class Cuts:
    """Volumes under all cuts of one tensor on one mesh; every answer is remembered.

    Args:
        sizes: number of ranks along each mesh axis.
        shape: shape of the global tensor.
        ragged: the pairs (axis, shares) that tokens `len(sizes)`, `len(sizes) + 1`, ... stand for.
    """

    def __init__(
        self, sizes: tuple[int, ...], shape: tuple[int, ...], ragged: Sequence[tuple[int, tuple[int, ...]]] = ()
    ) -> None:
        self.sizes = sizes
        self.shape = shape
        self.ragged = tuple(ragged)
        self.numel = prod(shape)
        self.axis_of = (*range(len(sizes)), *(axis for axis, _ in self.ragged))
        self._longest: dict[tuple[int, Tokens], int] = {}
        self._largest: dict[Dims, int] = {}
        self._sent: dict[tuple[Dims, Dims], int] = {}
        self._tables: dict[tuple[int, Tokens, Tokens], tuple[tuple[int, ...], _Table]] = {}

    def is_ragged(self, token: int) -> bool:
        """Whether the token stands for ragged shares."""
        return token >= len(self.sizes)

    def ranks(self, tokens: Tokens) -> int:
        """Number of pieces that these cuts make."""
        return prod(self.sizes[self.axis_of[token]] for token in tokens)

    def interval(self, dim: int, tokens: Tokens, index_of: dict[int, int]) -> Interval:
        """What the rank at these indices along the axes holds of a dim."""
        size = self.shape[dim]
        interval = (0, size)
        for token in tokens:
            axis = self.axis_of[token]
            if self.is_ragged(token):
                shares = self.ragged[token - len(self.sizes)][1]
                interval = ragged_interval(interval, shares, index_of[axis], size)
            else:
                interval = chunk_interval(interval, self.sizes[axis], index_of[axis], size)
        return interval

    def longest(self, dim: int, tokens: Tokens) -> int:
        """Length of the longest piece of a dim."""
        found = self._longest.get((dim, tokens))
        if found is None:
            found = self.shape[dim]
            for token in tokens:
                if self.is_ragged(token):
                    shares = self.ragged[token - len(self.sizes)][1]
                    found = found // sum(shares) * max(shares)
                else:
                    found = -(-found // self.sizes[token])
            self._longest[dim, tokens] = found
        return found

    def largest(self, dims: Dims) -> int:
        """Elements of the largest local tensor."""
        found = self._largest.get(dims)
        if found is None:
            found = self._largest[dims] = prod(self.longest(dim, tokens) for dim, tokens in enumerate(dims))
        return found

    def exchange_axes(self, before: Dims, after: Dims) -> tuple[int, ...]:
        """The axes over which an exchange from `before` to `after` runs: all outside the common prefixes, ascending."""
        axes: list[int] = []
        for old, new in zip(before, after, strict=True):
            if old != new:
                axes += [self.axis_of[token] for token in old[common_prefix(old, new) :]]
        return tuple(sorted(axes))

    def sent(self, before: Dims, after: Dims) -> int:
        """Elements that the busiest rank sends in an exchange.

        The boxes after it are a partition of what the group holds, so a rank sends all that it doesn't keep.
        """
        found = self._sent.get((before, after))
        if found is None:
            found = self._sent[before, after] = self._count_sent(before, after)
        return found

    def _count_sent(self, before: Dims, after: Dims) -> int:
        changed = [dim for dim in range(len(before)) if before[dim] != after[dim]]
        if prod(self.sizes[axis] for axis in self._joint_axes(changed, before, after)) > EXACT_RANKS:
            group = prod(self.sizes[axis] for axis in self.exchange_axes(before, after))
            return -(-self.largest(before) * (group - 1) // group)
        axes, tables = self._joint(changed, before, after)
        most = 0
        for coordinate in product(*(range(self.sizes[axis]) for axis in axes)):
            held = kept = 1
            for places, table in tables:
                length, overlap = table[tuple([coordinate[place] for place in places])]
                held *= length
                kept *= overlap
            most = max(most, held - kept)
        return most * prod(self.longest(dim, before[dim]) for dim in range(len(before)) if dim not in changed)

    def is_permutation(self, before: Dims, after: Dims) -> bool:
        """Whether in an exchange every rank sends to at most one other rank, and receives from at most one.

        Where telling would take more than `EXACT_RANKS` squared comparisons, the answer is no.
        """
        changed = [dim for dim in range(len(before)) if before[dim] != after[dim]]
        axes = self._joint_axes(changed, before, after)
        group = self.exchange_axes(before, after)
        count = prod(self.sizes[axis] for axis in axes)
        if count * prod(self.sizes[axis] for axis in group) > EXACT_RANKS**2:
            return False
        old: dict[tuple[int, ...], Box] = {}
        new: dict[tuple[int, ...], Box] = {}
        for index in product(*(range(self.sizes[axis]) for axis in axes)):
            index_of = dict(zip(axes, index, strict=True))
            old[index] = tuple(self.interval(dim, before[dim], index_of) for dim in changed)
            new[index] = tuple(self.interval(dim, after[dim], index_of) for dim in changed)
        for index in old:
            sends = receives = 0
            for peer in product(*(range(self.sizes[a]) if a in group else (i,) for a, i in zip(axes, index, strict=True))):
                if peer != index:
                    sends += intersect(old[index], new[peer]) is not None
                    receives += intersect(old[peer], new[index]) is not None
                    if sends > 1 or receives > 1:
                        return False
        return True

    def missing(self, held: Dims, wanted: Dims) -> int:
        """Elements of `wanted` that ranks don't hold under `held`, summed over the ranks of the mesh.

        On more than `EXACT_RANKS` ranks it is a lower bound: some dims are taken to overlap as much as they can.
        """
        ranks = prod(self.sizes)
        wants = ranks // self.ranks(tuple(token for tokens in wanted for token in tokens)) * self.numel
        joint: list[int] = []
        rest = 1
        total = 1
        for dim, (old, new) in enumerate(zip(held, wanted, strict=True)):
            if old == new:
                rest *= self.shape[dim]
                total *= self.ranks(old)
            elif prod(self.sizes[axis] for axis in self._joint_axes([*joint, dim], wanted, held)) <= EXACT_RANKS:
                joint.append(dim)
            else:
                rest *= min(self.longest(dim, old), self.longest(dim, new))
        axes, tables = self._joint(joint, wanted, held)
        total *= prod(self.sizes[axis] for axis in axes)
        kept = 0
        for coordinate in product(*(range(self.sizes[axis]) for axis in axes)):
            overlap = 1
            for places, table in tables:
                overlap *= table[tuple([coordinate[place] for place in places])][1]
                if not overlap:
                    break
            kept += overlap
        return max(0, wants - kept * rest * ranks // total)

    def _joint_axes(self, dims: list[int], first: Dims, second: Dims) -> tuple[int, ...]:
        """The axes that cut the given dims either way."""
        return tuple(dict.fromkeys(self.axis_of[token] for dim in dims for token in first[dim] + second[dim]))

    def _joint(
        self, dims: list[int], first: Dims, second: Dims
    ) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], _Table]]]:
        """The axes that cut the given dims either way; per dim, where its axes stand among them, and its table."""
        axes = self._joint_axes(dims, first, second)
        found = [self._table(dim, first[dim], second[dim]) for dim in dims]
        return axes, [(tuple(axes.index(axis) for axis in own), table) for own, table in found]

    def _table(self, dim: int, first: Tokens, second: Tokens) -> tuple[tuple[int, ...], _Table]:
        """For one dim: the axes that cut it either way, and by their indices (length of first, overlap with second)."""
        found = self._tables.get((dim, first, second))
        if found is None:
            axes = tuple(dict.fromkeys(self.axis_of[token] for token in first + second))
            table: _Table = {}
            for index in product(*(range(self.sizes[axis]) for axis in axes)):
                index_of = dict(zip(axes, index, strict=True))
                start, stop = self.interval(dim, first, index_of)
                low, high = self.interval(dim, second, index_of)
                table[index] = (stop - start, max(0, min(stop, high) - max(start, low)))
            found = self._tables[dim, first, second] = (axes, table)
        return found


def common_prefix(first: Tokens, second: Tokens) -> int:
    """Number of leading tokens that two lists share."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count
