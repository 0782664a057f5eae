"""`SyncedExchange`: the exchange of a layer, with the points before and after it at which the sides of a pair take turns.

In the backward the points are met in the other order, around the exchange's own backward. Outside of a pair they do nothing.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, update_wrapper
from types import MethodType
from typing import TYPE_CHECKING, Any

from hp_core.errors import PlanError
from hp_core.platform import get_platform
from hp_pipeline.platform import get_thread_tools

if TYPE_CHECKING:
    from hp_pipeline.overlap.comm_compute import CommComputeOverlap

__all__ = ["SyncedExchange", "exchanges_below"]


class SyncedExchange:
    """Stands in for an exchange and is called like it.

    Args:
        overlap: whose pairs take turns here.
        exchange: the exchange itself, or only its beginning.
        settle: then its end, called with what the beginning gave.
        point: what it is and of which layer, for errors: "the dispatch of layer 3".
    """

    def __init__(
        self,
        overlap: CommComputeOverlap,
        exchange: Callable[..., Any],
        settle: Callable[[Any], Any] | None,
        point: str,
    ) -> None:
        update_wrapper(self, exchange, updated=())
        self.overlap, self.point = overlap, point
        self._exchange, self._settle = exchange, settle

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The exchange."""
        with self._entered():
            return self._whole(args, kwargs) if self._settle is None else self._in_parts(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncedExchange:
        """For a copy of the module that holds it: a forward becomes the copy's, functions and groups stay the same."""
        exchange = copy.deepcopy(self._exchange, memo) if isinstance(self._exchange, MethodType) else self._exchange
        return SyncedExchange(self.overlap, exchange, self._settle, self.point)

    def __repr__(self) -> str:
        return f"SyncedExchange({self.point})"

    def _whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The other side computes while the exchange is called."""
        tools, overlap = get_thread_tools(), self.overlap
        args, kwargs = tools.synced((args, kwargs), overlap.resume)
        overlap.depart(self.point)
        try:
            result = self._exchange(*args, **kwargs)
        except Exception:
            if get_platform().autograd.recomputes():  # checkpoints stop a recomputation by an exception, wherever it is
                overlap.resume()
            raise
        overlap.resume()
        return tools.synced(result, partial(overlap.depart, self._backward_point))

    def _in_parts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The exchange begins as part of this side's computation; the other side computes before it is waited for."""
        assert self._settle is not None
        begun = self._exchange(*args, **kwargs)
        self._take_turns(self.point)
        return self._settle(get_thread_tools().synced(begun, partial(self._take_turns, self._backward_point)))

    def _take_turns(self, point: str) -> None:
        self.overlap.depart(point)
        self.overlap.resume()

    @property
    def _backward_point(self) -> str:
        return f"the backward of {self.point}"

    @contextmanager
    def _entered(self) -> Iterator[None]:
        inside, here = self.overlap.inside, threading.get_ident()
        outer = inside.get(here)
        if outer is not None:
            raise PlanError(
                f"{self.point} is called inside {outer}. Wrap only the exchange of a layer, not what computes around it."
            )
        inside[here] = self.point
        try:
            yield
        finally:
            del inside[here]


def exchanges_below(module: Any) -> list[SyncedExchange]:
    """Those that a module and the modules below it hold as attributes, or are themselves."""
    return [
        value
        for _, part in get_platform().modules.named_modules(module)
        for value in vars(part).values()
        if isinstance(value, SyncedExchange)
    ]
