"""How the model and its batches lie on a mesh: the only file of the example that knows of more than one process.

`dp` replicates the parameters and shards the batch; `tp` shards the projections by tensor-parallel styles, and with
sequence parallelism the residual stream along the sequence. Gradients need no wrapper: the library reduces them by the
law of gradients.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hp_core import (
    ColwiseParallel,
    DeviceMesh,
    DTensor,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    destroy_process_group,
    distribute_module,
    init_device_mesh,
    init_process_group,
    loss_parallel,
    parallelize_module,
)

from .config import ConfigError, RunConfig

if TYPE_CHECKING:
    from hp_core.tensor_parallel import ParallelStyle


def launched_world_size() -> int | None:
    """How many processes the launcher (torchrun) started; None when this is a plain process."""
    size = os.environ.get("WORLD_SIZE")
    return None if size is None else int(size)


def require_device(device: str) -> None:
    """Refuses a device that this process can't use.

    Raises:
        ConfigError: Its package is missing or fails, or it sees none.
    """
    if device == "cpu":
        return
    try:
        if device == "npu":
            importlib.import_module("torch_npu")
        available = torch.get_device_module(device).is_available()
    except Exception as error:  # torch_npu fails in many ways where CANN is missing
        raise ConfigError(
            f"--device {device} can't be used ({error}): npu needs the package torch_npu and CANN's set_env.sh sourced"
        ) from error
    if not available:
        raise ConfigError(f"--device {device}: PyTorch sees none in this process; use --device cpu")


@contextmanager
def mesh_of_this_job(config: RunConfig) -> Iterator[DeviceMesh | None]:
    """The mesh of the launched job, with the process group open; None in a plain process, where everything is dense."""
    if launched_world_size() is None:
        yield None
        return
    init_process_group({"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}[config.device])
    try:
        if config.device != "cpu":
            torch.get_device_module(config.device).set_device(int(os.environ.get("LOCAL_RANK", "0")))
        yield build_mesh(config)
    finally:
        destroy_process_group()


def build_mesh(config: RunConfig) -> DeviceMesh:
    """The mesh that the run asks for. The process group must be open."""
    axes, sizes = zip(*config.mesh, strict=True)
    return init_device_mesh(config.device, sizes, mesh_dim_names=axes)


def parallelize(model: nn.Module, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Makes every parameter and buffer a distributed tensor on the mesh, in place.

    Every rank must hold the same dense weights.
    """
    if "tp" in mesh.mesh_dim_names:
        parallelize_module(model, mesh, tensor_parallel_plan(sequence_parallel))
    # What no style covers (norms, rotary tables, and with dp alone everything) is replicated.
    distribute_module(model, mesh)


def tensor_parallel_plan(sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Module name patterns to styles: Megatron's column and row cut, with the vocabulary cut at both ends.

    The residual stream is replicated over `tp`, or sharded along the sequence. Each block side gathers its input once,
    for all of its projections: their gradients are then reduced together.
    """
    stream = Shard(1) if sequence_parallel else Replicate()

    def gather() -> PrepareModuleInput:
        return PrepareModuleInput(input_layouts=stream, desired_input_layouts=Replicate(), use_local_output=False)

    def column() -> ColwiseParallel:
        return ColwiseParallel(use_local_output=False)

    def row() -> RowwiseParallel:
        return RowwiseParallel(output_layouts=stream, use_local_output=False)

    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream, use_local_output=False),
        "blocks.*.attention": gather(),
        "blocks.*.attention.query": column(),
        "blocks.*.attention.key": column(),
        "blocks.*.attention.value": column(),
        "blocks.*.attention.output": row(),
        "blocks.*.feed_forward": gather(),
        "blocks.*.feed_forward.gate": column(),
        "blocks.*.feed_forward.up": column(),
        "blocks.*.feed_forward.down": row(),
        "head": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence_parallel:
        for norm in ("blocks.*.attention_norm", "blocks.*.feed_forward_norm", "norm"):
            plan[norm] = SequenceParallel(use_local_output=False)
    return plan


def local_positions(batch: int, mesh: DeviceMesh | None) -> range:
    """Which rows of the global batch this rank reads: its share over `dp`, all of them elsewhere."""
    if mesh is None or "dp" not in mesh.mesh_dim_names:
        return range(batch)
    share = batch // mesh["dp"].size()
    first = mesh.get_local_rank("dp") * share
    return range(first, first + share)


def distribute_batch(rows: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Makes this rank's rows its part of the global batch; leaves them as they are without a mesh."""
    if mesh is None:
        return rows
    placements = [Shard(0) if axis == "dp" else Replicate() for axis in mesh.mesh_dim_names]
    return DTensor.from_local(rows, mesh, placements)


def loss_context(mesh: DeviceMesh | None) -> AbstractContextManager[None]:
    """Where the loss is taken: with `tp` the cross entropy works on scores sharded by vocabulary, never gathered."""
    return loss_parallel() if mesh is not None and "tp" in mesh.mesh_dim_names else nullcontext()


def dense(tensor: Tensor) -> Tensor:
    """The whole tensor, detached, on every rank. All ranks must call it for a distributed tensor."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
