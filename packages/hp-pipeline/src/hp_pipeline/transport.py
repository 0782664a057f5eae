"""Messages between stages on different ranks: a small header, then the tensors, each posted without blocking.

Both ends know what the other will post, whatever happens: a rank that has failed goes on sending headers that say so (with
tensors nobody looks at), so that no message is left without its counterpart and the next run starts clean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hp_core.errors import CommTimeoutError, HyperParallelError, PlanError, ProcessGroupError
from hp_core.platform import get_platform
from hp_core.platform.protocol import Group, Tensor
from hp_pipeline.messages import Form, Parcel, unpack
from hp_pipeline.platform import get_tools

__all__ = ["Channel", "FormChanged", "PeerFailed", "Post", "Receipt"]

_WORDS = 64
_FIXED = 6
_OK, _DESCRIBED, _FAILED, _CHANGED = range(4)


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
    """

    source: int
    target: int
    peer: int
    dynamic: bool
    forms: dict[bool, Form] = field(default_factory=dict)
    rows: int | None = None
    passed: dict[int, Form | None] = field(default_factory=dict)

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

    def send(self, tensors: Sequence[Tensor], peer: int, what: str) -> list[tuple[Any, Tensor, str]]:
        """Post tensors to a rank; each stays with its handle until that has been waited for."""
        collectives = get_platform().collectives
        with _Named(what):
            return [(collectives.send(tensor, peer, self.group, async_op=True), tensor, what) for tensor in tensors]

    def receive(
        self, shapes: Sequence[tuple[tuple[int, ...], str]], peer: int, what: str
    ) -> list[tuple[Any, Tensor, str]]:
        """Post buffers for tensors from a rank."""
        collectives, tools = get_platform().collectives, get_tools()
        buffers = [tools.empty(shape, dtype, self.device) for shape, dtype in shapes]
        with _Named(what):
            return [(collectives.recv(buffer, peer, self.group, async_op=True), buffer, what) for buffer in buffers]

    def wait(self, posted: Sequence[tuple[Any, Tensor, str]]) -> list[Tensor]:
        """Wait for what was posted, and give the tensors.

        Raises:
            CommTimeoutError: the peer didn't answer in time.
            ProcessGroupError: it has ended.
        """
        for work, _, what in posted:
            with _Named(what):
                if self.timeout is None:
                    work.wait()
                else:
                    work.wait(self.timeout)
        return [tensor for _, tensor, _ in posted]

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
        return get_tools().numbers(numbers + [0] * (_WORDS - len(numbers)), "int64", self.device)

    def read(self, header: Tensor) -> tuple[int, int, int, int, int, str]:
        """Flag, signature, mask, rows, size of a description, text."""
        numbers = get_tools().values(header)
        flag, signature, mask, rows, size, length = numbers[:_FIXED]
        text = b""
        if length:
            text = b"".join(word.to_bytes(8, "little", signed=True) for word in numbers[_FIXED:])[:length]
        return flag, signature, mask, rows, size, text.decode("utf-8", "ignore")

    def send_outputs(
        self, channel: Channel, micro_batch: int, parcel: Parcel | None, rows: int, failure: str, what: str
    ) -> list[tuple[Any, Tensor, str]]:
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
        tools = get_tools()
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
            posted = self.send(
                [self.header(flag, rows=channel.rows, text=changed or failure), *fillers], channel.peer, what
            )
            if changed:
                raise FormChanged(changed)
            return posted
        channel.passed[micro_batch] = channel.forms[size_class] = form = parcel.form
        tensors = parcel.travelling(self.device)
        if known == form:
            channel.passed[micro_batch] = channel.forms[size_class] = known  # which has been signed
            return self.send([self.header(_OK, known.signature, rows=channel.rows), *tensors], channel.peer, what)
        described = tools.numbers(list(form.description), "uint8", self.device)
        header = self.header(_DESCRIBED, form.signature, rows=channel.rows, size=len(form.description))
        return self.send([header, described, *tensors], channel.peer, what)

    def receive_outputs(self, channel: Channel, micro_batch: int, what: str) -> Receipt:
        """Post the receipt of a stage's inputs. Where their form isn't known yet this waits for it."""
        form = channel.expected(micro_batch, self.micro_batches)
        header = self.receive([((_WORDS,), "int64")], channel.peer, what)
        receipt = Receipt(self, channel, micro_batch, header, what, form)
        if form is not None:
            receipt.body = self.receive(form.buffers, channel.peer, what)
        else:
            receipt.settle()
        return receipt

    def send_gradients(
        self, channel: Channel, micro_batch: int, gradients: Sequence[Tensor | None] | None, failure: str, what: str
    ) -> list[tuple[Any, Tensor, str]]:
        """Send the gradients of a stage's inputs back, or that there are none."""
        tools = get_tools()
        form = channel.passed.get(micro_batch)
        shapes = form.gradients if form is not None else ()
        if gradients is None:
            fillers = [tools.zeros(shape, dtype, self.device) for shape, dtype in shapes]
            return self.send([self.header(_FAILED, text=failure), *fillers], channel.peer, what)
        mask, tensors = 0, []
        for number, (gradient, (shape, dtype)) in enumerate(zip(gradients, shapes, strict=True)):
            if gradient is None:
                tensors.append(tools.zeros(shape, dtype, self.device))
                mask |= 1 << min(number, 61)
            else:
                tensors.append(tools.sendable(gradient))
        return self.send([self.header(_OK, mask=mask), *tensors], channel.peer, what)

    def receive_gradients(self, channel: Channel, micro_batch: int, what: str) -> Receipt:
        """Post the receipt of gradients of a stage's outputs."""
        form = channel.passed.get(micro_batch)
        shapes = form.gradients if form is not None else ()
        receipt = Receipt(self, channel, micro_batch, (), what, form, _settled=True)
        receipt.header = self.receive([((_WORDS,), "int64")], channel.peer, what)
        receipt.body = self.receive(shapes, channel.peer, what)
        return receipt


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
    header: Sequence[tuple[Any, Tensor, str]]
    what: str
    form: Form | None
    body: Sequence[tuple[Any, Tensor, str]] = ()
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
                f"{self.what}: the message isn't the one that was expected; messages have been lost or taken by others. Give the "
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


class _Named:
    """Errors of communication inside say which step waited for which."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, CommTimeoutError):
            raise CommTimeoutError(f"{self._what} until the timeout. {error}") from error
        if isinstance(error, ProcessGroupError):
            raise ProcessGroupError(f"{self._what}, which has ended. {error}") from error
        if isinstance(error, RuntimeError) and "onnection" in str(error):
            raise ProcessGroupError(f"{self._what}, which has ended. ({str(error).splitlines()[0]})") from error
