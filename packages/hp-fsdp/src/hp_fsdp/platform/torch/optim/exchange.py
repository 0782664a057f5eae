"""The two all-to-alls by which owners get the pieces of their matrices, and give the pieces of the results back.

Sizes are those of the route, whatever gradients there are: so all ranks always make the same calls. With each piece goes
one number that says whether its rank has a gradient, and with each result whether any of its ranks had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from hp_core.geometry import Box, box_numel, box_shape
from hp_core.platform import get_platform
from hp_core.platform.protocol import Work
from hp_core.process_group import group_of_ranks
from hp_fsdp.optim.owners import Part, Route

__all__ = ["Exchange"]


class Exchange:
    """One step's exchange of a group of ranks: `send`, `collect`, `give_back`, `take`, in this order.

    The messages of each member are its pieces, one after another, and then their flags.
    """

    def __init__(self, route: Route, dtype: torch.dtype, device: torch.device) -> None:
        self.route = route
        self.dtype = dtype
        self.device = device
        self._sent = _Message([[part.numel for part in parts] for parts in route.sends])
        self._arriving = _Message([[_numel(piece.boxes) for _, piece in parts] for parts in route.arrivals])
        self._returned = _Message([[_numel(piece.boxes) for _, piece in parts] for parts in route.returns])
        self._received = _Message([[part.numel for part in parts] for parts in route.receives])
        arrivals = [[] for _ in route.owned]  # type: list[list[int]]
        for (place, _), position in zip(_flattened(route.arrivals), self._arriving.flags, strict=True):
            arrivals[place].append(position)
        width = max(map(len, arrivals), default=0)
        self._flags_of_owned = self._positions([(row + row[:1] * width)[:width] for row in arrivals])
        self._owned_of_flags = self._positions([place for place, _ in _flattened(route.returns)])
        self._flags_returned = self._positions(self._returned.flags)
        self._flags_sent = self._positions(self._sent.flags)
        self._parts_sent = _flattened(route.sends)
        self._parts_received = _flattened(route.receives)
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        self._present: torch.Tensor | None = None
        self._work: Work | None = None

    # -- the way there ----------------------------------------------------------------------------------------------

    def send(self, pieces: Sequence[torch.Tensor], absent: Sequence[bool]) -> None:
        """Start sending this rank's pieces to the owners.

        Args:
            pieces: in the order of `parts_to_send`, 1-D.
            absent: whether the rank has no gradient for each of them.
        """
        source = self._empty(self._sent)
        _copy(self._sent.pieces(source), pieces)
        if self._sent.flags:
            source.index_fill_(0, self._flags_sent, 1)
            missing = [position for position, gone in zip(self._sent.flags, absent, strict=True) if gone]
            if missing:
                source.index_fill_(0, self._positions(missing), 0)
        self._start(source, self._sent, self._arriving)

    @property
    def parts_to_send(self) -> list[Part]:
        """This rank's pieces that owners need, in the order of the message."""
        return self._parts_sent

    def collect(self, stacks: Mapping[int, tuple[torch.Tensor, int]]) -> None:
        """Wait for the pieces of the owned matrices, and put them together.

        Args:
            stacks: for each owned matrix the stack to write it to, and its place there.
        """
        message = self._finish()
        targets, sources = [], []
        for (place, piece), received in zip(
            _flattened(self.route.arrivals), self._arriving.pieces(message), strict=True
        ):
            stack, index = stacks[place]
            for view, part in _boxes(stack[index], received, piece.boxes):
                targets.append(view)
                sources.append(part)
        _copy(targets, sources)
        self._present = message[self._flags_of_owned].amax(1) if self.route.owned else None

    # -- the way back -----------------------------------------------------------------------------------------------

    def give_back(self, results: Mapping[int, torch.Tensor]) -> None:
        """Start sending the results' pieces to all who hold them.

        Args:
            results: each owned matrix, computed.
        """
        source = self._empty(self._returned)
        targets, sources = [], []
        for (place, piece), sent in zip(_flattened(self.route.returns), self._returned.pieces(source), strict=True):
            for view, part in _boxes(results[place], sent, piece.boxes):
                targets.append(part)
                sources.append(view)
        _copy(targets, sources)
        if self._present is not None:
            source[self._flags_returned] = self._present[self._owned_of_flags]
        self._present = None
        self._start(source, self._returned, self._received)

    def take(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Wait for the results' pieces.

        Returns:
            The pieces, 1-D, in the order of `parts_to_take`; and a number for each that isn't 0 if any rank that holds the
            matrix has a gradient.
        """
        message = self._finish()
        flags = message[self._positions(self._received.flags)] if self._received.flags else message[:0]
        return self._received.pieces(message), flags

    @property
    def parts_to_take(self) -> list[Part]:
        """This rank's pieces of all cut matrices, in the order in which results come."""
        return self._parts_received

    # -- messages ---------------------------------------------------------------------------------------------------

    def _empty(self, message: _Message) -> torch.Tensor:
        return torch.empty(message.numel, dtype=self.dtype, device=self.device)

    def _positions(self, positions: Sequence[Any]) -> torch.Tensor:
        return torch.tensor(positions, dtype=torch.int64, device=self.device)

    def _start(self, source: torch.Tensor, sent: _Message, received: _Message) -> None:
        output = self._empty(received)
        group = group_of_ranks(self.route.ranks)
        collectives = get_platform().collectives
        self._buffers = output, source  # the source must live until the exchange is done
        self._work = collectives.all_to_all(output, source, received.splits, sent.splits, group, async_op=True)

    def _finish(self) -> torch.Tensor:
        assert self._buffers is not None
        output, _ = self._buffers
        if self._work is not None:
            self._work.wait()
        self._work = self._buffers = None
        return output


class _Message:
    """Where pieces and flags lie in a buffer: for each member its pieces, then their flags."""

    def __init__(self, sizes: Sequence[Sequence[int]]) -> None:
        self.splits = [sum(member) + len(member) for member in sizes]
        self.numel = sum(self.splits)
        starts = [0, *accumulate(self.splits)]
        self.flags = [
            start + sum(member) + place
            for start, member in zip(starts, sizes, strict=False)
            for place in range(len(member))
        ]
        self._sections = [size for member in sizes if member for size in (*member, len(member))]
        self._is_piece = [flag for member in sizes if member for flag in (*[True] * len(member), False)]

    def pieces(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The pieces, as views of the buffer."""
        if not self._sections:
            return []
        parts = torch.split(buffer, self._sections)
        return [part for part, is_piece in zip(parts, self._is_piece, strict=True) if is_piece]


def _flattened(members: Sequence[Sequence[Any]]) -> list[Any]:
    return [part for parts in members for part in parts]


def _numel(boxes: Sequence[Box]) -> int:
    return sum(map(box_numel, boxes))


def _boxes(
    matrix: torch.Tensor, elements: torch.Tensor, boxes: Sequence[Box]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The boxes of a matrix, each with the view of the elements that belong there."""
    pairs, start = [], 0
    for box in boxes:
        (top, bottom), (left, right) = box
        stop = start + box_numel(box)
        pairs.append((matrix[top:bottom, left:right], elements[start:stop].view(box_shape(box))))
        start = stop
    return pairs


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))
