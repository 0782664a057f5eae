"""`CommComputeOverlap`: what users wrap the exchanges of their layers with, and what the runtime runs `OVERLAP_B_F` steps by."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

from hp_core.errors import PlanError
from hp_core.process_group import get_rank
from hp_pipeline.overlap.coordinator import Coordinator
from hp_pipeline.overlap.exchange import SyncedExchange
from hp_pipeline.overlap.pair import Pair
from hp_pipeline.overlap.worker import Worker
from hp_pipeline.platform import get_thread_tools

__all__ = ["CommComputeOverlap"]

B = TypeVar("B")
F = TypeVar("F")
E = TypeVar("E", bound=Callable[..., Any])
_TIMEOUT = 600.0  # seconds, as that of process groups


class CommComputeOverlap:
    """Hides the exchanges of a backward behind the computation of a forward, and the other way round.

    The two run on two threads that take turns: while one exchanges (an all-to-all between experts, say) the other one
    computes. Exchanges of the two sides alternate, beginning with the backward's; when one side has no more, the other runs
    free. The order of everything but the inside of exchanges depends only on how many there are on each side, so that ranks
    which compute the same layers agree on it without a message. Values, gradients and random numbers are those of the
    backward followed by the forward, bit for bit.

    Example:
        >>> overlap = CommComputeOverlap()
        >>> class MoE(nn.Module):
        ...     def __init__(self, router, experts, group):
        ...         super().__init__()
        ...         self.router, self.experts = router, experts
        ...         self.dispatch = overlap.wrap_dispatch(partial(all_to_all, group=group))
        ...         self.combine = overlap.wrap_combine(partial(all_to_all, group=group))
        >>> ScheduleDualPipeV(stages, micro_batches=8, loss_fn=loss_fn)  # finds the hooks in the stages

    One object serves all layers of a rank. A pipeline uses it by itself for the steps `OVERLAP_B_F`; `run` is for other uses.

    Args:
        timeout: seconds, or a timedelta, that one side waits for the other; default 10 minutes.

    Raises:
        PlanError: the timeout isn't positive.
    """

    def __init__(self, timeout: float | timedelta | None = None) -> None:
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        self.timeout = _TIMEOUT if seconds is None else float(seconds)
        if not self.timeout > 0:
            raise PlanError(f"CommComputeOverlap(timeout={timeout!r}): the timeout is a positive number of seconds.")
        self.inside: dict[int, str] = {}  # by thread, the wrapped exchange that it is in
        self._counts: Counter[str] = Counter()
        self._worker: Worker | None = None
        self._pair: Pair | None = None
        self._running = threading.Lock()
        self._hangs = ""

    def wrap_dispatch(self, exchange: E, *, settle: Callable[[Any], Any] | None = None, layer: str = "") -> E:
        """Wrap the exchange that brings tokens to their experts.

        Args:
            exchange: a function, which is left as it is, or a module, whose forward is wrapped in place. Tensors among its
                arguments and results are found in nested containers. It may block, with the interpreter's lock released (as
                collectives do); the other side computes meanwhile, so its communication needs a process group of its own.
                Only the exchange belongs inside: nothing that draws random numbers, nothing heavy.
            settle: if given, `exchange` only begins the exchange, and `settle` is called with what it returned when the result is
                needed and it is this side's turn again. The same in the backward: there the backward of `settle` begins and that
                of `exchange` waits. Collectives then begin in one order on all ranks, whatever their groups; on an accelerator
                this is what overlaps, since a blocking exchange makes the stream wait that the other side computes on.
            layer: its name in errors; default its number among those wrapped here.

        Returns:
            What to call instead; for a module, the module.

        Raises:
            PlanError: it can't be called, or is wrapped already.
        """
        return cast(E, self._wrap("dispatch", exchange, settle, layer))

    def wrap_combine(self, exchange: E, *, settle: Callable[[Any], Any] | None = None, layer: str = "") -> E:
        """Wrap the exchange that brings results back to where the tokens came from; as `wrap_dispatch`."""
        return cast(E, self._wrap("combine", exchange, settle, layer))

    def run(
        self,
        backward: Callable[[], B],
        forward: Callable[[], F],
        *,
        names: tuple[str, str] = ("the backward", "the forward"),
        where: str = "",
    ) -> tuple[B, F]:
        """Run a backward and a forward as a pair.

        The forward runs on the calling thread. The backward runs on another one, with the device, stream, modes and contexts
        of this.

        Args:
            backward: called once. It must draw no random numbers but those of a recomputation, which keeps the state.
            forward: called once.
            names: of the two, for errors.
            where: for errors; default this rank.

        Returns:
            What they returned.

        Raises:
            BaseException: the error of the side that failed first, as it was raised there. The other one stops at its next
                exchange; if it fails by itself as well, its error is among the contexts of this one.
            CommTimeoutError: a side waited for its turn until the timeout.
            PlanError: a pair is running already, or an earlier one has left a thread that hangs, or the backward drew random
                numbers.
        """
        where = where or f"rank {get_rank()}"
        if not self._running.acquire(blocking=False):
            raise PlanError(f"{where}: CommComputeOverlap.run was called while a pair runs; one runs at a time.")
        try:
            if self._hangs:
                raise PlanError(
                    f"{where}: the backward of an earlier pair has never come back ({self._hangs}); end this process."
                )
            self._worker = self._worker or Worker("overlapped-backward")
            pair = self._pair = Pair(Coordinator(names, where, self.timeout), self._worker, get_thread_tools())
            try:
                return pair.run(backward, forward)
            finally:
                self._hangs = pair.hangs
        finally:
            self._pair = None
            self._running.release()

    def depart(self, point: str) -> None:
        """The calling thread begins an exchange: if a pair runs, the other side computes from now on.

        Args:
            point: which exchange, for errors.
        """
        pair = self._pair
        if pair is not None:
            pair.depart(pair.side_here(), point)

    def resume(self) -> None:
        """The exchange is over: if a pair runs, wait for the turn."""
        pair = self._pair
        if pair is not None:
            pair.resume(pair.side_here())

    def __deepcopy__(self, memo: dict[int, Any]) -> CommComputeOverlap:
        """Itself: copies of a model take turns with it."""
        return self

    def _wrap(self, kind: str, exchange: Any, settle: Callable[[Any], Any] | None, layer: str) -> Any:
        layer = layer or str(self._counts[kind])
        self._counts[kind] += 1
        point = f"the {kind} of layer {layer}"
        tools = get_thread_tools()
        inner = getattr(exchange, "forward", exchange) if tools.is_module(exchange) else exchange
        if isinstance(inner, SyncedExchange):
            raise PlanError(f"{point}: {exchange!r} is wrapped already, as {inner.point}.")
        if not callable(inner) or not (settle is None or callable(settle)):
            raise PlanError(f"{point}: {exchange if not callable(inner) else settle!r} can't be called.")
        if tools.is_module(exchange):
            tools.replace_forward(exchange, lambda forward: SyncedExchange(self, forward, settle, point))
            return exchange
        return SyncedExchange(self, exchange, settle, point)
