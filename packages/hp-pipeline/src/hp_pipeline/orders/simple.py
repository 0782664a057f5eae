"""GPipe and 1F1B: one stage per rank."""

from __future__ import annotations

from hp_pipeline.schedule import Schedule, looped_placement
from hp_pipeline.steps import MetaStepType, plain_step

__all__ = ["gpipe", "one_f_one_b"]

_F, _B = MetaStepType.F, MetaStepType.B


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, GPipe)."""
    steps = [
        [plain_step(kind, stage, batch) for kind in (_F, _B) for batch in range(micro_batches)]
        for stage in range(ranks)
    ]
    return Schedule("gpipe", micro_batches, looped_placement(ranks, 1), ()).with_steps(steps)


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """One forward, one backward after a warm-up as long as the way to the last stage (Narayanan et al. 2019, PipeDream-Flush)."""
    steps = []
    for stage in range(ranks):
        warm = min(ranks - 1 - stage, micro_batches)
        order = [plain_step(_F, stage, batch) for batch in range(warm)]
        for batch in range(warm, micro_batches):
            order += [plain_step(_F, stage, batch), plain_step(_B, stage, batch - warm)]
        order += [plain_step(_B, stage, batch) for batch in range(micro_batches - warm, micro_batches)]
        steps.append(order)
    return Schedule("1f1b", micro_batches, looped_placement(ranks, 1), ()).with_steps(steps)
