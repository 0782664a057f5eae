"""Orders whose stages are dealt out round and round, several per rank: looped BFS, interleaved 1F1B, and their zero-bubble kin.

Micro-batches travel in groups, each through chunk after chunk, of as many as there are ranks, so that the first of a group comes
round again as the last has left. What is over makes the groups a little larger, never smaller: a smaller one leaves ranks waiting
in every chunk. Only fewer micro-batches than ranks can't fill a group; it is scheduled as if full, without those that don't exist.
"""

from __future__ import annotations

import itertools

from hp_pipeline.orders.existing import only_existing
from hp_pipeline.schedule import Schedule, looped_placement
from hp_pipeline.steps import MetaStepType, plain_step, plain_steps

__all__ = ["interleaved_1f1b", "interleaved_zero_bubble", "looped_bfs", "zb_h1"]

_F, _B, _I, _W = MetaStepType.F, MetaStepType.B, MetaStepType.I, MetaStepType.W
_At = tuple[int, int]


def looped_bfs(ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """All micro-batches through a chunk before the next chunk begins (Lamy-Poirier 2022, Breadth-First Pipeline Parallelism)."""
    steps = []
    for rank in range(ranks):
        own = range(rank, ranks * chunks, ranks)
        order = [plain_step(_F, stage, batch) for stage in own for batch in range(micro_batches)]
        order += [plain_step(_B, stage, batch) for stage in reversed(own) for batch in range(micro_batches)]
        steps.append(order)
    return Schedule("loopedbfs", micro_batches, looped_placement(ranks, chunks), ()).with_steps(steps)


def interleaved_1f1b(ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """1F1B over chunks: the pipeline fills in a V-th of the time (Narayanan et al. 2021, Megatron-LM)."""
    groups = _groups(ranks, micro_batches, chunks)
    steps = []
    for rank in range(ranks):
        up, down = _travel(rank, ranks, groups, chunks)
        forwards, backwards = plain_steps(_F, up), plain_steps(_B, down)
        warm = min((chunks - 1) * len(groups[0]) + 2 * (ranks - 1 - rank), len(forwards))
        pairs = zip(forwards[warm:], backwards, strict=False)
        order = [*forwards[:warm], *itertools.chain.from_iterable(pairs), *backwards[len(forwards) - warm :]]
        steps.append(order)
    schedule = Schedule("interleaved1f1b", micro_batches, looped_placement(ranks, chunks), ())
    return only_existing(schedule.with_steps(steps), groups[-1].stop)


def interleaved_zero_bubble(ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """Interleaved 1F1B with half the warm-up, whose weight gradients wait for idle time.

    After torch's InterleavedZeroBubble, and Qi et al. 2023 (Zero Bubble Pipeline Parallelism), whose ZB-H1 it is for one chunk.
    Rank s is s steps late in its weight gradients: what it saves in activations by its shorter warm-up it spends on those, so
    that every rank has V * P chunks in flight (if its groups are of P micro-batches).
    """
    groups = _groups(ranks, micro_batches, chunks)
    steps = []
    for rank in range(ranks):
        up, down = _travel(rank, ranks, groups, chunks)
        forwards, inputs, weights = plain_steps(_F, up), plain_steps(_I, down), plain_steps(_W, down)
        warm = min((chunks - 1) * len(groups[0]) + ranks - 1 - rank, len(forwards))
        order, last = forwards[:warm], len(forwards) - warm
        for index, backward in enumerate(inputs):
            if index < last:
                order.append(forwards[warm + index])
            order.append(backward)
            if index >= rank:
                order.append(weights[index - rank])
        order += weights[max(len(weights) - rank, 0) :]
        steps.append(order)
    schedule = Schedule("interleavedzb", micro_batches, looped_placement(ranks, chunks), ())
    return only_existing(schedule.with_steps(steps), groups[-1].stop)


def zb_h1(ranks: int, micro_batches: int) -> Schedule:
    """1F1B's memory, a third of its bubble: W fills the waits (Qi et al. 2023, Zero Bubble Pipeline Parallelism, ZB-H1)."""
    zero_bubble = interleaved_zero_bubble(ranks, micro_batches, 1)
    return Schedule("zbh1", micro_batches, zero_bubble.placement, zero_bubble.steps)


def _groups(ranks: int, micro_batches: int, chunks: int) -> list[range]:
    """The micro-batches of each group, as even as can be; the larger ones first."""
    if chunks == 1:
        return [range(batch, batch + 1) for batch in range(micro_batches)]
    count = max(micro_batches // ranks, 1)
    size, larger = divmod(max(micro_batches, ranks), count)
    starts = [index * size + min(index, larger) for index in range(count + 1)]
    return [range(*bounds) for bounds in itertools.pairwise(starts)]


def _travel(rank: int, ranks: int, groups: list[range], chunks: int) -> tuple[list[_At], list[_At]]:
    """The (stage, micro-batch) of a rank's forwards and backwards: group by group, and in a group chunk by chunk."""
    own = range(rank, ranks * chunks, ranks)
    up = [(stage, batch) for group in groups for stage in own for batch in group]
    down = [(stage, batch) for group in groups for stage in reversed(own) for batch in group]
    return up, down
