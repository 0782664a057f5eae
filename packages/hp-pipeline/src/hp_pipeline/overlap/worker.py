"""The second thread of pairs: one for good, so that what libraries keep for each thread is made once."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

__all__ = ["Worker"]


class Worker:
    """A thread that calls what it is given, one call after the other. It ends with this object, and never holds up the
    interpreter's end.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._calls,), name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._calls.put, None).atexit = False

    @property
    def ident(self) -> int | None:
        """The thread's number, as `threading.get_ident` tells it there."""
        return self._thread.ident

    def submit(self, call: Callable[[], None]) -> None:
        """Call it there; it must not raise."""
        self._calls.put(call)


def _serve(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # the next may be long in coming: hold no tensors meanwhile
