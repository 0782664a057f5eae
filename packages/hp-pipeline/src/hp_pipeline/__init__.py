"""hp-pipeline: pipeline parallelism. Schedules are data: a validator proves them, a simulator predicts them, a runtime walks them.

Every public name is here, and is loaded when it is first used: `import hp_pipeline` loads no framework.
`__init__.pyi` lists the same names for type checkers; `python build/stubs.py` writes it from `EXPORTS`.
"""

from __future__ import annotations

from hp_core.lazy_exports import lazy_exports

# Public name -> module that defines it.
EXPORTS = {
    "BatchDimSpec": "batches",
    "CommComputeOverlap": "overlap.comm_compute",
    "Costs": "costs",
    "Event": "timeline",
    "FormChanged": "transport",
    "MetaStep": "steps",
    "MetaStepType": "steps",
    "ORDERS": "orders.registry",
    "PeerFailed": "transport",
    "PipelineSchedule": "run",
    "PipelineStage": "stage",
    "Recorder": "timeline",
    "Schedule": "schedule",
    "Schedule1F1B": "named",
    "ScheduleDualPipeV": "named",
    "ScheduleGPipe": "named",
    "ScheduleInterleaved1F1B": "named",
    "ScheduleInterleavedZeroBubble": "named",
    "ScheduleLoopedBFS": "named",
    "ScheduleZBH1": "named",
    "ScheduleZBV": "named",
    "Simulation": "analysis",
    "Timeline": "timeline",
    "build_order": "orders.registry",
    "grid": "text_grid",
    "insert_communication": "passes.communication",
    "insert_fsdp": "passes.sharded",
    "insert_swaps": "passes.swap",
    "measured_costs": "measured",
    "merge_backward": "passes.backward",
    "overlap_communication": "passes.communication",
    "peak_in_flight": "validator",
    "plot": "picture",
    "simulate": "simulator",
    "split_backward": "passes.backward",
    "to_trace": "trace",
    "validate": "validator",
    "write_trace": "trace",
}

__getattr__, __dir__, __all__ = lazy_exports(__name__, "hp-pipeline", EXPORTS)
