"""The one door of communication on CPU: torch's gloo group, on the memory of MindSpore's tensors.

MindSpore's own CPU collectives have no reduce-scatter, no all-to-all and no point-to-point. So every call becomes the
torch platform's, on torch tensors over the same memory: recording, timeouts and element types are looked after there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hp_core.platform.mindspore.arrays import as_array, writable_array
from hp_core.platform.protocol import Group, Work
from hp_core.platform.torch.collectives import TorchCollectives

if TYPE_CHECKING:
    from hp_core.platform.mindspore.arrays import Array

__all__ = ["GlooCollectives"]


class GlooCollectives:
    """See `hp_core.platform.protocol.Collectives`."""

    def __init__(self) -> None:
        self._torch = TorchCollectives()

    def all_gather(self, output: Any, source: Any, group: Group, async_op: bool = False) -> Work | None:
        """Concatenate every member's source."""
        return self._torch.all_gather(_target(output), _source(source), group, async_op)

    def reduce_scatter(
        self, output: Any, source: Any, reduce_op: str, group: Group, async_op: bool = False
    ) -> Work | None:
        """Reduce, and keep an equal share."""
        return self._torch.reduce_scatter(_target(output), _source(source), reduce_op, group, async_op)

    def all_reduce(self, tensor: Any, reduce_op: str, group: Group, async_op: bool = False) -> Work | None:
        """Reduce in place."""
        return self._torch.all_reduce(_target(tensor), reduce_op, group, async_op)

    def all_to_all(
        self,
        output: Any,
        source: Any,
        output_splits: Sequence[int],
        source_splits: Sequence[int],
        group: Group,
        async_op: bool = False,
    ) -> Work | None:
        """Exchange 1-D pieces."""
        return self._torch.all_to_all(_target(output), _source(source), output_splits, source_splits, group, async_op)

    def broadcast(self, tensor: Any, source_rank: int, group: Group, async_op: bool = False) -> Work | None:
        """Copy in place from a global rank."""
        return self._torch.broadcast(_target(tensor), source_rank, group, async_op)

    def scatter(
        self, output: Any, pieces: Sequence[Any] | None, source_rank: int, group: Group, async_op: bool = False
    ) -> Work | None:
        """Give each member one piece of the source rank's."""
        given = None if pieces is None else [_source(piece) for piece in pieces]
        return self._torch.scatter(_target(output), given, source_rank, group, async_op)

    def exchange(
        self,
        sends: Sequence[tuple[Any, int]],
        receives: Sequence[tuple[Any, int]],
        group: Group,
        async_op: bool = False,
    ) -> Work | None:
        """Post all receives and sends, then wait for all."""
        return self._torch.exchange(
            [(_source(tensor), peer) for tensor, peer in sends],
            [(_target(tensor), peer) for tensor, peer in receives],
            group,
            async_op,
        )

    def send(self, tensor: Any, peer: int, group: Group, async_op: bool = False) -> Work | None:
        """Send to a global rank."""
        return self._torch.send(_source(tensor), peer, group, async_op)

    def recv(self, tensor: Any, peer: int, group: Group, async_op: bool = False) -> Work | None:
        """Receive in place from a global rank."""
        return self._torch.recv(_target(tensor), peer, group, async_op)

    def barrier(self, group: Group) -> None:
        """Wait until all members arrive."""
        self._torch.barrier(group)


def _source(buffer: Any) -> torch.Tensor:
    """A torch tensor to read from; a copy only of what isn't dense."""
    array = as_array(buffer)
    return _over(array if array.flags.c_contiguous else array.copy())


def _target(buffer: Any) -> torch.Tensor:
    """A torch tensor on the very memory."""
    return _over(writable_array(buffer))


def _over(array: Array) -> torch.Tensor:
    if array.dtype.name == "bfloat16":  # a type of MindSpore's own, which torch knows by its bits only
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
