"""`Mailbox`: what has come for a rank's stages and isn't used yet, and what they made and isn't sent yet.

It does the sends and receives of a walk, and keeps each buffer exactly as long as somebody needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from hp_core.platform.protocol import Tensor
from hp_pipeline.itinerary import Itinerary
from hp_pipeline.messages import Parcel
from hp_pipeline.platform import get_tools
from hp_pipeline.steps import MetaStep, MetaStepType
from hp_pipeline.transport import Channel, Post, Posted, Receipt

__all__ = ["Mailbox"]

_T = MetaStepType
_OTHER_END = {_T.SEND_F: _T.RECV_F, _T.RECV_F: _T.SEND_F, _T.SEND_B: _T.RECV_B, _T.RECV_B: _T.SEND_B}


@dataclass
class Mailbox:
    """The messages of one run of a rank.

    Attributes:
        rank: its global number.
        owners: for each stage its global rank.
        itinerary: what it walks.
        outward: ways to later stages on other ranks, by (from, to).
        inward: ways from earlier stages on other ranks, by (from, to).
        post: sends and receives.
    """

    rank: int
    owners: list[int]
    itinerary: Itinerary
    outward: Mapping[tuple[int, int], Channel]
    inward: Mapping[tuple[int, int], Channel]
    post: Post
    _inputs: dict[tuple[int, int], dict[int, Parcel | Receipt]] = field(default_factory=dict)
    _outputs: dict[tuple[int, int], Parcel] = field(default_factory=dict)
    _gradients: dict[tuple[int, int], list[Receipt | list[Tensor | None]]] = field(default_factory=dict)
    _input_gradients: dict[tuple[int, int, int], list[Tensor | None]] = field(default_factory=dict)
    _sent: dict[int, Posted] = field(default_factory=dict)

    def begin(self) -> None:
        """Begin a run."""
        for channel in (*self.outward.values(), *self.inward.values()):
            channel.begin()

    @property
    def rows(self) -> int | None:
        """Rows of the whole batch, as messages say; None before the first one, or if none has any."""
        return next((way.rows for way in self.inward.values() if way.rows), None)

    # -- between a rank's own stages, and for the messages below --------------------------------------------------------

    def put_outputs(self, stage: int, micro_batch: int, parcel: Parcel) -> None:
        """Keep what a stage made until it has been sent, and in a run with backwards until `take_gradients`."""
        self._outputs[stage, micro_batch] = parcel

    def hand_over(self, source: int, target: int, micro_batch: int, parcel: Parcel) -> None:
        """Give outputs to a stage on the same rank: the same tensors as leaves of another graph."""
        self._inputs.setdefault((target, micro_batch), {})[source] = _handed_over(parcel)

    def take_inputs(self, stage: int, micro_batch: int) -> dict[int, Parcel]:
        """What came for a stage, by the stage that it came from, ascending."""
        waiting = self._inputs.pop((stage, micro_batch), {})
        return {source: self._arrived(one) for source, one in sorted(waiting.items())}

    def take_gradients(self, stage: int, micro_batch: int) -> list[Tensor | None]:
        """Gradients of a stage's outputs: the sum of what came from all stages that took them."""
        parcel = self._outputs.pop((stage, micro_batch))
        total: list[Tensor | None] = [None] * len(parcel.form.gradients)
        for one in self._gradients.pop((stage, micro_batch), ()):
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

    def put_gradients(self, stage: int, micro_batch: int, source: int, gradients: list[Tensor | None]) -> None:
        """Keep the gradients of a stage's inputs until they are sent, or until a stage on the same rank takes them."""
        if self.owners[source] == self.rank:
            self._gradients.setdefault((source, micro_batch), []).append(gradients)
        else:
            self._input_gradients[stage, micro_batch, source] = gradients

    # -- messages -----------------------------------------------------------------------------------------------------

    def send_outputs(self, at: int, step: MetaStep, failure: str | None, rows: int | None, train: bool) -> None:
        """Do a SEND_F.

        Args:
            at: its position.
            step: it.
            failure: what has failed on this rank, so that there is nothing to send; None if all is well.
            rows: rows of the whole batch.
            train: whether the outputs are needed for a backward.
        """
        target, batch = step.peer_stage, _batch(step)
        parcel = self._outputs.get((step.stage, batch)) if failure is None else None
        if not train and at in self.itinerary.last_sends:
            self._outputs.pop((step.stage, batch), None)
        channel = self.outward[step.stage, target]
        self._sent[at] = self.post.send_outputs(
            channel, batch, parcel, rows or 0, failure or "", partial(self._words, step)
        )

    def receive_outputs(self, at: int, step: MetaStep) -> None:
        """Do a RECV_F: post the receipt of a stage's inputs."""
        source, batch = step.peer_stage, _batch(step)
        receipt = self.post.receive_outputs(self.inward[source, step.stage], batch, partial(self._words, step))
        receipt.position = at
        self._inputs.setdefault((step.stage, batch), {})[source] = receipt

    def send_gradients(self, at: int, step: MetaStep, failure: str | None) -> None:
        """Do a SEND_B; arguments as for `send_outputs`."""
        source, batch = step.peer_stage, _batch(step)
        waiting = self._inputs.get((step.stage, batch), {}).get(source)
        if isinstance(waiting, Receipt):
            waiting.settle()  # the forward failed before it was needed; what is sent back depends on what came
        gradients = self._input_gradients.pop((step.stage, batch, source), None) if failure is None else None
        channel = self.inward[source, step.stage]
        self._sent[at] = self.post.send_gradients(channel, batch, gradients, failure or "", partial(self._words, step))

    def receive_gradients(self, at: int, step: MetaStep) -> None:
        """Do a RECV_B: post the receipt of gradients of a stage's outputs."""
        target, batch = step.peer_stage, _batch(step)
        receipt = self.post.receive_gradients(self.outward[step.stage, target], batch, partial(self._words, step))
        receipt.position = at
        self._gradients.setdefault((step.stage, batch), []).append(receipt)

    def settle(self, attempt: Callable[[Callable[[], object]], None]) -> None:
        """Leave nothing on its way.

        Args:
            attempt: calls what it is given, and goes on if a peer has ended.
        """
        receipts = [one for waiting in self._inputs.values() for one in waiting.values() if isinstance(one, Receipt)]
        receipts += [one for coming in self._gradients.values() for one in coming if isinstance(one, Receipt)]
        for receipt in sorted(receipts, key=lambda one: one.position):
            attempt(receipt.drain)
        for position in sorted(self._sent):
            attempt(partial(self.post.wait, self._sent[position]))
        self._sent.clear()

    def _arrived(self, one: Parcel | Receipt) -> Parcel:
        if isinstance(one, Parcel):
            return one
        parcel = one.outputs()
        self._let_go(one)
        return parcel

    def _let_go(self, receipt: Receipt) -> None:
        """Tensors that were sent before the peer sent this message, and that it had to receive first, have arrived."""
        for position in self.itinerary.releases.get(receipt.position, ()):
            self.post.wait(self._sent.pop(position, ()))

    def _words(self, step: MetaStep) -> str:
        """For errors: who waits in which step for which step of whom."""
        other = step.peer_stage
        back = MetaStep(_OTHER_END[step.type], other, step.micro_batch, step.stage if step.peer is not None else None)
        return f"rank {self.rank} waited in step {step} for step {back} of stage {other} on rank {self.owners[other]}"


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
