"""Threads that wait for their turn: `Turns` behind a lock, with failures and a timeout.

A side that fails releases the other at its next call, and nothing waits longer than the timeout, whose error says who waited
where for whom.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from hp_core.errors import CommTimeoutError, HyperParallelError
from hp_pipeline.overlap.turns import Place, Side, Turns

__all__ = ["Coordinator", "Released"]


class Released(HyperParallelError, RuntimeError):
    """This side of a pair can't go on since the other one has failed; that one's error is what the pair raises."""


class Coordinator:
    """One run of a pair.

    Args:
        names: of the backward and of the forward, for errors.
        where: rank and step, for errors.
        timeout: seconds to wait for a turn.
    """

    def __init__(self, names: tuple[str, str], where: str, timeout: float) -> None:
        self.names, self.where, self.timeout = names, where, timeout
        self.failures: list[tuple[Side, BaseException]] = []
        self.ended = [False, False]
        self._turns = Turns()
        self._counts = [0, 0]
        self._points = ["its beginning", "its beginning"]
        self._changed = threading.Condition()

    def begin(self, side: Side) -> None:
        """Wait for the first turn."""
        with self._changed:
            self._wait(side, lambda: self._turns.may_compute(side))
            self._turns = self._turns.computing(side)

    def depart(self, side: Side, point: str) -> None:
        """Begin an exchange: the other side computes meanwhile.

        Args:
            side: whose.
            point: which, in words.

        Raises:
            Released: the other side has failed.
            CommTimeoutError: it hasn't come back from its own exchange in time.
        """
        with self._changed:
            self._counts[side] += 1
            self._points[side] = f"{point} (its exchange {self._counts[side]})"
            self._return(side)  # a backward whose last exchange wanted no gradient was never told of its end
            self._wait(side, lambda: self._turns.may_exchange(side))
            self._turn_to(self._turns.exchanging(side))

    def resume(self, side: Side) -> None:
        """The exchange is over: wait for the turn.

        Raises:
            Released: the other side has failed.
            CommTimeoutError: it hasn't given the turn away in time.
        """
        with self._changed:
            self._return(side)

    def finish(self, side: Side) -> None:
        """The side is done; the other runs free."""
        with self._changed:
            self.ended[side] = True
            self._turn_to(self._turns.done(side))

    def fail(self, side: Side, error: BaseException) -> None:
        """The side has failed; the other is released."""
        with self._changed:
            self.ended[side] = True
            if not isinstance(error, Released):
                self.failures.append((side, error))
            self._turn_to(self._turns.done(side))

    def wait_for_end(self, side: Side, seconds: float | None) -> bool:
        """Wait until a side is done or has failed; whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: self.ended[side], seconds)

    def whereabouts(self, side: Side) -> str:
        """What a side does, in words."""
        place, point = self._turns.place(side), self._points[side]
        if place is Place.EXCHANGES:
            return f"is in {point}"
        if place is Place.COMPUTES:
            return f"computes since {point}"
        return f"waits after {point}" if place is Place.WAITS else "is done"

    def _return(self, side: Side) -> None:
        if self._turns.place(side) is Place.EXCHANGES:
            self._turn_to(self._turns.waiting(side))
            self._wait(side, lambda: self._turns.may_compute(side))
            self._turns = self._turns.computing(side)

    def _turn_to(self, turns: Turns) -> None:
        self._turns = turns
        self._changed.notify_all()

    def _wait(self, side: Side, ready: Callable[[], bool]) -> None:
        until = time.monotonic() + self.timeout
        while not self.failures:
            if ready():
                return
            left = until - time.monotonic()
            if left <= 0:
                raise CommTimeoutError(self._stalled(side))
            self._changed.wait(left)
        raise self._released(side)

    def _released(self, side: Side) -> Released:
        failed, error = self.failures[0]
        return Released(
            f"{self.where}: {self.names[side]} stops at {self._points[side]}, since {self.names[failed]} has failed "
            f"({type(error).__name__}: {error})."
        )

    def _stalled(self, side: Side) -> str:
        other = side.other
        return (
            f"{self.where}: {self.names[side]} waited {self.timeout:g} s at {self._points[side]} for {self.names[other]}, which "
            f"{self.whereabouts(other)}. Either that takes longer than the timeout (raise timeout= of CommComputeOverlap), or "
            f"a rank of its exchange has stopped: look at what the other ranks did last."
        )
