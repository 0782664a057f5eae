"""Messages between stages on different ranks: a small header, then the tensors, each posted without blocking; small tensors
that both ends know the form of go in one piece with their header.

Both ends know what the other will post, whatever happens: a rank that has failed goes on sending headers that say so (with
tensors nobody looks at), so that no message is left without its counterpart and the next run starts clean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from hp_core.errors import CommTimeoutError, HyperParallelError, PlanError, ProcessGroupError
from hp_core.platform import get_platform
from hp_core.platform.protocol import Group, Tensor
from hp_pipeline.messages import Form, Parcel, unpack
from hp_pipeline.platform import get_tools

__all__ = ["Channel", "FormChanged", "PeerFailed", "Post", "Posted", "Receipt", "Words"]

_WORDS = 64
_FIXED = 6
_OK, _DESCRIBED, _FAILED, _CHANGED = range(4)
_HEADER: tuple[tuple[int, ...], str] = ((_WORDS,), "int64")

Words = Callable[[], str]
"""Says who waits for whom; only called for errors."""
Posted = list[tuple[Any, Tensor, Words]]
"""Handles of sends or receives, each with its tensor and what it is for."""


class _Arrived:
    """The handle of what has come in one piece with something else."""

    def wait(self, timeout: float | None = None) -> None:
        """Nothing to wait for."""


_ARRIVED = _Arrived()


class PeerFailed(HyperParallelError, RuntimeError):
    """Another rank of the pipeline failed; the message says which, in what step, and with what error."""


class FormChanged(PlanError):
    """What a stage gives to another has changed in shape or structure."""


@dataclass
class Channel:
    """One end of the way from one stage to another. Forms and what was counted are equal on both ends at each message.

    Attributes:
        source: the stage that sends outputs.
        target: the stage that takes them as inputs.
        peer: global rank at the other end.
        dynamic: whether shapes may change.
        forms: the form of messages that has been agreed on, for larger and for smaller micro-batches.
        rows: rows of the whole batch, as the first message of this run said; None before it.
        passed: for each micro-batch the form of what went through; None if the sender had failed.
        headers: those that have been sent over and over, by what they say; nobody writes to them.
    """

    source: int
    target: int
    peer: int
    dynamic: bool
    forms: dict[bool, Form] = field(default_factory=dict)
    rows: int | None = None
    passed: dict[int, Form | None] = field(default_factory=dict)
    headers: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)

    def begin(self) -> None:
        """Begin a run."""
        self.rows = None
        self.passed.clear()

    def size_class(self, micro_batch: int, micro_batches: int) -> bool:
        """Whether it is one of the larger micro-batches, where the batch doesn't divide."""
        return micro_batch < (self.rows or 0) % micro_batches

    def expected(self, micro_batch: int, micro_batches: int) -> Form | None:
        """The form that both ends count on before the message is sent; None if it will be told."""
        if self.rows is None or self.dynamic:
            return None
        return self.forms.get(self.size_class(micro_batch, micro_batches))


class Post:
    """Sends and receives of a run over one group of ranks, with a timeout."""

    def __init__(self, group: Group, device: Any, timeout: float | None, micro_batches: int) -> None:
        self.group, self.device, self.timeout, self.micro_batches = group, device, timeout, micro_batches
        self._collectives, self._tools = get_platform().collectives, get_tools()
        self._open: dict[int, Receipt] = {}

    def send(self, tensors: Sequence[Tensor], peer: int, what: Words, in_one: bool = False) -> Posted:
        """Post tensors to a rank; each stays with its handle until that has been waited for.

        Args:
            tensors: what to send.
            peer: to whom.
            what: the step, for errors.
            in_one: in one piece, as the other end expects (`fits`).
        """
        self.settle_open(peer)
        if in_one:
            tensors = (self._tools.joined(tensors),)
        send, group = self._collectives.send, self.group
        posted: Posted = []
        try:
            for tensor in tensors:
                posted.append((send(tensor, peer, group, async_op=True), tensor, what))
        except Exception as error:
            _raise_named(error, what)
        return posted

    def receive(
        self, shapes: Sequence[tuple[tuple[int, ...], str]], peer: int, what: Words, in_one: bool = False
    ) -> Posted:
        """Post buffers for tensors from a rank; if they come in one piece, they are there when the first is."""
        if in_one:
            size = sum(self._tools.nbytes(shape, dtype) for shape, dtype in shapes)
            [(work, whole, _)] = self.receive([((size,), "uint8")], peer, what)
            first, *others = self._tools.parted(whole, shapes)
            return [(work, first, what), *((_ARRIVED, other, what) for other in others)]
        recv, empty, group = self._collectives.recv, self._tools.empty, self.group
        posted: Posted = []
        try:
            for shape, dtype in shapes:
                buffer = empty(shape, dtype, self.device)
                posted.append((recv(buffer, peer, group, async_op=True), buffer, what))
        except Exception as error:
            _raise_named(error, what)
        return posted

    def wait(self, posted: Sequence[tuple[Any, Tensor, Words]]) -> list[Tensor]:
        """Wait for what was posted, and give the tensors.

        Raises:
            CommTimeoutError: the peer didn't answer in time.
            ProcessGroupError: it has ended.
        """
        tensors = []
        for work, tensor, what in posted:
            try:
                if self.timeout is None:
                    work.wait()
                else:
                    work.wait(self.timeout)
            except Exception as error:
                _raise_named(error, what)
            tensors.append(tensor)
        return tensors

    def usual_header(self, channel: Channel, signature: int, mask: int, rows: int) -> Tensor:
        """The header of a message of known form from a rank where all is well: made once for a channel."""
        key = signature, mask, rows
        found = channel.headers.get(key)
        if found is None:
            found = channel.headers[key] = self.header(_OK, signature, mask, rows)
        return found

    def header(
        self, flag: int, signature: int = 0, mask: int = 0, rows: int = 0, size: int = 0, text: str = ""
    ) -> Tensor:
        """A header; texts that don't fit are cut."""
        written = text.encode("utf-8")[: 8 * (_WORDS - _FIXED)]
        words = [
            int.from_bytes(written[at : at + 8].ljust(8, b"\0"), "little", signed=True)
            for at in range(0, len(written), 8)
        ]
        numbers = [flag, signature, mask, rows, size, len(written), *words]
        return self._tools.numbers(numbers + [0] * (_WORDS - len(numbers)), "int64", self.device)

    def read(self, header: Tensor) -> tuple[int, int, int, int, int, str]:
        """Flag, signature, mask, rows, size of a description, text."""
        numbers = self._tools.values(header)
        flag, signature, mask, rows, size, length = numbers[:_FIXED]
        text = b""
        if length:
            text = b"".join(word.to_bytes(8, "little", signed=True) for word in numbers[_FIXED:])[:length]
        return flag, signature, mask, rows, size, text.decode("utf-8", "ignore")

    def send_outputs(
        self, channel: Channel, micro_batch: int, parcel: Parcel | None, rows: int, failure: str, what: Words
    ) -> Posted:
        """Send the outputs of a stage, or that there are none.

        Args:
            channel: to whom.
            micro_batch: of which micro-batch.
            parcel: the outputs; None after a failure.
            rows: rows of the whole batch.
            failure: what has failed.
            what: the step, for errors.

        Raises:
            FormChanged: they differ from earlier ones. The message that says so has been sent.
        """
        tools = self._tools
        counted_on = channel.expected(micro_batch, self.micro_batches)
        if channel.rows is None:
            channel.rows = rows
        size_class = channel.size_class(micro_batch, self.micro_batches)
        known = channel.forms.get(size_class)
        channel.passed[micro_batch] = None
        changed = ""
        if parcel is not None and known is not None and known != parcel.form and not channel.dynamic:
            changed = (
                f"what stage {channel.source} gives to stage {channel.target} has changed at micro-batch {micro_batch}: "
                f"{known.difference(parcel.form)}. Build the stages with dynamic_shape=True, or keep shapes equal."
            )
        if parcel is None or changed:
            fillers = [
                tools.zeros(shape, dtype, self.device) for shape, dtype in (counted_on.buffers if counted_on else ())
            ]
            flag = _CHANGED if changed else _FAILED
            header = self.header(flag, rows=channel.rows, text=changed or failure)
            posted = self.send([header, *fillers], channel.peer, what, bool(counted_on and counted_on.outputs_fit))
            if changed:
                raise FormChanged(changed)
            return posted
        channel.passed[micro_batch] = channel.forms[size_class] = form = parcel.form
        tensors = parcel.travelling(self.device)
        if known == form:
            channel.passed[micro_batch] = channel.forms[size_class] = known  # which has been signed
            header = self.usual_header(channel, known.signature, 0, channel.rows)
            return self.send([header, *tensors], channel.peer, what, bool(counted_on and known.outputs_fit))
        described = tools.numbers(list(form.description), "uint8", self.device)
        header = self.header(_DESCRIBED, form.signature, rows=channel.rows, size=len(form.description))
        return self.send([header, described, *tensors], channel.peer, what)

    def receive_outputs(self, channel: Channel, micro_batch: int, what: Words) -> Receipt:
        """Post the receipt of a stage's inputs. Where their form isn't known yet, only that of the header."""
        self.settle_open(channel.peer)
        form = channel.expected(micro_batch, self.micro_batches)
        expected, in_one = ((), False) if form is None else (form.buffers, form.outputs_fit)
        posted = self.receive((_HEADER, *expected), channel.peer, what, in_one)
        receipt = Receipt(self, channel, micro_batch, posted[:1], what, form, posted[1:])
        if form is None:
            self._open[channel.peer] = receipt
        return receipt

    def settle_open(self, peer: int) -> None:
        """Post the rest of the message from this rank that only a header was posted for.

        What is posted between two ranks takes place in that order, on some transports in both directions; so this is as late as it
        can be: before anything else for the same rank. Waiting at the step of the receive itself would hold up the computation
        that the step was put before.
        """
        receipt = self._open.pop(peer, None)
        if receipt is not None:
            receipt.settle()

    def send_gradients(
        self, channel: Channel, micro_batch: int, gradients: Sequence[Tensor | None] | None, failure: str, what: Words
    ) -> Posted:
        """Send the gradients of a stage's inputs back, or that there are none."""
        tools = self._tools
        form = channel.passed.get(micro_batch)
        shapes, in_one = ((), False) if form is None else (form.gradients, form.gradients_fit)
        if gradients is None:
            fillers = [tools.zeros(shape, dtype, self.device) for shape, dtype in shapes]
            return self.send([self.header(_FAILED, text=failure), *fillers], channel.peer, what, in_one)
        mask, tensors = 0, []
        for number, (gradient, (shape, dtype)) in enumerate(zip(gradients, shapes, strict=True)):
            if gradient is None:
                tensors.append(tools.zeros(shape, dtype, self.device))
                mask |= 1 << min(number, 61)
            else:
                tensors.append(tools.sendable(gradient))
        return self.send([self.usual_header(channel, 0, mask, 0), *tensors], channel.peer, what, in_one)

    def receive_gradients(self, channel: Channel, micro_batch: int, what: Words) -> Receipt:
        """Post the receipt of gradients of a stage's outputs."""
        self.settle_open(channel.peer)
        form = channel.passed.get(micro_batch)
        shapes, in_one = ((), False) if form is None else (form.gradients, form.gradients_fit)
        posted = self.receive((_HEADER, *shapes), channel.peer, what, in_one)
        return Receipt(self, channel, micro_batch, posted[:1], what, form, posted[1:], _settled=True)


@dataclass
class Receipt:
    """A message on its way in.

    Attributes:
        post: by which it comes.
        channel: from whom.
        micro_batch: of which micro-batch.
        header: its header, posted.
        what: the step that waits for it, for errors.
        form: its form, if that is known.
        body: its tensors, posted.
        position: of that step in the rank's steps.
    """

    post: Post
    channel: Channel
    micro_batch: int
    header: Sequence[tuple[Any, Tensor, Words]]
    what: Words
    form: Form | None
    body: Sequence[tuple[Any, Tensor, Words]] = ()
    position: int = -1
    _error: HyperParallelError | None = None
    _settled: bool = False

    def settle(self) -> None:
        """Wait for the header, and post what it announces."""
        if self._settled:
            return
        self._settled = True
        channel, post = self.channel, self.post
        flag, signature, _, rows, size, text = post.read(post.wait(self.header)[0])
        self.header = ()
        first = channel.rows is None
        if first:
            channel.rows = rows
        size_class = channel.size_class(self.micro_batch, post.micro_batches)
        channel.passed[self.micro_batch] = None
        if flag == _FAILED:
            self._error = PeerFailed(text)
            return
        if flag == _CHANGED:
            self._error = FormChanged(text)
            return
        if flag == _DESCRIBED:
            described = post.wait(post.receive([((size,), "uint8")], channel.peer, self.what))[0]
            channel.forms[size_class] = Form.of_description(bytes(get_tools().values(described)))
        form = channel.forms[size_class]
        if form.signature != signature:
            raise ProcessGroupError(
                f"{self.what()}: the message isn't the one that was expected; messages have been lost or taken by others. Give the "
                f"pipeline a group of its own."
            )
        channel.passed[self.micro_batch] = form
        if self.form is None:
            self.form = form
            self.body = post.receive(form.buffers, channel.peer, self.what)

    def outputs(self) -> Parcel:
        """The inputs of the stage.

        Raises:
            PeerFailed: there are none.
            FormChanged: they differ from earlier ones.
        """
        self.settle()
        received = self.post.wait(self.body)
        if self._error is not None:
            raise self._error
        assert self.form is not None
        return unpack(self.form, received)

    def drain(self) -> None:
        """Take the message and forget it, so that it doesn't stand in the way of the next run."""
        if self._settled:
            self.post.wait(self.header)
        self.settle()
        self.post.wait(self.body)
        self.header = self.body = ()

    def gradients(self) -> list[Tensor | None]:
        """The gradients of the stage's outputs.

        Raises:
            PeerFailed: there are none.
        """
        flag, _, mask, _, _, text = self.post.read(self.post.wait(self.header)[0])
        received = self.post.wait(self.body)
        if flag == _FAILED:
            raise PeerFailed(text)
        return [None if number < 61 and mask >> number & 1 else one for number, one in enumerate(received)]


def _raise_named(error: Exception, what: Words) -> NoReturn:
    """The error of a send, receive or wait again, saying which step waited for which."""
    if isinstance(error, CommTimeoutError):
        raise CommTimeoutError(f"{what()} until the timeout. {error}") from error
    if isinstance(error, ProcessGroupError):
        raise ProcessGroupError(f"{what()}, which has ended. {error}") from error
    if isinstance(error, RuntimeError) and "onnection" in str(error):
        raise ProcessGroupError(f"{what()}, which has ended. ({str(error).splitlines()[0]})") from error
    raise error
