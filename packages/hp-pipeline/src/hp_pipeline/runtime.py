"""The one runtime: it walks a rank's steps in order. What was printed, simulated and validated is what runs here.

After a failure it walks on without computing, so that each message still meets its counterpart: all ranks learn of it at once,
none is left waiting, and the next run starts clean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from hp_core.errors import CommTimeoutError, PlanError, ProcessGroupError
from hp_core.platform.protocol import Tensor
from hp_core.protocols import ShardedModule
from hp_pipeline.messages import Parcel
from hp_pipeline.platform import get_tools
from hp_pipeline.schedule import Schedule
from hp_pipeline.stage import PipelineStage
from hp_pipeline.steps import MetaStep, MetaStepType
from hp_pipeline.transport import Channel, PeerFailed, Post, Receipt

if TYPE_CHECKING:
    from hp_pipeline.ties import Tie

__all__ = ["CustomFunction", "Feed", "StepRecorder", "Walk", "forward_steps", "releases"]

_T = MetaStepType
_SENDS = frozenset({_T.SEND_F, _T.SEND_B})
_RECEIVES = frozenset({_T.RECV_F, _T.RECV_B})
_MESSAGES = _SENDS | _RECEIVES


class StepRecorder(Protocol):
    """What is told when steps begin and end; `hp_pipeline.timeline.Recorder` is one."""

    def begin(self, step: MetaStep) -> None:
        """A step begins."""

    def end(self, step: MetaStep) -> None:
        """It has ended."""


@dataclass
class Feed:
    """What a rank was called with, cut into micro-batches.

    Attributes:
        args: positional inputs of the first stage.
        kwargs: keyword inputs.
        targets: what the loss is made with; None for a loss of the output alone.
        loss_fn: makes the loss; None where the output is the loss.
        rows: rows of the whole batch; None if none was cut.
        weight: from micro-batch and rows of the whole batch, what its loss is multiplied by.
        train: whether there are backwards.
    """

    args: Sequence[Sequence[Any]] = ()
    kwargs: Sequence[Mapping[str, Any]] = ()
    targets: Sequence[Any] | None = None
    loss_fn: Callable[..., Any] | None = None
    rows: int | None = None
    weight: Callable[[int, int | None], float] = lambda micro_batch, rows: 1.0
    train: bool = True


@dataclass
class Walk:
    """One run of a rank. Functions registered for a type of step get it as their context.

    Attributes:
        schedule: what all ranks do.
        position: of this rank along the pipeline axis.
        steps: its steps.
        stages: its stages, by index.
        owners: for each stage its global rank.
        rank: this rank's global number.
        skips: by (from, to) the name of the argument of skip connections.
        outward: ways to later stages on other ranks, by (from, to).
        inward: ways from earlier stages on other ranks, by (from, to).
        post: sends and receives.
        feed: inputs.
        custom: functions that stand in for the runtime's own, by type of step.
        recorder: told of each step.
        release: for each receive, at which position, the positions of sends that are then known to have arrived.
        ties: shared parameters.
        losses: of the last stage, by micro-batch.
        outputs: of the last stage, by micro-batch, where no loss was made of them.
        error: what has failed, first.
        failure: the same in words, for other ranks.
        lost_peer: whether a peer has ended.
    """

    schedule: Schedule
    position: int
    steps: Sequence[MetaStep]
    stages: Mapping[int, PipelineStage]
    owners: Sequence[int]
    rank: int
    skips: Mapping[tuple[int, int], str]
    outward: Mapping[tuple[int, int], Channel]
    inward: Mapping[tuple[int, int], Channel]
    post: Post
    feed: Feed
    custom: Mapping[MetaStepType, CustomFunction]
    recorder: StepRecorder | None = None
    release: Mapping[int, Sequence[int]] = field(default_factory=dict)
    ties: Sequence[Tie] = ()
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    error: Exception | None = None
    failure: str = ""
    lost_peer: bool = False
    _at: int = 0
    _inbox: dict[tuple[int, int], dict[int, Parcel | Receipt]] = field(default_factory=dict)
    _outbox: dict[tuple[int, int], Parcel] = field(default_factory=dict)
    _coming: dict[tuple[int, int], list[Receipt | list[Tensor | None]]] = field(default_factory=dict)
    _going: dict[tuple[int, int, int], list[Tensor | None]] = field(default_factory=dict)
    _sent: dict[int, list[tuple[Any, Tensor, str]]] = field(default_factory=dict)
    _gathering: dict[int, Any] = field(default_factory=dict)
    _left: dict[int, int] = field(default_factory=dict)

    def go(self) -> None:
        """Walk all steps. `error` says afterwards whether something failed.

        Raises:
            CommTimeoutError: a peer didn't answer in time.
        """
        for channel in (*self.outward.values(), *self.inward.values()):
            channel.begin()
        self._left = dict.fromkeys(self.stages, self.schedule.micro_batches)
        try:
            for at, step in enumerate(self.steps):
                self._at = at
                self._walk(step)
            self._settle()
        finally:
            for stage in self.stages.values():
                stage.drop()
                if self.feed.train:
                    stage.reduce_gradients(True)

    def fail(self, error: Exception, where: str) -> None:
        """Note a failure; from now on steps only keep messages in step."""
        if self.error is None:
            self.error = error
            if isinstance(error, PeerFailed):
                self.failure = str(error)
            else:
                self.failure = f"rank {self.rank} failed in {where}: {type(error).__name__}: {error}"

    def default(self, step: MetaStep) -> None:
        """What the runtime does for a step by itself."""
        if step.parts is not None:
            for part in step.parts:
                self.execute(part)
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
                self.execute(step)
            elif step.type in _MESSAGES:
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
        received = {
            source: self._arrived(one) for source, one in sorted(self._inbox.pop((step.stage, batch), {}).items())
        }
        args: Sequence[Any] = self.feed.args[batch] if stage.is_first else ()
        kwargs = {name: value for name, value in self.feed.kwargs[batch].items() if stage.accepts(name)}
        for source, parcel in received.items():
            tree = get_tools().unflatten(parcel.leaves, parcel.form.structure)
            if source == stage.stage_index - 1:
                args = tree if isinstance(tree, tuple | list) else (tree,)
            else:
                kwargs[self.skips[source, stage.stage_index]] = tree
        output = stage.forward(batch, received, args, kwargs, self.feed.train)
        if stage.is_last:
            self._finish_forward(stage, batch, output)
            return
        parcel = stage.pack_output(output, self.feed.train)
        self._outbox[step.stage, batch] = parcel
        if self.feed.train:
            stage.close_forward(batch, parcel.differentiable)
        for target in self._targets(step.stage):
            if target in self.stages:
                self._inbox.setdefault((target, batch), {})[step.stage] = _handed_over(parcel)

    def _finish_forward(self, stage: PipelineStage, batch: int, output: Any) -> None:
        tools, feed = get_tools(), self.feed
        loss = output
        if feed.loss_fn is not None:
            arguments = (output,) if feed.targets is None else (output, feed.targets[batch])
            loss = tools.call_loss(feed.loss_fn, arguments, feed.train)
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
        own, told = self.feed.rows, self._told()
        if told is not None and own is not None and told != own:
            raise PlanError(
                f"rank {self.rank} was given {own} rows and the rank of the first stage {told}; pass the same batch on both, "
                f"inputs there and targets here."
            )
        return own if told is None else told

    def _told(self) -> int | None:
        if 0 in self.stages:
            return self.feed.rows
        return next((way.rows for way in self.inward.values() if way.rows), None)

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

    def _count(self, stage: PipelineStage) -> None:
        """A backward that gives gradients of weights: only the stage's last one reduces them."""
        self._left[stage.stage_index] -= 1
        stage.reduce_gradients(self._left[stage.stage_index] == 0)

    def _gradients(self, stage: PipelineStage, batch: int) -> list[Tensor | None]:
        """Gradients of the outputs, from all stages that took them."""
        if stage.is_last:
            return [None]
        parcel = self._outbox.pop((stage.stage_index, batch))
        total: list[Tensor | None] = [None] * len(parcel.form.gradients)
        for one in self._coming.pop((stage.stage_index, batch), ()):
            if isinstance(one, Receipt):
                found = one.gradients()
                self._let_go(one)
            else:
                found = one
            for number, gradient in enumerate(found):
                if gradient is not None:
                    known = total[number]
                    total[number] = gradient if known is None else get_tools().added(known, gradient)
        return total

    def _hand_back(self, step: MetaStep, gradients: Mapping[int, list[Tensor | None]]) -> None:
        batch = _batch(step)
        for source, found in gradients.items():
            if source in self.stages:
                self._coming.setdefault((source, batch), []).append(found)
            else:
                self._going[step.stage, batch, source] = found

    # -- messages -----------------------------------------------------------------------------------------------------

    def _send_forward(self, step: MetaStep) -> None:
        target, batch = step.peer_stage, _batch(step)
        parcel = self._outbox.get((step.stage, batch)) if self.error is None else None
        if not self.feed.train and self._is_last_send(step):
            self._outbox.pop((step.stage, batch), None)
        self._sent[self._at] = self.post.send_outputs(
            self.outward[step.stage, target],
            batch,
            parcel,
            self._told() or 0,
            self.failure,
            self._words(step),
        )

    def _receive_forward(self, step: MetaStep) -> None:
        source, batch = step.peer_stage, _batch(step)
        receipt = self.post.receive_outputs(self.inward[source, step.stage], batch, self._words(step))
        receipt.position = self._at
        self._inbox.setdefault((step.stage, batch), {})[source] = receipt

    def _send_backward(self, step: MetaStep) -> None:
        source, batch = step.peer_stage, _batch(step)
        waiting = self._inbox.get((step.stage, batch), {}).get(source)
        if isinstance(
            waiting, Receipt
        ):  # the forward failed before it was needed; what is sent back depends on what came
            waiting.settle()
        gradients = self._going.pop((step.stage, batch, source), None) if self.error is None else None
        self._sent[self._at] = self.post.send_gradients(
            self.inward[source, step.stage], batch, gradients, self.failure, self._words(step)
        )

    def _receive_backward(self, step: MetaStep) -> None:
        target, batch = step.peer_stage, _batch(step)
        receipt = self.post.receive_gradients(self.outward[step.stage, target], batch, self._words(step))
        receipt.position = self._at
        self._coming.setdefault((step.stage, batch), []).append(receipt)

    def _arrived(self, one: Parcel | Receipt) -> Parcel:
        if isinstance(one, Parcel):
            return one
        parcel = one.outputs()
        self._let_go(one)
        return parcel

    def _let_go(self, receipt: Receipt) -> None:
        """Tensors that were sent before the peer sent this message, and that it had to receive first, have arrived."""
        for position in self.release.get(receipt.position, ()):
            self.post.wait(self._sent.pop(position, ()))

    def _settle(self) -> None:
        """Nothing is left on its way."""
        receipts = [one for waiting in self._inbox.values() for one in waiting.values() if isinstance(one, Receipt)]
        receipts += [one for coming in self._coming.values() for one in coming if isinstance(one, Receipt)]
        for receipt in sorted(receipts, key=lambda one: one.position):
            self._try(receipt.drain)
        for position in sorted(self._sent):
            self._try(partial(self.post.wait, self._sent[position]))
        self._sent.clear()

    def _try(self, wait: Callable[[], object]) -> None:
        """Wait for what is on its way, unless it is for a peer that has ended."""
        try:
            wait()
        except ProcessGroupError as error:
            self.lost_peer = True
            self.fail(error, "the end of the run")

    def _targets(self, stage: int) -> list[int]:
        return [stage + 1, *(target for source, target in self.skips if source == stage)]

    def _is_last_send(self, step: MetaStep) -> bool:
        later = self.steps[self._at + 1 :]
        return not any(
            one.type is _T.SEND_F and one.stage == step.stage and one.micro_batch == step.micro_batch for one in later
        )

    def _words(self, step: MetaStep) -> str:
        """For errors: who waits in which step for which step of whom."""
        kind = {_T.SEND_F: _T.RECV_F, _T.RECV_F: _T.SEND_F, _T.SEND_B: _T.RECV_B, _T.RECV_B: _T.SEND_B}[step.type]
        other = step.peer_stage
        back = MetaStep(kind, other, step.micro_batch, step.stage if step.peer is not None else None)
        return f"rank {self.rank} waited in step {step} for step {back} of stage {other} on rank {self.owners[other]}"

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

    def _swap(self, step: MetaStep) -> None:
        raise PlanError(f"step {step}: nothing is registered that moves activations; see register_custom_function.")


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
    _T.SWAP_OUT: Walk._swap,
    _T.SWAP_IN: Walk._swap,
}


def _batch(step: MetaStep) -> int:
    assert step.micro_batch is not None
    return step.micro_batch


def _handed_over(parcel: Parcel) -> Parcel:
    """The same tensors as leaves of another graph, for a stage on the same rank."""
    tools = get_tools()
    tensors, leaves = [], []
    for leaf, slot in zip(parcel.leaves, parcel.form.slots, strict=True):
        if slot.kind == "tensor":
            leaf = tools.leaf(leaf, slot.requires_grad)
            tensors.append(leaf)
        leaves.append(leaf)
    return Parcel(parcel.form, tuple(leaves), tuple(tensors))


def forward_steps(steps: Sequence[MetaStep]) -> tuple[MetaStep, ...]:
    """The steps of a run without backwards."""
    kept = (_T.F, _T.SEND_F, _T.RECV_F, _T.UNSHARD, _T.RESHARD)
    found = (step.parts[1] if step.parts is not None else step for step in steps)
    return tuple(step for step in found if step.type in kept)


def releases(steps: Sequence[Sequence[MetaStep]], placement: Sequence[int], rank: int) -> dict[int, list[int]]:
    """For each receive of a rank, which of its sends have arrived when that message has.

    A peer takes its steps in order: what it sends after it has received something tells of that. So buffers are freed without
    asking the transport.

    Args:
        steps: of all ranks.
        placement: for each stage its rank.
        rank: whose sends.

    Returns:
        Positions of sends by position of the receive.
    """
    found: dict[int, list[int]] = {}

    def between(source: int, target: int, kinds: frozenset[MetaStepType]) -> list[int]:
        return [
            at for at, step in enumerate(steps[source]) if step.type in kinds and placement[step.peer_stage] == target
        ]

    for peer in range(len(steps)):
        sends, arrivals = between(rank, peer, _SENDS), between(peer, rank, _RECEIVES)
        answers, receives = between(peer, rank, _SENDS), between(rank, peer, _RECEIVES)
        number = 0
        for sent, arrival in zip(sends, arrivals, strict=False):
            while number < len(answers) and answers[number] < arrival:
                number += 1
            if number < min(len(answers), len(receives)):
                found.setdefault(receives[number], []).append(sent)
    return found
