"""Streams and events of the CPU: a stream is one worker thread with a queue, an event is completed by the worker.

They have the shape of an accelerator's, so that overlap code is written once: a copy really runs beside the compute (a
tensor copy releases the GIL), and a forgotten wait really reads stale data instead of passing by luck.

What a stream and an event are to the layers above (`hp_core.platform.protocol.Stream` and `Event`):

- Work queued on a stream runs in order, beside everything else. Ops called directly run at once, in the calling thread:
  that thread is the *host stream*, the current stream unless a `with stream:` says otherwise.
- `stream.record_event()` marks a point in the stream's order, `stream.wait_event(event)` lets later work of another
  stream wait for it without blocking the caller; only on the host stream does a wait block the calling thread.
- An exception raised by queued work is raised again, with its own traceback, by every wait for an event behind it, and
  once by the stream, in the next `synchronize()` or `submit()`. Until then the stream skips its work, since that would
  use results that don't exist. One that nobody has seen when its stream ends goes to `threading.excepthook`.
"""

from __future__ import annotations

import atexit
import itertools
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from types import TracebackType

import torch

from hp_core.errors import PlatformError

__all__ = ["CpuEvent", "CpuStream", "HostStream", "LocalStream", "copy_async", "current_stream"]

EXIT_SECONDS = 5.0  # that the end of the interpreter waits for queued work

_numbers = itertools.count()
_lanes: weakref.WeakSet[_Lane] = weakref.WeakSet()


class _Failure:
    """An exception of queued work, and whether anyone has been told."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.seen = False

    def throw(self) -> None:
        self.seen = True
        raise self.error


class _Point:
    """A point in the order of a stream: passed or not, and behind which failure."""

    def __init__(self) -> None:
        self.passed = threading.Event()
        self.failure: _Failure | None = None

    def wait(self) -> None:
        self.passed.wait()
        if self.failure is not None:
            self.failure.throw()


class CpuEvent:
    """A point in the order of a stream. One that was never recorded counts as passed, as on an accelerator."""

    def __init__(self) -> None:
        self._point: _Point | None = None

    def record(self, stream: LocalStream | None = None) -> None:
        """Mark the point behind all work queued so far on `stream` (default: the current one).

        Recording again moves the event; who already waits keeps waiting for the old point.
        """
        point = self._point = _Point()
        (stream or current_stream())._mark(point)

    def wait(self, stream: LocalStream | None = None) -> None:
        """Make `stream` (default: the current one) wait for the event; on the host stream, block this thread."""
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        """Whether the stream has passed the point, be it by failing; never raises the failure."""
        return self._point is None or self._point.passed.is_set()

    def synchronize(self) -> None:
        """Block this thread until the stream has passed the point.

        Raises:
            BaseException: what the work before it raised.
        """
        if self._point is not None:
            self._point.wait()


class LocalStream(ABC):
    """What both kinds of streams of the CPU are: an order of work, which can be recorded, waited for and current."""

    @abstractmethod
    def submit(self, fn: Callable[[], object]) -> None:
        """Run `fn` behind the work queued so far."""

    @abstractmethod
    def wait_event(self, event: CpuEvent) -> None:
        """Let work queued from now on wait for `event`."""

    @abstractmethod
    def query(self) -> bool:
        """Whether all work queued so far is done."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block this thread until all work queued so far is done."""

    @abstractmethod
    def _mark(self, point: _Point) -> None:
        """Queue the passing of a point."""

    def wait_stream(self, stream: LocalStream) -> None:
        """Let work queued from now on wait for the work queued on `stream` so far."""
        self.wait_event(stream.record_event())

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """Mark the point behind all work queued so far, with a new event unless one is given."""
        event = event or CpuEvent()
        event.record(self)
        return event

    def __enter__(self) -> None:
        """Make this the current stream of the calling thread."""
        _entered.stack.append(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _entered.stack.pop()


class HostStream(LocalStream):
    """The calling thread, seen as a stream: work runs at once, and a wait blocks."""

    def submit(self, fn: Callable[[], object]) -> None:
        """Run `fn` now."""
        fn()

    def wait_event(self, event: CpuEvent) -> None:
        """Block until `event` has passed; raises what the work before it raised."""
        event.synchronize()

    def query(self) -> bool:
        """Whether all work is done: always."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def _mark(self, point: _Point) -> None:
        point.passed.set()


class CpuStream(LocalStream):
    """Work that runs in order on a thread of its own, beside the caller and other streams.

    The thread starts with the first work and ends with the stream; work that is queued by then is still done.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name or f"cpu-stream-{next(_numbers)}"
        self._lane = _Lane(self.name)
        # The thread holds the lane, not the stream, so that dropping the stream ends the thread.
        weakref.finalize(self, self._lane.end).atexit = False

    def __repr__(self) -> str:
        return f"CpuStream({self.name!r})"

    def submit(self, fn: Callable[[], object]) -> None:
        """Queue `fn`, to be called with the caller's gradient mode.

        Raises:
            BaseException: what earlier work raised; `fn` isn't queued then.
        """
        if self._lane.failure is not None:
            self.synchronize()
        self._lane.put(partial(self._lane.execute, fn, torch.is_grad_enabled()))

    def wait_event(self, event: CpuEvent) -> None:
        """Let work queued from now on wait for `event`; doesn't block the caller."""
        if event._point is not None:
            self._lane.put(partial(self._lane.wait, event._point))

    def query(self) -> bool:
        """Whether all work queued so far is done."""
        return self._lane.idle()

    def synchronize(self) -> None:
        """Block this thread until all work queued so far is done.

        Raises:
            BaseException: what the work raised. The stream is usable again afterwards.
        """
        point = _Point()
        # The lane forgets the failure at this point of its order: work queued later runs again.
        self._lane.put(partial(self._lane.mark, point, forget=True))
        point.wait()

    def _mark(self, point: _Point) -> None:
        self._lane.put(partial(self._lane.mark, point))


class _Lane:
    """The queue of a stream and the thread that works through it."""

    def __init__(self, name: str) -> None:
        self.failure: _Failure | None = None  # that makes the lane skip work
        self._unseen: list[_Failure] = []  # that began here
        self._name = name
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._queued = self._done = 0

    def put(self, item: Callable[[], None]) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                _lanes.add(self)
                self._thread.start()
            self._queued += 1
            self._queue.put(item)

    def idle(self) -> bool:
        return self._done == self._queued

    def end(self) -> None:
        self._queue.put(None)

    def join(self, seconds: float) -> None:
        if self._thread is not None:
            self._thread.join(seconds)

    def execute(self, fn: Callable[[], object], gradients: bool) -> None:
        if self.failure is not None:
            return
        try:
            with torch.set_grad_enabled(gradients):
                fn()
        except BaseException as error:
            self.failure = _Failure(error)
            self._unseen.append(self.failure)

    def mark(self, point: _Point, forget: bool = False) -> None:
        point.failure = self.failure
        if forget:
            self.failure = None
        self._unseen = [failure for failure in self._unseen if not failure.seen]
        point.passed.set()

    def wait(self, point: _Point) -> None:
        point.passed.wait()
        # A failure spreads to who depends on it, as one failure that needs to be seen once.
        self.failure = self.failure or point.failure

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            item()
            del item  # the next item may be long in coming: hold no tensors meanwhile
            self._done += 1
        for failure in self._unseen:
            if not failure.seen:
                failure.seen = True
                error = failure.error
                # The standard place for the error of a thread: prints it, and test runners look there.
                threading.excepthook(
                    threading.ExceptHookArgs((type(error), error, error.__traceback__, threading.current_thread()))
                )


class _Entered(threading.local):
    """Streams entered by each thread, innermost last; the host stream is at the bottom."""

    def __init__(self) -> None:
        self.stack: list[LocalStream] = [HostStream()]


_entered = _Entered()


def current_stream() -> LocalStream:
    """The stream whose `with` block the calling thread is in, or the host stream."""
    return _entered.stack[-1]


def copy_async(target: torch.Tensor, source: torch.Tensor, stream: LocalStream | None = None) -> CpuEvent:
    """Copy `source` into `target` on a stream (default: the current one), beside the caller.

    Both tensors are kept alive until the copy is done. No gradient is recorded.

    Args:
        target: is overwritten; another dtype is converted to.
        source: of the same shape; must not change before the copy is done.
        stream: where the copy is queued.

    Returns:
        An event behind the copy.

    Raises:
        PlatformError: the shapes differ; raised before anything is queued.
    """
    if target.shape != source.shape:
        raise PlatformError(
            f"copy_async: a source of shape {tuple(source.shape)} doesn't fit a target of shape {tuple(target.shape)}; "
            "the shapes must be equal (an asynchronous copy doesn't broadcast)"
        )
    stream = stream or current_stream()
    with torch.no_grad():
        stream.submit(partial(target.copy_, source))
    return stream.record_event()


@atexit.register
def _finish() -> None:
    # What was queued is done, and its errors are shown, before daemon threads are frozen. A thread that waits for ever
    # is left behind.
    lanes = list(_lanes)
    for lane in lanes:
        lane.end()
    for lane in lanes:
        lane.join(EXIT_SECONDS)
