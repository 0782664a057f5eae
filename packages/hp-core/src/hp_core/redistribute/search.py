"""The cheapest way from one state to another: a best-first search (A*) with exact costs.

Costs are integers (attoseconds), so sums don't depend on their order and all ranks find the same plan. The estimate of
what remains is a lower bound from counting, per element, how often it must still be sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from math import prod
from typing import NamedTuple

from hp_core.redistribute.moves import Move, Moves, State, local_moves_to, locally_reachable
from hp_core.redistribute.steps import AllGather, AllReduce, AllToAll
from hp_core.redistribute.transfers import Cuts

__all__ = ["Label", "Path", "Search"]

Label = tuple[int, int, int]
"""What a path costs: attoseconds, number of steps, elements of its largest local tensor. Compared in this order."""


class Path(NamedTuple):
    """A way to the goal, and what it costs."""

    moves: list[Move]
    label: Label


class Search:
    """The way to one goal.

    Args:
        moves: the graph.
        goal: where paths end.
        itemsize: bytes per element.
        latency: attoseconds per message.
        byte_time: attoseconds per byte, for each mesh axis; a group of several axes is as slow as the slowest.
        most_elements: cap on the elements of local tensors that steps give, or None.
    """

    def __init__(
        self,
        moves: Moves,
        goal: State,
        itemsize: int,
        latency: int,
        byte_time: tuple[int, ...],
        most_elements: int | None = None,
    ) -> None:
        self.moves = moves
        self.goal = goal
        self.cuts: Cuts = moves.cuts
        self.itemsize = itemsize
        self.latency = latency
        self.byte_time = byte_time
        self.most_elements = most_elements
        self.fastest = min((time for time, size in zip(byte_time, self.cuts.sizes, strict=True) if size > 1), default=0)
        self._remaining: dict[State, int] = {}
        self._local: dict[State, bool] = {}

    def path(self, start: State, better_than: Label | None = None, most_moves: int | None = None) -> Path | None:
        """The cheapest path, ties broken by fewer steps, then by a smaller peak.

        Args:
            start: where to start.
            better_than: what a path must cost less than to be of interest. A good one makes the search short.
            most_moves: give up after looking at so many moves.

        Returns:
            The path; None if there is none, none is better, or the search gave up.
        """
        goal = self.goal
        first: Label = (0, 0, self.cuts.largest(start.dims))
        best: dict[State, Label] = {start: first}
        came: dict[State, tuple[State, Move]] = {}
        done: set[State] = set()
        queue: list[tuple[int, int, int, int, State]] = [(self.remaining(start), 0, first[2], 0, start)]
        pushed = looked = 0
        while queue:
            estimate, steps, peak, _, state = heappop(queue)
            if state == goal:
                return Path(_trace(came, start, goal), best[goal])
            reached = best.get(goal, better_than)
            if state in done or (reached is not None and (estimate, steps + 1, peak) >= reached):
                continue
            if most_moves is not None and looked > most_moves:
                return None
            done.add(state)
            cost = best[state][0]
            for move in self._moves(state):
                kind, _, after = move
                if after in done:
                    continue
                size = self.cuts.largest(after.dims)
                if self.most_elements is not None and size > self.most_elements:
                    continue
                # From here on, each test is a cheap way to see that this path can't be better than one that is known.
                least = cost if kind.local else cost + self.latency
                peak_after = max(peak, size)
                looked += 1
                known = best.get(after)
                if known is not None and (least, steps + 1, peak_after) >= known:
                    continue
                remaining = self.remaining(after)
                more = steps + 1 if after == goal else steps + 2
                reached = best.get(goal, better_than)
                if reached is not None and (least + remaining, more, peak_after) >= reached:
                    continue
                label = (cost + self.cost(move, state), steps + 1, peak_after)
                if known is not None and label >= known:
                    continue
                if reached is not None and (label[0] + remaining, more, peak_after) >= reached:
                    continue
                best[after] = label
                came[after] = (state, move)
                pushed += 1
                heappush(queue, (label[0] + remaining, label[1], label[2], pushed, after))
        return None

    def wire_bytes(self, move: Move, before: State) -> int:
        """Bytes that the busiest rank sends in a move."""
        kind, axes, after = move
        if kind.local:
            return 0
        if kind is AllToAll:
            return self.cuts.sent(before.dims, after.dims) * self.itemsize
        group = prod(self.cuts.sizes[axis] for axis in axes)
        if kind is AllReduce:
            return -(-2 * (group - 1) * self.cuts.largest(before.dims) * self.itemsize // group)
        chunk = before.dims if kind is AllGather else after.dims
        return (group - 1) * self.cuts.largest(chunk) * self.itemsize

    def cost(self, move: Move, before: State) -> int:
        """Attoseconds that a move takes."""
        if move[0].local:
            return 0
        return self.latency + self.wire_bytes(move, before) * max(self.byte_time[axis] for axis in move[1])

    def remaining(self, state: State) -> int:
        """A lower bound on the attoseconds from `state` to the goal; it never falls by more than a move costs."""
        found = self._remaining.get(state)
        if found is None:
            if self._is_local(state):
                found = 0
            else:
                ranks = self.cuts.all_ranks
                found = self.latency + self._transfers(state, ranks) * self.itemsize * self.fastest // ranks
            self._remaining[state] = found
        return found

    def _transfers(self, state: State, ranks: int) -> int:
        """Elements that all ranks together must still send, at least.

        An element with p contributions takes p - 1 transfers to be reduced anywhere, and one more for each further
        rank that wants it. Without pending reductions, what each rank lacks is counted from the bounds. A goal that is
        pending itself may be reached by keeping a reduction, or (if it is a sum) by padding, which costs nothing.
        """
        goal, sizes, numel = self.goal, self.cuts.sizes, self.cuts.numel
        contributions = prod(sizes[axis] for axis in state.pending)
        wanted_by = ranks // self.cuts.ranks(tuple(token for tokens in goal.dims for token in tokens))
        if goal.reduce_op == "sum":
            held_by = ranks // self.cuts.ranks(tuple(token for tokens in state.dims for token in tokens))
            kept = prod(sizes[axis] for axis in goal.pending)
            grown = wanted_by * numel // kept - -(-held_by * numel // contributions)
            return max(0, grown, self._to_finish(state, contributions))
        if not state.pending:
            return self.cuts.missing(state.dims, goal.dims)
        if state.reduce_op == goal.reduce_op:
            return max(self.cuts.missing(state.dims, goal.dims), self._to_finish(state, contributions))
        return numel * (contributions - 1 + wanted_by - 1)

    def _to_finish(self, state: State, contributions: int) -> int:
        """Transfers for the reductions that the goal doesn't keep."""
        if state.reduce_op != self.goal.reduce_op:
            return self.cuts.numel * (contributions - 1)
        finished = prod(self.cuts.sizes[axis] for axis in state.pending if axis not in self.goal.pending)
        return self.cuts.numel * (contributions - contributions // finished)

    def _is_local(self, state: State) -> bool:
        found = self._local.get(state)
        if found is None:
            found = self._local[state] = locally_reachable(self.cuts, state, self.goal)
        return found

    def _moves(self, state: State) -> Iterable[Move]:
        if self._is_local(state):
            return local_moves_to(self.cuts, state, self.goal)
        return self.moves.of(state)


def _trace(came: dict[State, tuple[State, Move]], start: State, goal: State) -> list[Move]:
    moves: list[Move] = []
    state = goal
    while state != start:
        state, move = came[state]
        moves.append(move)
    return moves[::-1]
