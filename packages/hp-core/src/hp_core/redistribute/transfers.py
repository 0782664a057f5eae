"""How many elements ranks hold, send and miss, for cuts written as token lists: the numbers behind the planner's costs.

The planner looks at many layouts that no tensor ever has, so cuts are plain tuples here and not interned `Layout`s. A
token below the number of mesh axes is an axis cut evenly; a token above it stands for an axis cut by ragged shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import product
from math import prod
from operator import mul, sub

from hp_core.geometry import Box, Interval, chunk_interval, intersect, ragged_interval

__all__ = ["EXACT_RANKS", "Cuts", "Dims", "Tokens"]

Tokens = tuple[int, ...]
Dims = tuple[Tokens, ...]

EXACT_RANKS = 64
"""Up to so many ranks, volumes come from the bounds of every rank; above, from even splits."""


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
        self.all_ranks = prod(sizes)
        self._all_axes = tuple(axis for axis, size in enumerate(sizes) if size > 1)
        self.axis_of = (*range(len(sizes)), *(axis for axis, _ in self.ragged))
        self._longest: dict[tuple[int, Tokens], int] = {}
        self._largest: dict[Dims, int] = {}
        self._sent: dict[tuple[Dims, Dims], int] = {}
        self._exchanged: dict[tuple[Dims, Dims], tuple[int, ...]] = {}
        self._interval_columns: dict[tuple[int, Tokens, tuple[int, ...]], list[Interval]] = {}
        self._overlap_columns: dict[tuple[int, Tokens, Tokens, tuple[int, ...]], list[int]] = {}

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
        found = self._exchanged.get((before, after))
        if found is None:
            axes: list[int] = []
            for old, new in zip(before, after, strict=True):
                if old != new:
                    axes += [self.axis_of[token] for token in old[common_prefix(old, new) :]]
            found = self._exchanged[before, after] = tuple(sorted(axes))
        return found

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
        axes = self._domain(changed, before, after)
        if axes is None:
            group = prod(self.sizes[axis] for axis in self.exchange_axes(before, after))
            return -(-self.largest(before) * (group - 1) // group)
        held = _products([self._overlaps(dim, before[dim], before[dim], axes) for dim in changed])
        kept = _products([self._overlaps(dim, before[dim], after[dim], axes) for dim in changed])
        rest = prod(self.longest(dim, before[dim]) for dim in range(len(before)) if dim not in changed)
        most: int = max(map(sub, held, kept))
        return most * rest

    def missing(self, held: Dims, wanted: Dims) -> int:
        """Elements of `wanted` that ranks don't hold under `held`, summed over the ranks of the mesh.

        On more than `EXACT_RANKS` ranks it is a lower bound: some dims are taken to overlap as much as they can.
        """
        wants = self.all_ranks // self.ranks(tuple(token for tokens in wanted for token in tokens)) * self.numel
        counted = list(range(len(held)))
        guess = 1
        if self.all_ranks > EXACT_RANKS:
            counted = []
            for dim, (old, new) in enumerate(zip(held, wanted, strict=True)):
                if self._domain([*counted, dim], wanted, held) is not None:
                    counted.append(dim)
                else:
                    guess *= min(self.longest(dim, old), self.longest(dim, new))
        axes = self._domain(counted, wanted, held) or ()
        kept = sum(_products([self._overlaps(dim, held[dim], wanted[dim], axes) for dim in counted]))
        return max(0, wants - kept * guess * (self.all_ranks // prod(self.sizes[axis] for axis in axes)))

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
            for peer in product(
                *(range(self.sizes[a]) if a in group else (i,) for a, i in zip(axes, index, strict=True))
            ):
                if peer != index:
                    sends += intersect(old[index], new[peer]) is not None
                    receives += intersect(old[peer], new[index]) is not None
                    if sends > 1 or receives > 1:
                        return False
        return True

    def _joint_axes(self, dims: list[int], first: Dims, second: Dims) -> tuple[int, ...]:
        """The axes that cut the given dims either way, ascending."""
        return tuple(sorted({self.axis_of[token] for dim in dims for token in first[dim] + second[dim]}))

    def _domain(self, dims: list[int], first: Dims, second: Dims) -> tuple[int, ...] | None:
        """The axes over whose indices to count for these dims, or None where they are too many.

        On a small mesh these are always all axes, so that columns of numbers are shared by all questions.
        """
        if self.all_ranks <= EXACT_RANKS:
            return self._all_axes
        axes = self._joint_axes(dims, first, second)
        return axes if prod(self.sizes[axis] for axis in axes) <= EXACT_RANKS else None

    def _intervals(self, dim: int, tokens: Tokens, axes: tuple[int, ...]) -> list[Interval]:
        """What is held of a dim, at all indices along `axes`, row-major."""
        found = self._interval_columns.get((dim, tokens, axes))
        if found is None:
            indices = product(*(range(self.sizes[axis]) for axis in axes))
            found = [self.interval(dim, tokens, dict(zip(axes, index, strict=True))) for index in indices]
            self._interval_columns[dim, tokens, axes] = found
        return found

    def _overlaps(self, dim: int, first: Tokens, second: Tokens, axes: tuple[int, ...]) -> list[int]:
        """Length of what both cuts of a dim hold, at all indices along `axes`, row-major."""
        found = self._overlap_columns.get((dim, first, second, axes))
        if found is None:
            pairs = zip(self._intervals(dim, first, axes), self._intervals(dim, second, axes), strict=True)
            found = [max(0, min(stop, high) - max(start, low)) for (start, stop), (low, high) in pairs]
            self._overlap_columns[dim, first, second, axes] = found
        return found


def _products(columns: list[list[int]]) -> list[int]:
    """Element by element, the product of columns of numbers (of none: the one index that there is)."""
    return list(reduce(lambda left, right: list(map(mul, left, right)), columns)) if columns else [1]


def common_prefix(first: Tokens, second: Tokens) -> int:
    """Number of leading tokens that two lists share."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count
