"""How the model and its batches lie on a mesh, in words that mean the same on PyTorch and on MindSpore.

`dp` shards the batch and replicates the parameters (`fully_sharded.py` shards those as well); `tp` shards the projections
by tensor-parallel styles, and with sequence parallelism the residual stream along the sequence. Gradients need no wrapper:
the library reduces them by the law of gradients.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from hp_core import (
    ColwiseParallel,
    DeviceMesh,
    DTensor,
    Placement,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    distribute_module,
    init_device_mesh,
    loss_parallel,
    parallelize_module,
)

from .config import DATA_AXES, RunConfig

if TYPE_CHECKING:
    from hp_core.tensor_parallel import ParallelStyle


def build_mesh(config: RunConfig) -> DeviceMesh:
    """The mesh that the run asks for. The process group must be open."""
    axes, sizes = zip(*config.mesh, strict=True)
    return init_device_mesh(config.device, sizes, mesh_dim_names=axes)


def parallelize(model: Any, mesh: DeviceMesh, sequence_parallel: bool) -> None:
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
    stream = stream_placement(sequence_parallel)

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


def stream_placement(sequence_parallel: bool) -> Placement:
    """How the residual stream `[batch, sequence, d_model]` lies over `tp` between the sides of blocks."""
    return Shard(1) if sequence_parallel else Replicate()


def local_positions(batch: int, mesh: DeviceMesh | None) -> range:
    """Which rows of the global batch this rank reads: its share over the data axes, all of them elsewhere."""
    first, share = 0, batch
    for axis in () if mesh is None else mesh.mesh_dim_names:
        if axis in DATA_AXES:
            share //= mesh[axis].size()  # type: ignore[index]
            first += mesh.get_local_rank(axis) * share  # type: ignore[union-attr]
    return range(first, first + share)


def distribute_batch(rows: Any, mesh: DeviceMesh | None) -> Any:
    """Makes this rank's rows its part of the global batch; leaves them as they are without a mesh."""
    if mesh is None:
        return rows
    placements = [Shard(0) if axis == "dp" else Replicate() for axis in mesh.mesh_dim_names]
    return DTensor.from_local(rows, mesh, placements)


def loss_context(mesh: DeviceMesh | None) -> AbstractContextManager[None]:
    """Where the loss is taken: with `tp` the cross entropy works on scores sharded by vocabulary, never gathered."""
    return loss_parallel() if mesh is not None and "tp" in mesh.mesh_dim_names else nullcontext()


def dense(tensor: Any) -> Any:
    """The whole tensor, detached, on every rank. All ranks must call it for a distributed tensor."""
    if isinstance(tensor, DTensor):
        return tensor.detach().full_tensor()
    # a plain tensor of MindSpore is in no graph outside of the function that is differentiated
    return tensor.detach() if hasattr(tensor, "detach") else tensor


def local_part(tensor: Any) -> Any:
    """What this rank holds of a tensor, detached; changes of it change the tensor."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
