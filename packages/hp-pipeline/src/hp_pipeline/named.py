"""The named schedules: `PipelineSchedule` with the order that the class is called after."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hp_pipeline.run import PipelineSchedule
from hp_pipeline.stage import PipelineStage

__all__ = [
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBH1",
    "ScheduleZBV",
]


class _Named(PipelineSchedule):
    """A schedule by its name."""

    order_name = ""

    def __init__(
        self,
        stages: PipelineStage | Iterable[PipelineStage],
        micro_batches: int,
        loss_fn: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        listed = stages if isinstance(stages, PipelineStage) else list(stages)
        super().__init__(listed, self.order_name, micro_batches, loss_fn, **options)


class ScheduleGPipe(_Named):
    """All forwards, then all backwards; arguments as for `PipelineSchedule`."""

    order_name = "gpipe"


class Schedule1F1B(_Named):
    """One forward, one backward; arguments as for `PipelineSchedule`."""

    order_name = "1f1b"


class ScheduleInterleaved1F1B(_Named):
    """1F1B with several stages per rank, dealt out round and round; arguments as for `PipelineSchedule`."""

    order_name = "interleaved1f1b"


class ScheduleLoopedBFS(_Named):
    """Several stages per rank, each for all micro-batches before the next; arguments as for `PipelineSchedule`."""

    order_name = "loopedbfs"


class ScheduleZBH1(_Named):
    """1F1B with split backwards that fill part of the bubble; arguments as for `PipelineSchedule`."""

    order_name = "zbh1"


class ScheduleInterleavedZeroBubble(_Named):
    """Interleaved 1F1B with split backwards; arguments as for `PipelineSchedule`."""

    order_name = "interleavedzb"


class ScheduleZBV(_Named):
    """Two stages per rank, in a V, and split backwards; arguments as for `PipelineSchedule`."""

    order_name = "zbv"


class ScheduleDualPipeV(_Named):
    """Two stages per rank, in a V, with backwards and forwards in pairs; arguments as for `PipelineSchedule`."""

    order_name = "dualpipev"
