"""All-gather and reduce-scatter over gloo's point-to-point transport, straight between the caller's buffers.

gloo's own two copy through buffers of their own, and its reduce-scatter moves about what an all-reduce moves. Sent directly,
each byte is written once by who receives it; for a reduction the peers' pieces are then added to the own one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from hp_core.platform.protocol import Group

__all__ = ["direct_all_gather", "direct_reduce_scatter", "direct_transport", "leave_transports"]

# Point-to-point calls of users have tag 0: what is sent here can't be taken for theirs, nor a gather for a reduction.
_GATHER_TAG = 0x6870_01
_REDUCE_TAG = 0x6870_02


@lru_cache(maxsize=1 << 10)
def direct_transport(group: Group) -> Any:
    """The gloo backend that carries a group's CPU tensors, or None if another one does."""
    if group.native is None or "cpu" not in group.devices:
        return None
    backend = group.native._get_backend(torch.device("cpu"))
    return backend if isinstance(backend, dist.ProcessGroupGloo) else None


def leave_transports() -> None:
    """Finish what is on its way and forget the backends, before the world ends."""
    _finish_dropped()
    direct_transport.cache_clear()


def direct_all_gather(transport: Any, output: torch.Tensor, source: torch.Tensor) -> _Transfers:
    """Start gathering; both are dense CPU tensors, and `source` may lie in its own place of `output`."""
    if _dropped:
        _finish_dropped(transport)
    own, size = transport.rank(), transport.size()
    pieces = output.view(size, -1)
    source = source.view(-1)
    peers = [(own + step) % size for step in range(1, size)]
    works = [transport.recv([pieces[peer]], peer, _GATHER_TAG) for peer in reversed(peers)]
    works += [transport.send([source], peer, _GATHER_TAG) for peer in peers]
    place = pieces[own]
    if place.data_ptr() != source.data_ptr():
        place.copy_(source)
    return _Transfers(transport, works, (output, source))


def direct_reduce_scatter(transport: Any, output: torch.Tensor, source: torch.Tensor, reduce_op: str) -> _Transfers:
    """Start a reduction ("sum" or "avg") of dense CPU tensors; the additions are done by who waits for it."""
    own, size = transport.rank(), transport.size()
    pieces = source.view(size, -1)
    # the first peer's piece arrives where the sum will be, unless this rank's own lies there
    in_place = output.data_ptr() == pieces[own].data_ptr()
    received = source.new_empty((size - 1 if in_place else size - 2, output.numel()))
    parts = [pieces[own]]
    peers = [(own + step) % size for step in range(1, size)]
    spaces = [*(() if in_place else (output.view(-1),)), *received]
    works = []
    for peer, space in zip(reversed(peers), spaces, strict=True):
        works.append(transport.recv([space], peer, _REDUCE_TAG))
        parts.append(space)
    works += [transport.send([pieces[peer]], peer, _REDUCE_TAG) for peer in peers]

    def add() -> None:
        _add(parts, output.view(-1))
        if reduce_op == "avg":
            output.div_(size)

    return _Transfers(transport, works, (source, output, received), add)


def _add(parts: list[torch.Tensor], output: torch.Tensor) -> None:
    """Add; one of the first two may lie where the sum goes. Half precision is rounded once, at the end."""
    if len(parts) > 2 and output.dtype in (torch.bfloat16, torch.float16):
        wide = parts[0].float()
        for part in parts[1:]:
            wide.add_(part)
        output.copy_(wide)
        return
    torch.add(parts[0], parts[1], out=output)
    for part in parts[2:]:
        output.add_(part)


class _Transfers:
    """Sends and receives on their way, as one work, and what is computed when they have arrived."""

    __slots__ = ("_after", "_buffers", "_transport", "_works")

    def __init__(
        self,
        transport: Any,
        works: list[Any],
        buffers: tuple[torch.Tensor, ...],
        after: Callable[[], None] | None = None,
    ) -> None:
        self._transport, self._works, self._buffers, self._after = transport, works, buffers, after

    def wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()
        if self._after is not None:
            after, self._after = self._after, None
            after()

    def is_completed(self) -> bool:
        """Whether it was waited for: gloo doesn't tell of a transfer whether it has arrived."""
        return not self._works

    def __del__(self) -> None:
        # gloo gives up a transfer whose handle is dropped, and the peer would wait for ever
        if self._works:
            _dropped.append((self._transport, self._works, self._buffers))


_dropped: list[tuple[Any, list[Any], tuple[torch.Tensor, ...]]] = []
"""Transfers that nobody will wait for, kept until the next one of their group is begun, or the world ends."""


def _finish_dropped(transport: Any = None) -> None:
    """Wait for the dropped transfers of a group, or all: its members have begun them in the same order."""
    for dropped in [one for one in _dropped if transport is None or one[0] is transport]:
        _dropped.remove(dropped)
        for work in dropped[1]:
            work.wait()
