"""`PipelineStage`: a part of a model, and what it remembers of each micro-batch between forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hp_core.errors import PlanError
from hp_core.mesh import DeviceMesh, as_mesh
from hp_core.platform import get_platform
from hp_core.platform.protocol import Group, Tensor
from hp_core.process_group import get_rank, get_world_size, group_of_ranks
from hp_core.protocols import ShardedModule
from hp_pipeline.messages import Form, Parcel, pack
from hp_pipeline.overlap.exchange import exchanges_below
from hp_pipeline.platform import Chunk, Saved, get_tools

__all__ = ["PipelineStage"]

SharedParameters = Mapping[str, Sequence[tuple[int, str]]]


class PipelineStage:
    """One stage of a pipeline: a module that takes what the stage before gives.

    What a stage returns is what the next one is called with: a tuple or list as positional arguments, anything else as the
    only one. Values are nested containers of tensors and plain values. Gradients come back for floating-point tensors that
    need them.

    Example:
        >>> stage = PipelineStage(layers[rank], rank, 4)
        >>> schedule = Schedule1F1B(stage, micro_batches=8, loss_fn=cross_entropy)
        >>> losses = schedule.run(tokens, target=targets)

    Args:
        submodule: this part of the model.
        stage_index: which stage, 0 to `stage_num` - 1.
        stage_num: how many there are; the same everywhere.
        mesh: the ranks of the pipeline: a mesh of one axis, or one with an axis "pp". Default: the world.
        group: the ranks of the pipeline, instead of a mesh.
        device: where received tensors go; default the submodule's.
        shared_parameters: parameters that are one and the same in several stages: by any name, the places
            `(stage, "path.of.parameter")` of its copies. Their values start equal to the first one's, and their gradients are added
            up, so that they stay equal under equal optimizers. The same on all ranks.
        dynamic_shape: whether shapes may change from one micro-batch to the next; they are then sent along when they do.

    What is wrong with the numbers is said when a schedule is made of the stages, on all ranks.
    """

    def __init__(
        self,
        submodule: Any,
        stage_index: int,
        stage_num: int,
        *,
        mesh: DeviceMesh | Any | None = None,
        group: Group | None = None,
        device: Any = None,
        shared_parameters: SharedParameters | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        self.submodule = submodule
        self.stage_index = stage_index
        self.stage_num = stage_num
        self.device = get_tools().device_of(submodule) if device is None else device
        self.shared_parameters = {
            name: tuple((int(stage), str(path)) for stage, path in places)
            for name, places in (shared_parameters or {}).items()
        }
        self.dynamic_shape = dynamic_shape
        self.problem = ""
        self.group = self._group_of(mesh, group)
        self.forward_names = tuple(get_platform().modules.forward_names(submodule))
        self.sharded: list[ShardedModule] = [
            module for _, module in get_platform().modules.named_modules(submodule) if isinstance(module, ShardedModule)
        ]
        self.exchanges = exchanges_below(submodule)
        self._chunks: dict[int, _Passage] = {}
        self._form: Form | None = None

    @property
    def is_first(self) -> bool:
        """Whether it takes the inputs of the model."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether the loss is made of its output."""
        return self.stage_index == self.stage_num - 1

    @property
    def in_flight(self) -> int:
        """Number of micro-batches whose graph is held."""
        return len(self._chunks)

    def accepts(self, name: str) -> bool:
        """Whether its forward takes a keyword argument of this name."""
        return name in self.forward_names or "**" in self.forward_names

    def forward(
        self,
        micro_batch: int,
        received: Mapping[int, Parcel],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        record: bool,
        staying: Sequence[Tensor] | None = None,
    ) -> Any:
        """Run the forward of a micro-batch.

        Args:
            micro_batch: its number.
            received: what came from other stages, by stage; their leaves are where the graph is cut.
            args: positional arguments.
            kwargs: keyword arguments.
            record: whether a backward follows.
            staying: for a micro-batch whose activations are to be swapped, what others hold as well; None: they aren't.

        Returns:
            What the module returns.
        """
        if not record:
            return get_tools().call(self.submodule, args, kwargs, record)
        passage = _Passage({source: parcel.differentiable for source, parcel in received.items()})
        if staying is not None:
            passage.saved = get_tools().saved()
            passage.saved.stay(staying)
        with passage.recording():
            output = get_tools().call(self.submodule, args, kwargs, record)
        self._chunks[micro_batch] = passage
        return output

    def call_loss(self, micro_batch: int, function: Callable[..., Any], args: Sequence[Any], record: bool) -> Any:
        """The loss of an output, in the graph of its micro-batch."""
        if not record:
            return get_tools().call_loss(function, args, record)
        with self._chunks[micro_batch].recording():
            return get_tools().call_loss(function, args, record)

    def close_forward(self, micro_batch: int, roots: Sequence[Tensor]) -> None:
        """Say what the backward of the micro-batch starts from: outputs that others take, or its loss."""
        passage = self._chunks[micro_batch]
        if passage.saved is not None:
            passage.saved.stay(roots)
        passage.chunk = get_tools().chunk([leaf for leaves in passage.inputs.values() for leaf in leaves], roots)

    def pack_output(self, output: Any, record: bool) -> Parcel:
        """The output as it is given to others."""
        parcel = pack(output, f"the output of stage {self.stage_index}", record, self._form)
        self._form = parcel.form
        return parcel

    def backward(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> dict[int, list[Tensor | None]]:
        """The whole backward of a micro-batch.

        Args:
            micro_batch: its number.
            gradients: of the roots.

        Returns:
            By stage that inputs came from, their gradients.
        """
        passage = self._chunks.pop(micro_batch)
        assert passage.chunk is not None
        return passage.by_source(passage.chunk.backward(gradients))

    def backward_inputs(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> dict[int, list[Tensor | None]]:
        """The part of the backward that gives gradients of inputs; `backward_weights` follows.

        In a sharded stage this is the whole backward: its parameters would have to stay whole until the rest.
        """
        passage = self._chunks[micro_batch]
        assert passage.chunk is not None
        if self.sharded:
            return passage.by_source(passage.chunk.backward(gradients))
        found = passage.by_source(passage.chunk.backward_inputs(gradients))
        passage.inputs = {}
        return found

    def backward_weights(self, micro_batch: int) -> None:
        """The part of the backward that gives gradients of weights."""
        passage = self._chunks.pop(micro_batch)
        assert passage.chunk is not None
        if not self.sharded:
            passage.chunk.backward_weights()

    def swap_out(self, micro_batch: int) -> None:
        """Move to the host what the micro-batch's graph alone holds. It isn't asynchronous: it is there when this returns."""
        passage = self._chunks[micro_batch]
        assert passage.chunk is not None
        self._moving(micro_batch).move_out()
        passage.chunk.release_inputs()

    def swap_in(self, micro_batch: int) -> None:
        """Bring it back."""
        self._moving(micro_batch).move_in()

    def _moving(self, micro_batch: int) -> Saved:
        saved = self._chunks[micro_batch].saved
        if saved is None:
            raise PlanError(
                f"stage {self.stage_index}, micro-batch {micro_batch}: its forward wasn't told that activations move. Where "
                f"SWAP_OUT has a function of its own (register_custom_function), give SWAP_IN one as well."
            )
        return saved

    @property
    def bytes_on_host(self) -> int:
        """Bytes of activations that are swapped out."""
        return sum(passage.saved.on_host for passage in self._chunks.values() if passage.saved is not None)

    def reduce_gradients(self, now: bool) -> None:
        """Whether the next backward reduces the gradients of a sharded stage."""
        for module in self.sharded:
            module.set_requires_gradient_sync(now)
            module.set_is_last_backward(now)

    def drop(self) -> None:
        """Forget all micro-batches, after a failure."""
        self._chunks.clear()

    def _group_of(self, mesh: Any, group: Group | None) -> Group:
        if group is not None:
            if get_rank() not in group.ranks:
                self.problem = f"rank {get_rank()} isn't in the group {list(group.ranks)} that the stage was given."
            return group
        if mesh is None:
            return group_of_ranks(tuple(range(get_world_size())))
        whole = as_mesh(mesh)
        if whole.ndim == 1:
            return whole.get_group()
        if "pp" in (whole.mesh_dim_names or ()):
            return whole.get_group("pp")
        self.problem = f"the mesh {whole} has several axes, none of which is called 'pp'; pass mesh[axis]."
        return group_of_ranks(tuple(range(get_world_size())))

    def __repr__(self) -> str:
        return f"PipelineStage({self.stage_index} of {self.stage_num}, {type(self.submodule).__name__})"


class _Passage:
    """A micro-batch between forward and backward: the leaves where its graph begins, the graph, and what that keeps if it moves."""

    def __init__(self, inputs: dict[int, list[Tensor]]) -> None:
        self.inputs = inputs
        self.chunk: Chunk | None = None
        self.saved: Saved | None = None

    def recording(self) -> AbstractContextManager[None]:
        """Where the graph is made."""
        return nullcontext() if self.saved is None else self.saved.recording()

    def by_source(self, gradients: Sequence[Tensor | None]) -> dict[int, list[Tensor | None]]:
        """Gradients of all leaves, by stage they came from."""
        found, at = {}, 0
        for source, leaves in self.inputs.items():
            found[source] = list(gradients[at : at + len(leaves)])
            at += len(leaves)
        return found
