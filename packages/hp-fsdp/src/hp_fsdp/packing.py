"""The search behind `plan`: the smallest chunk into which items can be packed so that borders fall on granules.

It is bin packing with items that may straddle borders, which is hard to solve exactly; so a few ways to pack are tried
for each chunk size, from the least possible one upward. Integers in, integers out, always the same for the same input.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import combinations, permutations
from math import lcm

__all__ = ["least_chunk", "pack"]

FEW = 64
"""Up to so many items, and sizes of chunks, the search may look at every size."""


def pack(numels: Sequence[int], granules: Sequence[int], ranks: int, align: int) -> tuple[int, tuple[int, ...]]:
    """Find a small chunk and the offsets of items in a buffer of `ranks` chunks.

    Args:
        numels: elements of each item.
        granules: for each item, borders may fall on multiples of this many elements from its start; `numel`: on none.
        ranks: number of chunks.
        align: chunks are a multiple of this.
    """
    packing = _Packing(numels, granules, ranks)
    least = _round_up(least_chunk(numels, granules, ranks), align)
    best = _round_up(max(sum(numels), 1), align)  # all in one chunk
    offsets: Sequence[int] | None = packing.in_sequence(range(len(numels)), best)
    assert offsets is not None
    for step in _steps(packing, align, best):
        best, offsets = _search(packing, step, least, best, offsets)
        if best == least:
            break
    return best, tuple(offsets)


def least_chunk(numels: Sequence[int], granules: Sequence[int], ranks: int) -> int:
    """A size that no chunk can be smaller than: every item, and all together, must find room."""
    least = max(-(-sum(numels) // ranks), 1)
    for numel, granule in zip(numels, granules, strict=True):
        if granule > 1:
            pieces = -(-numel // granule)
            most = -(-pieces // ranks)  # some chunk holds so many of them, of which one may be the shorter last
            least = max(
                least, most * granule if most * ranks > pieces - 1 + ranks else numel - (pieces - most) * granule
            )
    return least


def _steps(packing: _Packing, align: int, limit: int) -> list[int]:
    """Sizes of which chunks should be multiples: of `align`, and of granules, so that items of these may straddle often."""
    granules = packing.row_granules
    if len(granules) <= 4:
        chosen: Iterator[tuple[int, ...]] = (
            some for count in range(len(granules) + 1) for some in combinations(granules, count)
        )
    else:
        chosen = (tuple(granules[:count]) for count in (0, 1, 2, 3, 4, 6, 8, len(granules)) if count <= len(granules))
    steps = {lcm(align, *some) for some in chosen}
    return sorted(step for step in steps if step <= limit)


def _search(packing: _Packing, step: int, least: int, best: int, offsets: Sequence[int]) -> tuple[int, Sequence[int]]:
    """The smallest chunk found among the multiples of `step` from `least` up to `best`, and the offsets for it."""
    low = _round_up(least, step)
    few = len(packing.numels) <= FEW
    if few and (best - low) // step <= FEW:
        for chunk in range(low, best, step):
            found = packing.pack(chunk)
            if found is not None:
                return chunk, found
        return best, offsets
    failed, stride, chunk = low - step, _round_up(max(low >> 6, 1), step), low
    while chunk < best:
        found = packing.pack(chunk)
        if found is not None:
            best, offsets = chunk, found
            break
        failed = chunk
        chunk += stride
        stride *= 2
    else:
        return best, offsets
    finest = step if few else max(step, best >> 9)
    while best - failed > finest:
        middle = failed + (best - failed) // 2 // step * step
        if middle == failed:
            break
        found = packing.pack(middle)
        if found is None:
            failed = middle
        else:
            best, offsets = middle, found
    return best, offsets


class _Packing:
    """Items, and ways to pack them into chunks of a given size. Each way gives all offsets, or None if it finds none."""

    def __init__(self, numels: Sequence[int], granules: Sequence[int], ranks: int) -> None:
        self.numels = numels
        self.granules = granules
        self.ranks = ranks
        self.total = sum(numels)
        self.items = sorted((i for i, numel in enumerate(numels) if numel), key=lambda i: (-numels[i], i))
        self.wholes = [i for i in self.items if 1 < granules[i] == numels[i]]
        self.rows = [i for i in self.items if 1 < granules[i] < numels[i]]
        self.loose = [i for i in self.items if granules[i] == 1]
        sizes: dict[int, int] = {}
        for i in self.rows:
            sizes[granules[i]] = max(sizes.get(granules[i], 0), numels[i])
        self.row_granules = sorted(sizes, key=lambda granule: (-sizes[granule], granule))

    def pack(self, chunk: int) -> Sequence[int] | None:
        """Offsets for chunks of this size, by the first way that finds some."""
        offsets = self.balanced(chunk) if self.wholes else None
        if offsets is None:
            offsets = self.in_sequence(range(len(self.numels)), chunk)
        if offsets is None and (self.wholes or self.rows):
            for order in self.orders:
                offsets = self.in_sequence(order, chunk)
                if offsets is not None:
                    return offsets
            for long_first in (True, False) if self.rows else (False,):
                for straddle in (True, False) if self.wholes else (True,):
                    offsets = self.filled(chunk, long_first, straddle)
                    if offsets is not None:
                        return offsets
        return offsets

    @cached_property
    def orders(self) -> list[list[int]]:
        """Other orders than the given one that are worth a try: by size, and one kind of granule after another."""
        kinds: dict[int, list[int]] = {}
        for i in self.items:
            kinds.setdefault(0 if self.granules[i] == self.numels[i] > 1 else self.granules[i], []).append(i)
        ordered = [kinds[granule] for granule in sorted(kinds, reverse=True)]
        if len(self.items) <= FEW and len(kinds) <= 4:
            sequences = list(permutations(ordered))
        else:
            sequences = [tuple(ordered), (*ordered[1:], ordered[0])]
        return [self.items, *([i for kind in sequence for i in kind] for sequence in sequences)]

    # -- ways to pack -----------------------------------------------------------------------------------------------

    def in_sequence(self, order: Sequence[int], chunk: int) -> list[int] | None:
        """One item after another, each at the first place that its granules allow."""
        end, slack = 0, self.ranks * chunk - self.total
        offsets = [0] * len(self.numels)
        for i in order:
            numel = self.numels[i]
            if numel:
                start = self._first_place(i, end, chunk)
                if start is None:
                    return None
                slack -= start - end
                if slack < 0:
                    return None
                offsets[i], end = start, start + numel
        return offsets

    def balanced(self, chunk: int) -> list[int] | None:
        """Whole items, longest first, each into the chunk with least in it; the others where room is left within chunks."""
        offsets = [0] * len(self.numels)
        loads = [(0, rank) for rank in range(self.ranks)]  # ascending
        for i in self.wholes:
            load, rank = loads.pop(0)
            offsets[i] = rank * chunk + load
            if load + self.numels[i] > chunk:
                return None
            insort(loads, (load + self.numels[i], rank))
        for i in sorted(self.rows + self.loose, key=lambda i: (-self.numels[i], i)):
            # into the chunk with least room that is enough
            place = bisect_right(loads, (chunk - self.numels[i], self.ranks)) - 1
            if place < 0:
                return None
            load, rank = loads.pop(place)
            offsets[i] = rank * chunk + load
            insort(loads, (load + self.numels[i], rank))
        return offsets

    def filled(self, chunk: int, long_first: bool, straddle: bool) -> list[int] | None:
        """Chunk after chunk: the largest item that fits, and what may straddle the border where none does.

        Args:
            chunk: elements of each chunk.
            long_first: whether items larger than a chunk come first.
            straddle: whether items straddle borders while whole ones are left; else the room that these leave is filled with
                what fits, and the others follow.
        """
        offsets = [0] * len(self.numels)
        slack = self.ranks * chunk - self.total
        end = 0
        gaps: list[tuple[int, int]] = []
        long: list[int] = []
        rows: list[int] = []
        for i in self.rows:
            hard = self.numels[i] > chunk and chunk % self.granules[i] > 0  # can have one border only
            (long if hard or (long_first and self.numels[i] > chunk) else rows).append(i)
        for i in sorted(long, key=lambda i: (chunk % self.granules[i] == 0, -self.granules[i], -self.numels[i], i)):
            start = self._first_place(i, end, chunk)
            if start is None:
                return None
            if start > end:
                gaps.append((start - end, end))
            offsets[i], end = start, start + self.numels[i]
        wholes, fitting, loose = (self._ascending(some) for some in (self.wholes, rows, self.loose))
        waste = sum(size for size, _ in gaps) - self._fill(gaps, (wholes, fitting, loose), offsets, chunk)
        gaps = []
        while wholes or fitting or loose:
            room = chunk - end % chunk
            item = _take(wholes, room)
            if item is None and (straddle or not wholes):
                item = _take(fitting, room)
                if item is None:
                    item = self._straddler(fitting, loose, room)
            if item is None:  # what is left can't begin here
                waste += room
                if waste > slack:
                    return None
                gaps.append((room, end))
                end += room
                continue
            start = self._first_place(item, end, chunk)
            if start is None:
                return None
            if start > end:
                waste += start - end
                if waste > slack:
                    return None
                gaps.append((start - end, end))
            offsets[item] = start
            end = start + self.numels[item]
            if not straddle and not wholes and gaps:
                waste -= self._fill(gaps, (fitting, loose), offsets, chunk)
                gaps = []
        return offsets if end <= self.ranks * chunk else None

    # -- their parts ------------------------------------------------------------------------------------------------

    def _first_place(self, i: int, end: int, chunk: int) -> int | None:
        """Where item `i` can start, at `end` or as soon after it as its granules allow; None if chunks are too small."""
        numel, granule = self.numels[i], self.granules[i]
        room = chunk - end % chunk
        if numel <= room or granule == 1:
            return end
        first = room - room % granule  # what lies before the first border
        if first and (numel - first <= chunk or not chunk % granule):
            return end + room - first
        border = end + room
        if numel <= chunk:
            return border
        first = chunk - chunk % granule
        if first and (numel - first <= chunk or first == chunk):
            return border + chunk - first
        return None

    def _straddler(self, rows: list[tuple[int, int]], loose: list[tuple[int, int]], room: int) -> int | None:
        """What to put next into the rest of a chunk into which no whole item and no rows fit: it may straddle the border.

        Args:
            rows: items that are cut by rows, by size; all larger than `room`.
            loose: items that may be cut anywhere, by size.
            room: elements that are left.
        """
        best, least = None, room  # the rows that leave the smallest gap
        seen: set[int] = set()
        for place in range(len(rows) - 1, -1, -1):
            granule = self.granules[rows[place][1]]
            if granule not in seen:
                seen.add(granule)
                if room % granule < least:
                    best, least = place, room % granule
                if not least or len(seen) == FEW:
                    break
        if best is not None and not least:
            return rows.pop(best)[1]
        fits = bisect_right(loose, (least + 1,))
        if fits:  # fills the gap before the straddling rows
            return loose.pop(fits - 1)[1]
        if loose and loose[-1][0] >= room:
            return loose.pop()[1]
        if best is not None:
            return rows.pop(best)[1]
        return loose.pop()[1] if loose else None

    def _fill(
        self,
        gaps: list[tuple[int, int]],
        sources: tuple[list[tuple[int, int]], ...],
        offsets: list[int],
        chunk: int,
    ) -> int:
        """Put into gaps, pairs of size and start, what fits: largest items first, into the smallest gap that is enough.

        Returns:
            How many elements found a place.
        """
        gaps = sorted(gaps)
        filled = 0
        for items in sources:
            left = []
            while items and gaps:
                numel, i = items.pop()
                for place in range(bisect_left(gaps, (numel,)), len(gaps)):
                    size, begin = gaps[place]
                    start = self._first_place(i, begin, chunk)
                    if start is not None and start + numel <= begin + size:
                        del gaps[place]
                        filled += numel
                        offsets[i] = start
                        for rest in ((start - begin, begin), (begin + size - start - numel, start + numel)):
                            if rest[0]:
                                insort(gaps, rest)
                        break
                else:
                    left.append((numel, i))
            items.extend(reversed(left))
        return filled

    def _ascending(self, items: Sequence[int]) -> list[tuple[int, int]]:
        return [(self.numels[i], i) for i in sorted(items, key=lambda i: (self.numels[i], i))]


def _take(items: list[tuple[int, int]], room: int) -> int | None:
    """Remove and give the largest item that fits, of items sorted by size."""
    place = bisect_right(items, (room + 1,))
    return items.pop(place - 1)[1] if place else None


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
