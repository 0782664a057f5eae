"""A plan made ready for this rank, and the cache of such programs.

`execution` compiles each step to a closure; a program calls them one after the other. Called with `start`, it returns as
soon as its last communication is on its way.
"""

from __future__ import annotations

from typing import NamedTuple

from hp_core.geometry import origin_box
from hp_core.layout import Layout
from hp_core.miss_storm import MissStorm
from hp_core.platform import get_platform
from hp_core.platform.protocol import Tensor
from hp_core.process_group import on_destroy
from hp_core.redistribute.execution import ABSENT_SHAPE, Arrivals, Run, compile_step, is_member, keeps_value
from hp_core.redistribute.planner import plan_redistribute
from hp_core.redistribute.steps import Plan, Scale

__all__ = ["CacheInfo", "Program", "program_for", "redistribute_cache_clear", "redistribute_cache_info"]


class CacheInfo(NamedTuple):
    """Counters of the cache of programs."""

    hits: int
    misses: int
    size: int


class Program:
    """A plan made ready for this rank: call it with a local tensor.

    Attributes:
        plan: what it does.
        is_identity: whether it does nothing on this rank.
        keeps: of a program that only makes a replicated value pending, whether this rank keeps it (else it holds zeros).
    """

    __slots__ = ("_result_shape", "_runs", "_waiting", "is_identity", "keeps", "plan")

    def __init__(self, plan: Plan) -> None:
        compiled = [part for part in (compile_step(step, plan.global_shape) for step in plan.steps) if part is not None]
        self.plan = plan
        self._runs: tuple[Run, ...] = tuple(run for run, _ in compiled)
        # the last step that communicates; steps after it are local
        self._waiting = max((index for index, (_, communicates) in enumerate(compiled) if communicates), default=None)
        self._result_shape = plan.dst.local_shape(plan.global_shape) if is_member(plan.dst) else ABSENT_SHAPE
        self.is_identity = not compiled
        only = plan.steps[0] if len(plan.steps) == 1 else None
        self.keeps = keeps_value(only) if isinstance(only, Scale) and is_member(only.before) else None

    def __call__(self, local: Tensor) -> Tensor:
        """The local tensor after all steps; `local` itself if there are none."""
        for run in self._runs:
            local = run(local)
        return local

    def start(self, local: Tensor, arrivals: Arrivals) -> Tensor:
        """The local tensor as it will be, once what is left in `arrivals` has been called, in order.

        All communication but the last is waited for here; a plan of one collective returns at once.
        """
        waiting = self._waiting
        if waiting is None:
            return self(local)
        for run in self._runs[:waiting]:
            local = run(local)
        moved = self._runs[waiting](local, arrivals)
        rest = self._runs[waiting + 1 :]
        if not rest:
            return moved
        tensors = get_platform().tensors
        result = tensors.empty(self._result_shape, moved)

        def finish() -> None:
            value = moved
            for run in rest:
                value = run(value)
            tensors.paste(result, origin_box(self._result_shape), value)

        arrivals.append(finish)
        return result


_programs: dict[tuple[Layout, Layout, tuple[int, ...], int], Program] = {}
_hits = 0
_storm = MissStorm(
    "redistribution plans",
    "A plan is made for each global shape: pad to a few shapes. redistribute_cache_info() counts hits and misses.",
)


def program_for(src: Layout, dst: Layout, global_shape: tuple[int, ...], itemsize: int) -> Program:
    """This rank's program from one layout to another; planned and compiled on the first call, then found in the cache.

    Raises:
        RedistributeError, LayoutError: see `plan_redistribute`. Nothing has been communicated then.
    """
    global _hits
    key = (src, dst, global_shape, itemsize)
    program = _programs.get(key)
    if program is not None:
        _hits += 1
        return program
    program = _programs[key] = Program(plan_redistribute(src, dst, tuple(global_shape), itemsize))
    _storm.missed((src, dst), f"redistribute {src.compact_str} -> {dst.compact_str}", (tuple(global_shape), itemsize))
    return program


def redistribute_cache_info() -> CacheInfo:
    """Hits, misses and size of the cache of redistribution programs."""
    return CacheInfo(_hits, len(_programs), len(_programs))


def redistribute_cache_clear() -> None:
    """Forget all programs (they hold process groups) and reset the counters."""
    global _hits
    _programs.clear()
    _hits = 0
    _storm.clear()


on_destroy(redistribute_cache_clear)
