"""Pipeline parallelism of the example: which layers are a stage, how stages lie on the other axes, and a step of the run.

Between stages plain tensors travel: a rank's rows, and with sequence parallelism its part of their length. Parameters keep
the names that they have in the whole model, so checkpoints and the check are those of every other mesh.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hp_core import DeviceMesh, DTensor, Partial, distribute_module, parallelize_module
from hp_fsdp import clip_grad_norm_, fully_shard
from hp_pipeline import PipelineSchedule, PipelineStage, build_order, insert_fsdp

from .config import DATA_AXES, RunConfig
from .fully_sharded import data_mesh, precision_policy, tensor_mesh
from .model import LanguageModel, next_byte_loss
from .parallel import distribute_batch, local_part, stream_placement, tensor_parallel_plan
from .text import Text
from .trainer import Trainer

OF_STAGES = {"pp": None}
"""What clipping is told: along `pp` ranks have different parameters."""


def make_trainer(config: RunConfig, text: Text, mesh: DeviceMesh | None = None) -> Trainer:
    """The trainer of a run on its mesh; None for one dense process."""
    kind = PipelinedTrainer if mesh is not None and config.pipelined else Trainer
    return kind(config, text, mesh)


def layers_of_stage(layers: int, stages: int, stage: int) -> range:
    """The blocks of a stage: as many for each, or one more for the first ones."""
    each, more = divmod(layers, stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


class ModelPart(nn.Module):
    """Some layers of the model: bytes or the residual stream in, the residual stream or scores out.

    Args:
        model: The whole model, whose modules it shares.
        layers: Numbers of its blocks.
        first: Whether it has the embedding.
        last: Whether it has the head.
    """

    def __init__(self, model: LanguageModel, layers: list[int], first: bool, last: bool) -> None:
        super().__init__()
        if first:
            self.embedding = model.embedding
        self.blocks = nn.ModuleDict({str(layer): model.blocks[layer] for layer in layers})
        if last:
            self.norm, self.head = model.norm, model.head
        self.first, self.last = first, last
        self.mesh: DeviceMesh | None = None
        self.sequence_parallel = False

    def forward(self, x: Tensor) -> Tensor:
        """From int64 `[rows, sequence]` or `[rows, sequence, d_model]` to `[rows, sequence, d_model or vocabulary]`.

        With `tp` scores stay a distributed tensor, sharded by vocabulary, for the loss.
        """
        if self.mesh is not None:
            placements = [stream_placement(self.sequence_parallel and not self.first)]
            x = DTensor.from_local(x, self.mesh, placements)
        if self.first:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        if self.last:
            scores: Tensor = self.head(self.norm(x))
            return scores
        return x.to_local() if isinstance(x, DTensor) else x

    def parallelize(self, mesh: DeviceMesh, sequence_parallel: bool) -> None:
        """Cut it over `tp`, in place."""
        self.mesh, self.sequence_parallel = mesh, sequence_parallel
        plan = tensor_parallel_plan(sequence_parallel)
        own = {name for name, _ in self.named_children()}
        parallelize_module(self, mesh, {name: style for name, style in plan.items() if name.split(".")[0] in own})
        distribute_module(self, mesh)


class PipelinedTrainer(Trainer):
    """A trainer whose model is spread over `pp`; on each rank `model` is what the rank's stages consist of."""

    @property
    def batch_mesh(self) -> DeviceMesh | None:
        """Stages compute with the rows of their rank; only `tp` makes one tensor of what ranks have."""
        return None if self.mesh is None else tensor_mesh(self.mesh)

    def _placed(self, model: LanguageModel) -> nn.Module:
        config, mesh = self.config, self.mesh
        assert mesh is not None
        order = build_order(config.schedule, config.axis_size("pp"), config.parts)
        own = order.stages_of(mesh.get_local_rank("pp"))
        last = order.stages - 1
        layers = {stage: list(layers_of_stage(config.sizes.layers, order.stages, stage)) for stage in own}
        parts = {stage: ModelPart(model, layers[stage], stage == 0, stage == last) for stage in own}
        for part in parts.values():
            self._lay_out(part)
        if config.fsdp:
            order = insert_fsdp(order, range(order.stages))
        self.schedule = PipelineSchedule(
            [PipelineStage(part, stage, order.stages, mesh=mesh) for stage, part in parts.items()],
            order,
            loss_fn=self._loss_of_scores,
        )
        return ModelPart(model, [layer for stage in own for layer in layers[stage]], 0 in own, last in own)

    def _lay_out(self, part: ModelPart) -> None:
        """Cut a stage over `tp`, and over the data axes as one unit, which is gathered once for all micro-batches."""
        config, mesh = self.config, self.mesh
        assert mesh is not None
        if self.batch_mesh is not None:
            part.parallelize(self.batch_mesh, config.sequence_parallel)
        if config.fsdp:
            fully_shard(part, mesh=data_mesh(mesh), mp_policy=precision_policy(config, scores=part.last))

    def _forward_backward(self, step: int) -> float:
        rows = self._rows("train", step)
        losses = self.schedule.run(rows[:, :-1], target=rows[:, 1:])
        if not self.config.fsdp:
            self._average_gradients()
        return self._mean(losses, len(rows))

    def _evaluate(self, step: int) -> float:
        rows = self._rows("validation", step)
        return self._mean(self.schedule.evaluate(rows[:, :-1], target=rows[:, 1:]), len(rows))

    def _loss_of_scores(self, scores: Tensor, targets: Tensor) -> Tensor:
        loss = next_byte_loss(scores, distribute_batch(targets, self.batch_mesh))
        return loss.full_tensor() if isinstance(loss, DTensor) else loss

    def _mean(self, losses: list[Tensor], rows: int) -> float:
        """The mean over the whole batch, on every rank; `losses` are those of micro-batches, on ranks of the last stage."""
        mesh = self.mesh
        assert mesh is not None
        own = torch.zeros((), dtype=torch.float64, device=self.config.device)
        sizes = [len(part) for part in torch.arange(rows).tensor_split(self.config.parts)]
        for loss, size in zip(losses, sizes, strict=False):  # none where the last stage isn't
            own += loss.double() * size / self.config.batch
        axes = tuple(axis for axis in mesh.mesh_dim_names if axis in ("pp", *DATA_AXES))
        return float(DTensor.from_local(own, mesh[axes], [Partial()] * len(axes)).full_tensor())

    def _average_gradients(self) -> None:
        """Over the ranks that had other rows, all gradients in one message, once for all micro-batches."""
        mesh = self.mesh
        assert mesh is not None
        if "dp" not in mesh.mesh_dim_names:
            return
        gradients = [local_part(parameter.grad) for parameter in self.model.parameters()]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        mean = DTensor.from_local(flat, mesh["dp"], [Partial("avg")]).full_tensor()
        for gradient, piece in zip(gradients, mean.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(piece.view_as(gradient))

    def _clip(self) -> float | None:
        if not self.config.clip:
            return None
        parameters = self.model.parameters()
        return float(clip_grad_norm_(parameters, self.config.clip, mesh=self.mesh, distinct=OF_STAGES))
