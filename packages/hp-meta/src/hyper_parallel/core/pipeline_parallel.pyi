"""Names of `hyper_parallel.core.pipeline_parallel` for type checkers. Written by build/stubs.py: edit the table, not this file."""

from hp_pipeline import BatchDimSpec as BatchDimSpec
from hp_pipeline import CommComputeOverlap as CommComputeOverlap
from hp_pipeline import MetaStep as MetaStep
from hp_pipeline import MetaStepType as MetaStepType
from hp_pipeline import PipelineStage as PipelineStage
from hp_pipeline import Schedule1F1B as Schedule1F1B
from hp_pipeline import ScheduleGPipe as ScheduleGPipe
from hp_pipeline import ScheduleInterleaved1F1B as ScheduleInterleaved1F1B

__all__ = [
    "BatchDimSpec",
    "CommComputeOverlap",
    "MetaStep",
    "MetaStepType",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
]
