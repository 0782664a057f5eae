"""The one runtime: it walks a rank's steps in order. What was printed, simulated and validated is what runs here.

After a failure it walks on without computing, so that each message still meets its counterpart: all ranks learn of it at once,
none is left waiting, and the next run starts clean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from hp_core.errors import CommTimeoutError, PlanError, ProcessGroupError
from hp_core.platform.protocol import Tensor
from hp_core.protocols import ShardedModule
from hp_pipeline.feed import Feed
from hp_pipeline.mailbox import Mailbox
from hp_pipeline.overlap.comm_compute import CommComputeOverlap
from hp_pipeline.platform import get_tools
from hp_pipeline.schedule import Schedule
from hp_pipeline.stage import PipelineStage
from hp_pipeline.steps import COMMUNICATION, MetaStep, MetaStepType
from hp_pipeline.transport import PeerFailed

__all__ = ["CustomFunction", "StepRecorder", "Walk"]

_T = MetaStepType


class StepRecorder(Protocol):
    """What is told when steps begin and end; `hp_pipeline.timeline.Recorder` is one."""

    def begin(self, step: MetaStep) -> None:
        """A step begins."""

    def end(self, step: MetaStep) -> None:
        """It has ended."""


@dataclass
class Walk:
    """One run of a rank. Functions registered for a type of step get it as their context.

    Attributes:
        schedule: what all ranks do.
        position: of this rank along the pipeline axis.
        steps: its steps.
        stages: its stages, by index.
        rank: this rank's global number.
        skips: by (from, to) the name of the argument of skip connections.
        mail: what comes and goes.
        feed: inputs.
        custom: functions that stand in for the runtime's own, by type of step.
        recorder: told of each step.
        overlap: what pairs of a backward and a forward are run by; None runs them one after the other.
        losses: of the last stage, by micro-batch.
        outputs: of the last stage, by micro-batch, where no loss was made of them.
        error: what has failed, first.
        failure: the same in words, for other ranks.
        failed_at: at which position.
        lost_peer: whether a peer has ended.
    """

    schedule: Schedule
    position: int
    steps: Sequence[MetaStep]
    stages: Mapping[int, PipelineStage]
    rank: int
    skips: Mapping[tuple[int, int], str]
    mail: Mailbox
    feed: Feed
    custom: Mapping[MetaStepType, CustomFunction]
    recorder: StepRecorder | None = None
    overlap: CommComputeOverlap | None = None
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    error: Exception | None = None
    failure: str = ""
    failed_at: int = 0
    lost_peer: bool = False
    _at: int = 0
    _begun: int = -1
    _gathering: dict[int, Any] = field(default_factory=dict)
    _left: dict[int, int] = field(default_factory=dict)
    _swapped: set[tuple[int, int]] = field(default_factory=set)

    def go(self) -> None:
        """Walk all steps. `error` says afterwards whether something failed.

        Raises:
            CommTimeoutError: a peer didn't answer in time.
        """
        self.mail.begin()
        self._left = dict.fromkeys(self.stages, self.schedule.micro_batches)
        if _T.SWAP_OUT not in self.custom:
            self._swapped = {(step.stage, _batch(step)) for step in self.steps if step.type is _T.SWAP_OUT}
        try:
            for at, step in enumerate(self.steps):
                self._at = at
                self._walk(step)
            self.mail.settle(self._try)
        finally:
            for stage in self.stages.values():
                stage.drop()
                if self.feed.train:
                    stage.reduce_gradients(True)

    def fail(self, error: Exception, where: str) -> None:
        """Note a failure; from now on steps only keep messages in step."""
        if self.error is None:
            self.error, self.failed_at = error, self._at
            if isinstance(error, PeerFailed):
                self.failure = str(error)
            else:
                self.failure = f"rank {self.rank} failed in {where}: {type(error).__name__}: {error}"

    def default(self, step: MetaStep) -> None:
        """What the runtime does for a step by itself."""
        if step.parts is not None:
            self._both(step, *step.parts)
        else:
            _HANDLERS[step.type](self, step)

    def execute(self, step: MetaStep) -> None:
        """Do a step, by its registered function if it has one."""
        function = self.custom.get(step.type)
        if function is None:
            self.default(step)
        else:
            function(step, self)

    def _walk(self, step: MetaStep) -> None:
        if self.recorder is not None:
            self.recorder.begin(step)
        try:
            if self.error is None:
                if self.custom or step.parts is not None:
                    self.execute(step)
                else:
                    _HANDLERS[step.type](self, step)
            elif step.type in COMMUNICATION:
                self.default(step)
        except CommTimeoutError:
            raise
        except (
            ProcessGroupError
        ) as error:  # with that peer there is nothing to keep in step any more, with others there is
            self.lost_peer = True
            self.fail(error, f"step {step}")
        except Exception as error:  # whatever a user's module raises
            self.fail(error, f"step {step}")
        finally:
            if self.recorder is not None:
                self.recorder.end(step)

    # -- computing ----------------------------------------------------------------------------------------------------

    def _forward(self, step: MetaStep) -> None:
        stage, batch = self._stage(step), _batch(step)
        received = self.mail.take_inputs(step.stage, batch)
        self._begins()
        args: Sequence[Any] = self.feed.args[batch] if stage.is_first else ()
        kwargs = {name: value for name, value in self.feed.kwargs[batch].items() if stage.accepts(name)}
        for source, parcel in received.items():
            tree = get_tools().unflatten(parcel.leaves, parcel.form.structure)
            if source == stage.stage_index - 1:
                args = tree if isinstance(tree, tuple | list) else (tree,)
            else:
                kwargs[self.skips[source, stage.stage_index]] = tree
        staying = None
        if (step.stage, batch) in self._swapped:
            own = [tensor for source, parcel in received.items() if source in self.stages for tensor in parcel.tensors]
            staying = [*own, *self.feed.tensors(batch)]
        output = stage.forward(batch, received, args, kwargs, self.feed.train, staying)
        if stage.is_last:
            self._finish_forward(stage, batch, output)
            return
        parcel = stage.pack_output(output, self.feed.train)
        self.mail.put_outputs(step.stage, batch, parcel)
        if self.feed.train:
            stage.close_forward(batch, parcel.differentiable)
        for target in self._targets(step.stage):
            if target in self.stages:
                self.mail.hand_over(step.stage, target, batch, parcel)

    def _finish_forward(self, stage: PipelineStage, batch: int, output: Any) -> None:
        tools, feed = get_tools(), self.feed
        loss = output
        if feed.loss_fn is not None:
            arguments = (output,) if feed.targets is None else (output, feed.targets[batch])
            loss = stage.call_loss(batch, feed.loss_fn, arguments, feed.train)
        elif not feed.train:
            self.outputs[batch] = output
            return
        if not tools.is_scalar(loss):
            raise PlanError(
                f"the {'loss' if feed.loss_fn is not None else 'output of the last stage'} is no tensor of one element, so "
                f"there is nothing to differentiate. Pass loss_fn, and let it give a mean or a sum."
            )
        self.losses[batch] = tools.detached(loss)
        if feed.train:
            stage.close_forward(batch, [tools.scaled(loss, feed.weight(batch, self._rows()))])

    def _rows(self) -> int | None:
        """Rows of the whole batch: as the first stage's rank counted them, and this one must."""
        own, told = self.feed.rows, self._rows_told()
        if told is not None and own is not None and told != own:
            raise PlanError(
                f"rank {self.rank} was given {own} rows and the rank of the first stage {told}; pass the same batch on both, "
                f"inputs there and targets here."
            )
        return own if told is None else told

    def _rows_told(self) -> int | None:
        return self.feed.rows if 0 in self.stages else self.mail.rows

    def _backward(self, step: MetaStep) -> None:
        stage, batch = self._stage(step), _batch(step)
        self._count(stage)
        gradients = self._gradients(stage, batch)
        self._hand_back(step, stage.backward(batch, gradients))

    def _backward_inputs(self, step: MetaStep) -> None:
        stage, batch = self._stage(step), _batch(step)
        if stage.sharded:
            self._count(stage)
        self._hand_back(step, stage.backward_inputs(batch, self._gradients(stage, batch)))

    def _backward_weights(self, step: MetaStep) -> None:
        stage = self._stage(step)
        if not stage.sharded:
            self._count(stage)
        stage.backward_weights(_batch(step))

    def _both(self, step: MetaStep, backward: MetaStep, forward: MetaStep) -> None:
        if self.overlap is None or not (self.stages[backward.stage].exchanges or self.stages[forward.stage].exchanges):
            self.execute(backward)
            self.execute(forward)
            return
        self.overlap.run(
            partial(self.execute, backward),
            partial(self.execute, forward),
            names=(str(backward), str(forward)),
            where=f"rank {self.rank}, step {step}",
        )

    def _count(self, stage: PipelineStage) -> None:
        """A backward that gives gradients of weights: only the stage's last one reduces them."""
        self._left[stage.stage_index] -= 1
        stage.reduce_gradients(self._left[stage.stage_index] == 0)

    def _gradients(self, stage: PipelineStage, batch: int) -> list[Tensor | None]:
        gradients: list[Tensor | None] = [None] if stage.is_last else self.mail.take_gradients(stage.stage_index, batch)
        self._begins()
        return gradients

    def _begins(self) -> None:
        """The messages of the step, or of the first part of a pair, are there: what it waited for them is no part of it."""
        if self.recorder is not None and self._begun != self._at:
            self._begun = self._at
            self.recorder.begin(self.steps[self._at])

    def _hand_back(self, step: MetaStep, gradients: Mapping[int, list[Tensor | None]]) -> None:
        for source, found in gradients.items():
            self.mail.put_gradients(step.stage, _batch(step), source, found)

    def _targets(self, stage: int) -> list[int]:
        return [stage + 1, *(target for source, target in self.skips if source == stage)]

    # -- messages -----------------------------------------------------------------------------------------------------

    def _send_forward(self, step: MetaStep) -> None:
        self.mail.send_outputs(self._at, step, self._failed(), self._rows_told(), self.feed.train)

    def _receive_forward(self, step: MetaStep) -> None:
        self.mail.receive_outputs(self._at, step)

    def _send_backward(self, step: MetaStep) -> None:
        self.mail.send_gradients(self._at, step, self._failed())

    def _receive_backward(self, step: MetaStep) -> None:
        self.mail.receive_gradients(self._at, step)

    def _failed(self) -> str | None:
        return None if self.error is None else self.failure

    def _try(self, wait: Callable[[], object]) -> None:
        """Wait for what is on its way, unless it is for a peer that has ended."""
        try:
            wait()
        except ProcessGroupError as error:
            self.lost_peer = True
            self.fail(error, "the end of the run")

    # -- sharded stages -----------------------------------------------------------------------------------------------

    def _stage(self, step: MetaStep) -> PipelineStage:
        handle = self._gathering.pop(step.stage, None)
        if handle is not None:
            handle.wait()
        return self.stages[step.stage]

    def _unshard(self, step: MetaStep) -> None:
        self._gathering[step.stage] = self._sharded(step).unshard(async_op=True)

    def _reshard(self, step: MetaStep) -> None:
        self._gathering.pop(step.stage, None)
        self._sharded(step).reshard()

    def _reduce(self, step: MetaStep) -> None:
        """The stage's last backward has begun it (see `_count`)."""
        self._sharded(step)

    def _sharded(self, step: MetaStep) -> ShardedModule:
        module = self.stages[step.stage].submodule
        if not isinstance(module, ShardedModule):
            raise PlanError(
                f"step {step}: the module of stage {step.stage} isn't sharded ({type(module).__name__}); apply fully_shard to it, "
                f"or leave the step away."
            )
        return module

    # -- swaps --------------------------------------------------------------------------------------------------------

    def _swap_out(self, step: MetaStep) -> None:
        self.stages[step.stage].swap_out(_batch(step))

    def _swap_in(self, step: MetaStep) -> None:
        self.stages[step.stage].swap_in(_batch(step))


CustomFunction = Callable[[MetaStep, Walk], object]
"""What stands in for the runtime at one type of step."""

_HANDLERS: dict[MetaStepType, Callable[[Walk, MetaStep], None]] = {
    _T.F: Walk._forward,
    _T.B: Walk._backward,
    _T.I: Walk._backward_inputs,
    _T.W: Walk._backward_weights,
    _T.SEND_F: Walk._send_forward,
    _T.RECV_F: Walk._receive_forward,
    _T.SEND_B: Walk._send_backward,
    _T.RECV_B: Walk._receive_backward,
    _T.UNSHARD: Walk._unshard,
    _T.RESHARD: Walk._reshard,
    _T.REDUCE_GRAD: Walk._reduce,
    _T.SWAP_OUT: Walk._swap_out,
    _T.SWAP_IN: Walk._swap_in,
}


def _batch(step: MetaStep) -> int:
    assert step.micro_batch is not None
    return step.micro_batch
