"""Names of `hp_pipeline` for type checkers. Written by build/stubs.py: edit the table, not this file."""

from hp_pipeline.analysis import Simulation as Simulation
from hp_pipeline.batches import BatchDimSpec as BatchDimSpec
from hp_pipeline.costs import Costs as Costs
from hp_pipeline.measured import measured_costs as measured_costs
from hp_pipeline.named import Schedule1F1B as Schedule1F1B
from hp_pipeline.named import ScheduleDualPipeV as ScheduleDualPipeV
from hp_pipeline.named import ScheduleGPipe as ScheduleGPipe
from hp_pipeline.named import ScheduleInterleaved1F1B as ScheduleInterleaved1F1B
from hp_pipeline.named import ScheduleInterleavedZeroBubble as ScheduleInterleavedZeroBubble
from hp_pipeline.named import ScheduleLoopedBFS as ScheduleLoopedBFS
from hp_pipeline.named import ScheduleZBH1 as ScheduleZBH1
from hp_pipeline.named import ScheduleZBV as ScheduleZBV
from hp_pipeline.orders.registry import ORDERS as ORDERS
from hp_pipeline.orders.registry import build_order as build_order
from hp_pipeline.overlap.comm_compute import CommComputeOverlap as CommComputeOverlap
from hp_pipeline.passes.backward import merge_backward as merge_backward
from hp_pipeline.passes.backward import split_backward as split_backward
from hp_pipeline.passes.communication import insert_communication as insert_communication
from hp_pipeline.passes.communication import overlap_communication as overlap_communication
from hp_pipeline.passes.sharded import insert_fsdp as insert_fsdp
from hp_pipeline.passes.swap import insert_swaps as insert_swaps
from hp_pipeline.picture import plot as plot
from hp_pipeline.run import PipelineSchedule as PipelineSchedule
from hp_pipeline.schedule import Schedule as Schedule
from hp_pipeline.simulator import simulate as simulate
from hp_pipeline.stage import PipelineStage as PipelineStage
from hp_pipeline.steps import MetaStep as MetaStep
from hp_pipeline.steps import MetaStepType as MetaStepType
from hp_pipeline.text_grid import grid as grid
from hp_pipeline.timeline import Event as Event
from hp_pipeline.timeline import Recorder as Recorder
from hp_pipeline.timeline import Timeline as Timeline
from hp_pipeline.trace import to_trace as to_trace
from hp_pipeline.trace import write_trace as write_trace
from hp_pipeline.transport import FormChanged as FormChanged
from hp_pipeline.transport import PeerFailed as PeerFailed
from hp_pipeline.validator import peak_in_flight as peak_in_flight
from hp_pipeline.validator import validate as validate

__version__: str
EXPORTS: dict[str, str]
__all__ = [
    "BatchDimSpec",
    "CommComputeOverlap",
    "Costs",
    "Event",
    "FormChanged",
    "MetaStep",
    "MetaStepType",
    "ORDERS",
    "PeerFailed",
    "PipelineSchedule",
    "PipelineStage",
    "Recorder",
    "Schedule",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBH1",
    "ScheduleZBV",
    "Simulation",
    "Timeline",
    "build_order",
    "grid",
    "insert_communication",
    "insert_fsdp",
    "insert_swaps",
    "measured_costs",
    "merge_backward",
    "overlap_communication",
    "peak_in_flight",
    "plot",
    "simulate",
    "split_backward",
    "to_trace",
    "validate",
    "write_trace",
]
