"""Fully sharded data parallelism of the example: one unit per block, over `dp`, or over `dps` with replicas over `dpr`.

Unlike the rest of the example, each rank then computes the loss of its own rows; gradients are averaged by the units.
"""

from __future__ import annotations

from typing import Any

import torch

from hp_core import DeviceMesh, DTensor, Partial, distribute_module, parallelize_module
from hp_fsdp import MixedPrecisionPolicy, fully_shard

from .config import DATA_AXES, RunConfig
from .parallel import dense, tensor_parallel_plan


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The axes over which the batch is cut."""
    return mesh[tuple(axis for axis in mesh.mesh_dim_names if axis in DATA_AXES)]


def tensor_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """The axis over which projections are cut, if there is one."""
    return mesh["tp"] if "tp" in mesh.mesh_dim_names else None


def shard(model: Any, mesh: DeviceMesh, config: RunConfig) -> None:
    """Cuts projections over `tp`, then all parameters over the data axes, in place."""
    tensor_parallel = tensor_mesh(mesh)
    if tensor_parallel is not None:
        parallelize_module(model, tensor_parallel, tensor_parallel_plan(config.sequence_parallel))
        distribute_module(model, tensor_parallel)
    data = data_mesh(mesh)
    for block in model.blocks:
        fully_shard(block, mesh=data, mp_policy=precision_policy(config))
    fully_shard(model, mesh=data, mp_policy=precision_policy(config, scores=True))


def precision_policy(config: RunConfig, scores: bool = False) -> MixedPrecisionPolicy:
    """What units gather, compute and reduce in. Scores leave the model in float32, for the loss."""
    if config.precision != "bf16":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32 if scores else None)


def mean_over_data(loss: Any, mesh: DeviceMesh) -> Any:
    """The mean of the ranks' losses, on every rank."""
    data = data_mesh(mesh)
    return dense(DTensor.from_local(dense(loss).double(), data, [Partial("avg")] * data.ndim))
