"""The cheapest way from one layout to another, as a `Plan`: found by search, remembered by value.

`plan_redistribute` states the problem to `search`, which knows nothing of layouts, and turns the answer into steps for
the executor. Up to three axes and four dims the plan is optimal; on larger meshes the effort is bounded, alike on all
ranks. Between different meshes `cross_mesh` plans, and from and to flat layouts `flat`, from plans made here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations, product
from math import factorial, prod
from typing import NamedTuple

from hp_core.errors import RedistributeError
from hp_core.layout import Layout, intern
from hp_core.redistribute.cross_mesh import plan_across
from hp_core.redistribute.flat import plan_flat
from hp_core.redistribute.moves import Move, Moves, State
from hp_core.redistribute.search import Search
from hp_core.redistribute.steps import AllToAll, Permute, Plan, Step
from hp_core.redistribute.transfers import Cuts, Dims, Tokens, common_prefix

__all__ = [
    "DEFAULT_COST_MODEL",
    "CostModel",
    "PlanCacheInfo",
    "explain_redistribute",
    "plan_cache_clear",
    "plan_cache_info",
    "plan_redistribute",
]

_ATTOSECONDS = 10**18

_SMALL_GRAPH = 300
"""Graphs of up to so many states (three axes, four dims) are searched to the end, which makes the plan optimal."""

_MOST_MOVES = 1000
"""In larger graphs a plan better than the first good one is looked for among so many moves."""


@dataclass(frozen=True)
class CostModel:
    """What communication costs: `latency` per message, plus bytes over bandwidth.

    Attributes:
        latency: seconds per collective.
        bandwidth: bytes per second that a rank can send along an axis.
        axis_bandwidth: bandwidths of the axes that differ, by name. A group of several axes is as slow as the slowest.
    """

    latency: float = 20e-6
    bandwidth: float = 20e9
    axis_bandwidth: Mapping[str, float] | tuple[tuple[str, float], ...] = ()
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        pairs = self.axis_bandwidth.items() if isinstance(self.axis_bandwidth, Mapping) else self.axis_bandwidth
        object.__setattr__(self, "axis_bandwidth", tuple(sorted((name, float(value)) for name, value in pairs)))
        object.__setattr__(self, "_hash", hash((self.latency, self.bandwidth, self.axis_bandwidth)))
        if self.latency < 0 or any(value <= 0 for value in (self.bandwidth, *dict(self.axis_bandwidth).values())):
            raise RedistributeError(
                f"{self}: a cost model needs latency >= 0 (seconds) and bandwidths > 0 (bytes per second)."
            )

    def __hash__(self) -> int:
        return self._hash

    def latency_attoseconds(self) -> int:
        """Cost of one message, in whole attoseconds."""
        return round(self.latency * _ATTOSECONDS)

    def byte_attoseconds(self, axis_name: str) -> int:
        """Cost of one byte along an axis, in whole attoseconds."""
        return max(1, round(_ATTOSECONDS / dict(self.axis_bandwidth).get(axis_name, self.bandwidth)))


DEFAULT_COST_MODEL = CostModel()


class PlanCacheInfo(NamedTuple):
    """How the plan cache has served; the fields of `functools.lru_cache`."""

    hits: int
    misses: int
    maxsize: int | None
    currsize: int


def plan_redistribute(
    src: Layout,
    dst: Layout,
    global_shape: Sequence[int],
    itemsize: int,
    *,
    cost_model: CostModel = DEFAULT_COST_MODEL,
    memory_limit: int | None = None,
) -> Plan:
    """The cheapest plan that redistributes a tensor from `src` to `dst`.

    Cost is latency per message plus bytes on the wire over bandwidth; ties go to fewer steps, then to a smaller peak of
    local memory. It depends only on the arguments, so all ranks get the same plan; equal calls get the same object.

    Args:
        src: layout the tensor has.
        dst: layout it shall have, on the same mesh or another. A pending reduction of another kind than the source's
            means: reduce, then make pending.
        global_shape: shape of the global tensor.
        itemsize: bytes per element.
        cost_model: what communication costs.
        memory_limit: cap, in bytes, on every local tensor that a step gives (`dst` included, `src` not).

    Raises:
        RedistributeError: no plan stays under the memory limit.
        LayoutError: the shape contradicts one of the layouts.
    """
    return _plan(src, dst, tuple(global_shape), itemsize, cost_model, memory_limit)


def explain_redistribute(
    src: Layout,
    dst: Layout,
    global_shape: Sequence[int],
    itemsize: int = 4,
    *,
    cost_model: CostModel = DEFAULT_COST_MODEL,
) -> str:
    """What `plan_redistribute` would do, as text: a headline with the cost and a line per step."""
    return str(plan_redistribute(src, dst, global_shape, itemsize, cost_model=cost_model))


def plan_cache_info() -> PlanCacheInfo:
    """Hits, misses and size of the plan cache."""
    return PlanCacheInfo(*_plan.cache_info())


def plan_cache_clear() -> None:
    """Forget all plans."""
    _plan.cache_clear()


@lru_cache(maxsize=1 << 14)
def _plan(
    src: Layout, dst: Layout, shape: tuple[int, ...], itemsize: int, cost_model: CostModel, memory_limit: int | None
) -> Plan:
    if itemsize < 1:
        raise RedistributeError(f"itemsize {itemsize}: an element has at least one byte.")
    src.check_shape(shape)
    dst.check_shape(shape)
    if src.flat is not None or dst.flat is not None:
        return plan_flat(src, dst, shape, itemsize, cost_model, memory_limit, _plan)
    if src.mesh is not dst.mesh:
        return plan_across(src, dst, shape, itemsize, cost_model, memory_limit, _plan)
    problem = _Problem(src, dst, shape, itemsize, cost_model, memory_limit)
    moves = problem.solve()
    if moves is None:
        free = _plan(src, dst, shape, itemsize, cost_model, None)
        raise RedistributeError(
            f"no plan from {src.compact_str} to {dst.compact_str} for shape {shape} ({itemsize} B per element) keeps "
            f"every local tensor within memory_limit={memory_limit} B: the source takes "
            f"{problem.local_bytes(problem.start)} B, the target {problem.local_bytes(problem.goal)} B, and the "
            f"cheapest plan peaks at {free.peak_bytes} B. Raise the limit, or redistribute in parts."
        )
    return problem.plan_of(moves)


class _Problem:
    """A planning question in the terms of the search, and the way back from its answer."""

    def __init__(
        self,
        src: Layout,
        dst: Layout,
        shape: tuple[int, ...],
        itemsize: int,
        cost_model: CostModel,
        memory_limit: int | None,
    ) -> None:
        self.src, self.dst, self.shape, self.itemsize = src, dst, shape, itemsize
        self.mesh = src.mesh
        self.cost_model = cost_model
        self.most_elements = None if memory_limit is None else memory_limit // itemsize
        self.ragged: list[tuple[int, tuple[int, ...]]] = []
        for layout in (src, dst):
            if layout.ragged is not None and (layout.axes_of(0)[0], layout.ragged) not in self.ragged:
                self.ragged.append((layout.axes_of(0)[0], layout.ragged))
        self.cuts = Cuts(self.mesh.shape, shape, self.ragged)
        self.start = self._state_of(src)
        self.goal = self._state_of(dst)

    def solve(self) -> list[Move] | None:
        """The moves of the cheapest plan.

        Up to three searches, each for something better than the one before it found: a short one among the axes that
        move and the places that lead somewhere; one among all places of these axes; one in the whole graph. A small
        graph is searched to the end.
        """
        axes = tuple(axis for axis, size in enumerate(self.mesh.shape) if size > 1)
        fixed = self._common_cuts()
        moving = self._moving_axes(axes, fixed)
        best = self._search_in(self._moves(moving, fixed, self._useful_cuts(moving, fixed))).path(self.start)
        free: Dims = ((),) * len(self.shape)
        for graph in ((moving, fixed), (axes, free)) if moving != axes or fixed != free else ((axes, free),):
            # Only a memory limit can leave no way in the short search; then the others decide, whatever it takes.
            small = best is None or _count_states(len(graph[0]), len(self.shape)) <= _SMALL_GRAPH
            search = self._search_in(self._moves(*graph, None))
            best = search.path(self.start, best.label if best else None, None if small else _MOST_MOVES) or best
        return best.moves if best else None

    def plan_of(self, moves: list[Move]) -> Plan:
        """The plan that makes these moves."""
        steps: list[Step] = []
        state = self.start
        search = self._search_in(self._moves((), self.start.dims, None))
        peak = self.local_bytes(state)
        for move in moves:
            kind, axes, after = move
            pair = prod(self.cuts.sizes[axis] for axis in axes) == 2  # a pair exchanges faster by one collective
            if kind is AllToAll and not pair and self.cuts.is_permutation(state.dims, after.dims):
                kind = Permute
            steps.append(kind(axes, self._layout_of(state), self._layout_of(after), search.wire_bytes(move, state)))
            state = after
            peak = max(peak, self.local_bytes(state))
        messages = sum(step.messages for step in steps)
        nbytes = sum(step.nbytes for step in steps)
        return Plan(self.src, self.dst, self.shape, self.itemsize, tuple(steps), messages, nbytes, peak)

    def local_bytes(self, state: State) -> int:
        """Bytes of the largest local tensor."""
        return self.cuts.largest(state.dims) * self.itemsize

    # -- the graph ----------------------------------------------------------------------------------------------------

    def _moves(self, axes: tuple[int, ...], fixed: Dims, allowed: list[frozenset[Tokens]] | None) -> Moves:
        ops = dict.fromkeys(op for op in (self.goal.reduce_op, "sum") if op is not None)
        return Moves(self.cuts, axes, fixed, tuple(ops), allowed)

    def _search_in(self, moves: Moves) -> Search:
        byte_time = tuple(self.cost_model.byte_attoseconds(name) for name in self.mesh.mesh_dim_names)
        latency = self.cost_model.latency_attoseconds()
        return Search(moves, self.goal, self.itemsize, latency, byte_time, self.most_elements)

    def _common_cuts(self) -> Dims:
        """Per dim, the outermost cuts that source and target share."""
        return tuple(old[: common_prefix(old, new)] for old, new in zip(self.start.dims, self.goal.dims, strict=True))

    def _moving_axes(self, axes: tuple[int, ...], fixed: Dims) -> tuple[int, ...]:
        """The axes whose place differs between source and target, with those nested inside one that moves."""
        start, goal = self.start, self.goal
        still = {self.cuts.axis_of[token] for tokens in fixed for token in tokens}
        cut = {self.cuts.axis_of[token] for dims in (start.dims, goal.dims) for tokens in dims for token in tokens}
        for axis in axes:
            if axis in cut:
                continue
            pending = (axis in start.pending, axis in goal.pending)
            if pending == (False, False) or (pending == (True, True) and start.reduce_op == goal.reduce_op):
                still.add(axis)
        return tuple(axis for axis in axes if axis not in still)

    def _useful_cuts(self, moving: tuple[int, ...], fixed: Dims) -> list[frozenset[Tokens]]:
        """Per dim, cuts that lead from source to target: beginnings of either, also followed by parts of the other.

        Axes that are cut in neither (pending ones, that is) may also cut the longest dim, so that a reduction over
        several axes can go level by level.
        """
        ends = (self.start.dims, self.goal.dims)
        cut = {self.cuts.axis_of[token] for dims in ends for tokens in dims for token in tokens}
        spare = [axis for axis in moving if axis not in cut]
        lengths = [self.cuts.longest(dim, tokens) for dim, tokens in enumerate(self.start.dims)]
        longest = lengths.index(max(lengths)) if lengths else None  # a scalar has no dim to cut
        useful = []
        for dim, (old, new) in enumerate(zip(self.start.dims, self.goal.dims, strict=True)):
            keep = len(fixed[dim])
            heads = [tokens[:end] for tokens in (old, new) for end in range(keep, len(tokens) + 1)]
            tails = [
                tokens[a:b]
                for tokens in (new, old)
                for a in range(keep, len(tokens) + 1)
                for b in range(a, len(tokens) + 1)
            ]
            if dim == longest:
                tails += [chosen for count in (1, 2) for chosen in combinations(spare, count)]
            cuts = {(*head, *tail) for head, tail in product(heads, tails) if not set(head) & set(tail)}
            useful.append(frozenset(cuts))
        return useful

    # -- layouts and states -------------------------------------------------------------------------------------------

    def _state_of(self, layout: Layout) -> State:
        """The layout without axes of one rank, its ragged cut as a token of its own."""
        sizes = self.mesh.shape
        dims: list[Tokens] = [
            tuple(axis for axis in layout.axes_of(dim) if sizes[axis] > 1) for dim in range(len(self.shape))
        ]
        if layout.ragged is not None and dims[0]:
            dims[0] = (len(sizes) + self.ragged.index((dims[0][0], layout.ragged)),)
        pending = tuple(axis for axis, _ in layout.partials if sizes[axis] > 1)
        return State(tuple(dims), pending, layout.partials[0][1] if pending else None)

    def _layout_of(self, state: State) -> Layout:
        dims = tuple(tuple(self.cuts.axis_of[token] for token in tokens) for tokens in state.dims)
        ragged = None
        if state.dims and state.dims[0] and self.cuts.is_ragged(state.dims[0][0]):
            ragged = self.ragged[state.dims[0][0] - len(self.mesh.shape)][1]
        partials = tuple((axis, state.reduce_op or "") for axis in state.pending)
        return intern(self.mesh, dims, partials, ragged)


def _count_states(axes: int, dims: int) -> int:
    """Number of layouts of `dims` dims over so many axes: each cuts (in some order), replicates or is pending."""
    choose = [factorial(axes) // factorial(cut) // factorial(axes - cut) for cut in range(axes + 1)]
    ordered = [prod(range(dims, dims + cut)) for cut in range(axes + 1)]
    return sum(choose[cut] * ordered[cut] * 2 ** (axes - cut) for cut in range(axes + 1))
