"""Orders on a V: each rank has a chunk on the way down and one on the way up, so rank 0 has the first stage and the last.

Each is written as its phases. They are made for enough micro-batches to fill the V; for fewer, those that don't exist are
left out afterwards.
"""

from __future__ import annotations

from collections import deque

from hp_pipeline.orders.existing import only_existing
from hp_pipeline.schedule import Schedule, v_placement
from hp_pipeline.steps import MetaStep, MetaStepType, plain_step

__all__ = ["dualpipe_v", "zb_v"]

_F, _B, _I, _W = MetaStepType.F, MetaStepType.B, MetaStepType.I, MetaStepType.W
_DOWN, _UP = 0, 1


class _Rank:
    """The steps of one rank so far; each chunk takes its micro-batches in order, weight gradients wait in a queue."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.steps: list[MetaStep] = []
        self._stages = (rank, 2 * ranks - 1 - rank)
        self._forwards = [0, 0]
        self._backwards = [0, 0]
        self._waiting: deque[tuple[int, int]] = deque()

    def forwards_of(self, chunk: int) -> int:
        """How many forwards the chunk has done."""
        return self._forwards[chunk]

    def forward(self, chunk: int) -> None:
        """The chunk's next forward."""
        self.steps.append(self._next(_F, chunk, self._forwards))

    def backward(self, chunk: int) -> None:
        """The chunk's next backward, whole."""
        self.steps.append(self._next(_B, chunk, self._backwards))

    def input_gradient(self, chunk: int) -> None:
        """The chunk's next backward without its weight gradient, which queues."""
        step = self._next(_I, chunk, self._backwards)
        self._waiting.append((step.stage, self._backwards[chunk] - 1))
        self.steps.append(step)

    def weight_gradient(self) -> None:
        """The weight gradient that has waited longest."""
        self.steps.append(plain_step(_W, *self._waiting.popleft()))

    def weight_gradients(self) -> None:
        """All weight gradients that wait."""
        while self._waiting:
            self.weight_gradient()

    def overlapped(self, backward: int, forward: int) -> None:
        """The next backward of one chunk and the next forward of another, at the same time."""
        pair = self._next(_B, backward, self._backwards), self._next(_F, forward, self._forwards)
        self.steps.append(MetaStep.overlapped(*pair))

    def _next(self, kind: MetaStepType, chunk: int, counts: list[int]) -> MetaStep:
        count = counts[chunk]
        counts[chunk] = count + 1
        return plain_step(kind, self._stages[chunk], count)


def zb_v(ranks: int, micro_batches: int) -> Schedule:
    """No bubble but the way to the last rank, in 1F1B's memory (Qi et al. 2024, Pipeline Parallelism with Controllable Memory)."""
    count = max(micro_batches, 2 * ranks - 1)
    steps = []
    for rank in range(ranks):
        to_turn = ranks - rank  # ranks from here to the turn of the V, this one included
        own = _Rank(rank, ranks)
        for _ in range(2 * to_turn - 1):  # as many as come down before the first comes back up
            own.forward(_DOWN)
        for _ in range(rank):  # until the first gradient comes down from rank 0
            own.forward(_UP)
            own.forward(_DOWN)
        for _ in range(to_turn):
            own.forward(_UP)
            own.input_gradient(_UP)
            own.weight_gradient()
        while own.forwards_of(_UP) < count:
            if own.forwards_of(_DOWN) < count:
                own.forward(_DOWN)
            own.input_gradient(_DOWN)
            own.weight_gradient()
            own.forward(_UP)
            own.input_gradient(_UP)
            own.weight_gradient()
        for _ in range(rank):  # the others wait for input gradients: weight gradients can wait
            own.input_gradient(_DOWN)
            own.input_gradient(_UP)
        for _ in range(to_turn):
            own.input_gradient(_DOWN)
            own.weight_gradient()
        own.weight_gradients()
        steps.append(own.steps)
    return only_existing(Schedule("zbv", micro_batches, v_placement(ranks), ()).with_steps(steps), count)


def dualpipe_v(ranks: int, micro_batches: int) -> Schedule:
    """Forwards and backwards in pairs whose communication hides behind each other (DeepSeek-AI 2025, DualPipe's V-shaped half)."""
    count = max(micro_batches, 2 * ranks)
    steps = []
    for rank in range(ranks):
        below, above = ranks - 1 - rank, rank + 1  # ranks towards the turn, and ranks from the top to here
        own = _Rank(rank, ranks)
        for _ in range(2 * below):
            own.forward(_DOWN)
        for _ in range(above):
            own.forward(_DOWN)
            own.forward(_UP)
        for _ in range(below):
            own.input_gradient(_UP)
            own.weight_gradient()
            own.forward(_UP)
        for index in range(count - 2 * ranks + above):
            if index == 0 and below == 0:  # at the turn the others wait for this forward: it doesn't share
                own.forward(_DOWN)
                own.backward(_UP)
            else:
                own.overlapped(_UP, _DOWN)
            own.overlapped(_DOWN, _UP)
        for _ in range(below):
            own.backward(_UP)
            own.overlapped(_DOWN, _UP)
        for index in range(2 * above):  # the later half in parts, so that others needn't wait for weight gradients
            part = own.input_gradient if index >= above else own.backward
            part((_UP, _DOWN)[index % 2])
        for _ in range(below):
            own.weight_gradient()
            own.input_gradient(_DOWN)
        own.weight_gradients()
        steps.append(own.steps)
    return only_existing(Schedule("dualpipev", micro_batches, v_placement(ranks), ()).with_steps(steps), count)
