"""Passes: each a function from a schedule to a schedule, so that a schedule is built in small steps that can be looked at."""

from __future__ import annotations

from hp_pipeline.passes.backward import merge_backward, split_backward
from hp_pipeline.passes.communication import insert_communication, overlap_communication
from hp_pipeline.passes.sharded import insert_fsdp
from hp_pipeline.passes.swap import insert_swaps

__all__ = [
    "insert_communication",
    "insert_fsdp",
    "insert_swaps",
    "merge_backward",
    "overlap_communication",
    "split_backward",
]
