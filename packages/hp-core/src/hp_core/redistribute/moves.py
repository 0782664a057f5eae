"""Which layouts are one step away from a layout: the planner's graph, without costs.

A state is the cuts of each dim, the axes with a pending reduction, and its reduce op. `Moves` generates the neighbours
by kind of step; a restriction of the places that tokens may take keeps the graph small on large meshes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import combinations, permutations, product
from typing import NamedTuple

from hp_core.redistribute.steps import AllGather, AllReduce, AllToAll, Pad, ReduceScatter, Scale, Slice, Step
from hp_core.redistribute.transfers import Cuts, Dims, Tokens, common_prefix

__all__ = ["Move", "Moves", "State", "local_moves_to", "locally_reachable"]


class State(NamedTuple):
    """A layout as the search sees it: tokens per dim (outermost first), pending axes (ascending), their reduce op."""

    dims: Dims
    pending: tuple[int, ...]
    reduce_op: str | None


Move = tuple[type[Step], tuple[int, ...], State]
"""Kind of step, the mesh axes it is about (ascending), the state it leads to."""


class Moves:
    """The neighbours of states.

    Args:
        cuts: the mesh, the tensor and the ragged tokens.
        axes: the axes that may move; all others stay as they are in every state.
        fixed: per dim, the leading tokens that stay.
        reduce_ops: the ops that a replicated axis may become pending with, where nothing is pending yet.
        allowed: per dim, the token lists that a state may have; None allows all.
    """

    def __init__(
        self,
        cuts: Cuts,
        axes: tuple[int, ...],
        fixed: Dims,
        reduce_ops: tuple[str, ...],
        allowed: Sequence[frozenset[Tokens]] | None = None,
    ) -> None:
        self.cuts = cuts
        self.axes = axes
        self.fixed = fixed
        self.reduce_ops = reduce_ops
        self.allowed = allowed
        self._placed: dict[tuple[Dims, tuple[int, ...]], list[Dims]] = {}

    def of(self, state: State) -> Iterator[Move]:
        """All moves from a state; the more an order of kinds tends to lead somewhere, the earlier it comes."""
        dims, pending, op = state
        axis_of = self.cuts.axis_of
        movable = [
            tuple(axis_of[token] for token in tokens[len(fixed) :])
            for tokens, fixed in zip(dims, self.fixed, strict=True)
        ]
        sharded = tuple(sorted(axis for axes in movable for axis in axes))
        reducible = tuple(axis for axis in pending if axis in self.axes)
        replicated = tuple(axis for axis in self.axes if axis not in sharded and axis not in pending)

        for counts in product(*(range(len(axes) + 1) for axes in movable)):
            if any(counts):
                stripped = tuple(
                    tokens[: len(tokens) - count] if count else tokens
                    for tokens, count in zip(dims, counts, strict=True)
                )
                freed = tuple(sorted(axis for axes, n in zip(movable, counts, strict=True) if n for axis in axes[-n:]))
                yield AllGather, freed, State(stripped, pending, op)
                if op is None or op == "sum":
                    yield Pad, freed, State(stripped, tuple(sorted(pending + freed)), "sum")
        for group in _subsets(reducible):
            rest = tuple(axis for axis in pending if axis not in group)
            rest_op = op if rest else None
            yield AllReduce, group, State(dims, rest, rest_op)
            for placed in self.place(dims, group):
                yield ReduceScatter, group, State(placed, rest, rest_op)
        if sharded:
            for placed in self.place(self.fixed, sharded):
                if placed != dims:
                    yield AllToAll, self.cuts.exchange_axes(dims, placed), State(placed, pending, op)
        scaled_ops = self.reduce_ops if op is None else (op,)
        for group in _subsets(replicated):
            for placed in self.place(dims, group):
                yield Slice, group, State(placed, pending, op)
            for scaled_op in scaled_ops:
                yield Scale, group, State(dims, tuple(sorted(pending + group)), scaled_op)

    def place(self, dims: Dims, axes: tuple[int, ...]) -> list[Dims]:
        """All ways to cut dims further by all of these axes, in any order and distribution."""
        found = self._placed.get((dims, axes))
        if found is None:
            found = [()]
            partial: list[tuple[tuple[Tokens, ...], tuple[int, ...]]] = [((), axes)]
            last = len(dims) - 1
            for dim, tokens in enumerate(dims):
                partial = [
                    ((*built, cut), rest)
                    for built, remaining in partial
                    for chosen, rest in _selections(remaining)
                    if dim < last or not rest
                    for cut in self._extended(dim, tokens, chosen)
                ]
            found = self._placed[dims, axes] = [built for built, rest in partial if not rest]
        return found

    def _extended(self, dim: int, tokens: Tokens, axes: tuple[int, ...]) -> Iterator[Tokens]:
        """The cuts of one dim after these axes are appended; a lone axis of dim 0 may also cut by ragged shares."""
        if not axes:
            yield tokens
            return
        if tokens and self.cuts.is_ragged(tokens[0]):
            return
        cut = tokens + axes
        if self.allowed is None or cut in self.allowed[dim]:
            yield cut
        if dim == 0 and len(cut) == 1:
            for token in range(len(self.cuts.sizes), len(self.cuts.axis_of)):
                if self.cuts.axis_of[token] == axes[0]:
                    yield (token,)


def locally_reachable(cuts: Cuts, state: State, goal: State) -> bool:
    """Whether local steps alone lead from `state` to `goal`."""
    if not set(state.pending) <= set(goal.pending):
        return False
    if state.pending and state.reduce_op != goal.reduce_op:
        return False
    for tokens, wanted in zip(state.dims, goal.dims, strict=True):
        for token in tokens[common_prefix(tokens, wanted) :]:
            if goal.reduce_op != "sum" or cuts.axis_of[token] not in goal.pending:
                return False
    return True


def local_moves_to(cuts: Cuts, state: State, goal: State) -> Iterator[Move]:
    """The moves worth making where `goal` is locally reachable: each kind does all that it has to, at once."""
    kept = tuple(tokens[: common_prefix(tokens, wanted)] for tokens, wanted in zip(state.dims, goal.dims, strict=True))
    padded = tuple(
        sorted(cuts.axis_of[token] for old, new in zip(state.dims, kept, strict=True) for token in old[len(new) :])
    )
    sliced = tuple(
        sorted(cuts.axis_of[token] for new, wanted in zip(kept, goal.dims, strict=True) for token in wanted[len(new) :])
    )
    scaled = tuple(axis for axis in goal.pending if axis not in state.pending and axis not in padded)
    if sliced and all(
        old == new or new == wanted for old, new, wanted in zip(state.dims, kept, goal.dims, strict=True)
    ):
        placed = tuple(
            wanted if old == new else old for old, new, wanted in zip(state.dims, kept, goal.dims, strict=True)
        )
        yield Slice, sliced, State(placed, state.pending, state.reduce_op)
    if padded:
        yield Pad, padded, State(kept, tuple(sorted(state.pending + padded)), goal.reduce_op)
    if scaled:
        yield Scale, scaled, State(state.dims, tuple(sorted(state.pending + scaled)), goal.reduce_op)


@lru_cache(maxsize=1024)
def _subsets(axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The non-empty subsets, each in the order given."""
    return tuple(group for count in range(1, len(axes) + 1) for group in combinations(axes, count))


@lru_cache(maxsize=1024)
def _selections(axes: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """All ordered selections of some of the axes (none and all included), each with the axes left."""
    return tuple(
        (chosen, tuple(axis for axis in axes if axis not in chosen))
        for count in range(len(axes) + 1)
        for chosen in permutations(axes, count)
    )
