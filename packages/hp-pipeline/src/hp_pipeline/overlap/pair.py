"""A backward and a forward run as a pair: the forward on the calling thread, the backward on a second one that is like it.

The forward stays where it is, since contexts of the calling thread (gradient mode, autocast, hooks) mostly concern forwards.
Each side keeps its own random state while it hasn't the turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from hp_core.errors import CommTimeoutError, PlanError
from hp_core.random.state import get_rng_state, set_rng_state
from hp_pipeline.overlap.coordinator import Coordinator
from hp_pipeline.overlap.turns import Side
from hp_pipeline.overlap.worker import Worker
from hp_pipeline.platform import ThreadTools

__all__ = ["BothFailed", "Pair"]

B = TypeVar("B")
F = TypeVar("F")
_GRACE = 1.0  # seconds in which the other side may still end after a timeout


class BothFailed(Exception):
    """The other side of a pair failed as well, later; among the contexts of the error that is raised."""


class Pair:
    """One run of a backward beside a forward.

    Args:
        coordinator: whose turn it is.
        worker: where the backward runs.
        tools: the framework's part.

    Attributes:
        hangs: where the backward's thread is, if it hasn't come back after a failure; else "".
    """

    def __init__(self, coordinator: Coordinator, worker: Worker, tools: ThreadTools) -> None:
        self.hangs = ""
        self._coordinator, self._worker, self._tools = coordinator, worker, tools
        self._forward_thread = threading.get_ident()
        self._results: list[Any] = [None, None]
        self._began = self._random_state()
        self._random = [self._began, self._began]
        self._holds = [False, False]

    def run(self, backward: Callable[[], B], forward: Callable[[], F]) -> tuple[B, F]:
        """Run both to their ends.

        Raises:
            BaseException: what the side raised that failed first; if the other failed as well, that is among its contexts.
            PlanError: the backward drew random numbers of its own.
        """
        coordinator = self._coordinator
        call = self._tools.like_this_thread(partial(self._run, Side.BACKWARD, backward))
        self._worker.submit(partial(self._try, call))
        self._run(Side.FORWARD, forward)
        try:
            ended = coordinator.wait_for_end(Side.BACKWARD, self._patience())
        except BaseException as interrupt:
            coordinator.fail(Side.FORWARD, interrupt)
            ended = coordinator.wait_for_end(Side.BACKWARD, _GRACE)
        if not ended:
            self.hangs = coordinator.whereabouts(Side.BACKWARD)
        if coordinator.failures:
            raise _first_failure(coordinator)
        self._set_random_state(self._random[Side.FORWARD])
        if not self._same(self._random[Side.BACKWARD], self._began):
            raise PlanError(
                f"{coordinator.where}: {coordinator.names[Side.BACKWARD]} drew random numbers of its own, so the forward beside "
                f"it began with others than after it. Let recomputation keep the random state (preserve_rng_state=True of "
                f"checkpoint), or run the two one after the other (overlap=False of the pipeline)."
            )
        return self._results[Side.BACKWARD], self._results[Side.FORWARD]

    def depart(self, side: Side, point: str) -> None:
        """A side begins an exchange."""
        self._keep(side)
        self._coordinator.depart(side, point)

    def resume(self, side: Side) -> None:
        """A side's exchange is over, and it waits for its turn."""
        self._coordinator.resume(side)
        if not self._holds[side]:
            self._set_random_state(self._random[side])
            self._holds[side] = True

    def side_here(self) -> Side:
        """Which side the calling thread works for.

        Raises:
            PlanError: none.
        """
        here = threading.get_ident()
        if here == self._forward_thread:
            return Side.FORWARD
        if (
            here == self._worker.ident or self._tools.in_backward()
        ):  # accelerators have threads of their own for backwards
            return Side.BACKWARD
        raise PlanError(
            f"{self._coordinator.where}: an exchange wrapped by CommComputeOverlap was called in thread "
            f"{threading.current_thread().name!r}, while a pair runs in two others. One pair runs at a time; call other "
            f"models with those layers before or after it."
        )

    def _run(self, side: Side, function: Callable[[], Any]) -> None:
        coordinator = self._coordinator
        try:
            coordinator.begin(side)
            self._set_random_state(self._random[side])
            self._holds[side] = True
            self._results[side] = function()
            self._keep(side)
        except BaseException as error:
            coordinator.fail(side, error)
        else:
            coordinator.finish(side)

    def _try(self, call: Callable[[], object]) -> None:
        """On the other thread: whatever goes wrong before the backward begins is a failure of it."""
        try:
            call()
        except BaseException as error:
            self._coordinator.fail(Side.BACKWARD, error)

    def _patience(self) -> float | None:
        """How long to wait for the backward once the forward has ended: for ever, unless something has failed."""
        failures = self._coordinator.failures
        if not failures:
            return None
        return _GRACE if isinstance(failures[0][1], CommTimeoutError) else self._coordinator.timeout

    def _keep(self, side: Side) -> None:
        if self._holds[side]:
            self._random[side] = self._random_state()
            self._holds[side] = False

    def _random_state(self) -> tuple[Any, Any]:
        return get_rng_state(), self._tools.random_state()

    def _set_random_state(self, state: tuple[Any, Any]) -> None:
        set_rng_state(state[0])
        self._tools.set_random_state(state[1])

    def _same(self, one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
        return bool(one[0] == other[0]) and self._tools.same_random_state(one[1], other[1])


def _first_failure(coordinator: Coordinator) -> BaseException:
    """The first failure; if there is a second, that is at the end of its chain."""
    (first, error), *later = coordinator.failures
    if later:
        second, other = later[0]
        told = BothFailed(
            f"{coordinator.where}: both sides failed. First {coordinator.names[first]} ({type(error).__name__}: {error}), which is "
            f"what is raised; then {coordinator.names[second]} ({type(other).__name__}: {other})."
        )
        told.__cause__ = other
        last, seen = error, {id(error)}
        while (earlier := last.__cause__ or last.__context__) is not None and id(earlier) not in seen:
            seen.add(id(earlier))
            last = earlier
        if id(other) not in seen:
            last.__context__ = told
    return error
