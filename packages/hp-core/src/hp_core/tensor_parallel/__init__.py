"""Tensor parallelism: styles for modules, and the plan that applies them."""

from hp_core.tensor_parallel.loss import loss_parallel
from hp_core.tensor_parallel.plan import parallelize_module
from hp_core.tensor_parallel.sharding_plan import ShardingPlan, shard_module
from hp_core.tensor_parallel.styles import (
    ColwiseParallel,
    NoParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

__all__ = [
    "ColwiseParallel",
    "NoParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "ShardingPlan",
    "loss_parallel",
    "parallelize_module",
    "shard_module",
]
