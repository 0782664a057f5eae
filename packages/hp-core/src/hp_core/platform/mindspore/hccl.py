"""The world and the one door of communication on Ascend: `mindspore.mint.distributed` over HCCL.

Written against MindSpore's documented interface and tested by the calls it makes; not verified on hardware.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import mindspore as ms
import numpy as np

from hp_core.errors import ProcessGroupError
from hp_core.platform.mindspore.arrays import as_tensor
from hp_core.platform.mindspore.processes import adopt_msrun_environment
from hp_core.platform.protocol import Group, Work
from hp_core.platform.recorder import CollectiveRecord, active_logs

__all__ = ["HcclCollectives", "HcclProcesses"]

_DEVICES = frozenset({"npu"})


class HcclProcesses:
    """The world of this process on Ascend; see `hp_core.platform.protocol.Processes`.

    Args:
        distributed: `mindspore.mint.distributed`, or what has its functions.
    """

    device_type = "npu"

    def __init__(self, distributed: Any) -> None:
        self._distributed = distributed

    def init_world(
        self,
        backend: str | None,
        *,
        init_method: str | None,
        world_size: int | None,
        rank: int | None,
        timeout: timedelta | None,
    ) -> None:
        """Check everything that can be checked alone, then join the world; msrun says who takes part."""
        if backend not in (None, "hccl"):
            raise ProcessGroupError(f"backend {backend!r} can't carry tensors on Ascend; use backend='hccl' or None.")
        if self._distributed.is_initialized():
            raise ProcessGroupError(
                f"the process world exists already (rank {self.rank()} of {self.world_size()}); call destroy_process_group() "
                f"before joining another."
            )
        adopt_msrun_environment()
        for what, variable, given in (("world_size", "WORLD_SIZE", world_size), ("rank", "RANK", rank)):
            said = os.environ.get(variable)
            if given is not None and said is not None and int(said) != given:
                raise ProcessGroupError(
                    f"{what}={given} contradicts the launcher's {variable}={said}; drop one of them."
                )
        self._distributed.init_process_group(
            "hccl",
            init_method=init_method,
            timeout=timeout,
            world_size=-1 if world_size is None else world_size,
            rank=-1 if rank is None else rank,
        )

    def destroy_world(self) -> None:
        """Leave the world."""
        if self._distributed.is_initialized():
            self._distributed.destroy_process_group()

    def is_initialized(self) -> bool:
        """Whether the world exists."""
        return bool(self._distributed.is_initialized())

    def rank(self) -> int:
        """Global rank; what the launcher says before the world exists, else 0."""
        if self.is_initialized():
            return int(self._distributed.get_rank())
        return int(os.environ.get("RANK") or os.environ.get("RANK_ID") or 0)

    def world_size(self) -> int:
        """Number of processes; what the launcher says before the world exists, else 1."""
        if self.is_initialized():
            return int(self._distributed.get_world_size())
        return int(os.environ.get("WORLD_SIZE") or os.environ.get("MS_WORKER_NUM") or 1)

    def backend(self, group: Group | None) -> str:
        """Name of the communication backend."""
        return str(self._distributed.get_backend(None if group is None else group.native))

    def new_group(self, ranks: tuple[int, ...], own: bool = False) -> Group:
        """A group of these ranks, made by its members only; always one of its own."""
        if not self.is_initialized():
            raise ProcessGroupError(
                f"ranks {list(ranks)} should communicate, but there is no process world; call init_process_group() first "
                f"(and launch with msrun)."
            )
        native = self._distributed.new_group(list(ranks), use_local_synchronization=True)
        return Group(ranks, native, _DEVICES)


class HcclCollectives:
    """See `hp_core.platform.protocol.Collectives`.

    Args:
        distributed: `mindspore.mint.distributed`, or what has its functions.
    """

    def __init__(self, distributed: Any) -> None:
        self._distributed = distributed

    def all_gather(self, output: Any, source: Any, group: Group, async_op: bool = False) -> Work | None:
        """Concatenate every member's source."""
        sent, target = _carried(source), _Target(output)
        if group.native is None:
            target.take(sent)
            return None
        _record("all_gather", (group.size - 1) * sent.nbytes, group, sent)
        handle = self._distributed.all_gather_into_tensor(
            target.flat, sent.reshape(-1), group=group.native, async_op=async_op
        )
        return target.settle(handle, async_op)

    def reduce_scatter(
        self, output: Any, source: Any, reduce_op: str, group: Group, async_op: bool = False
    ) -> Work | None:
        """Reduce, and keep an equal share."""
        sent, target = _carried(source), _Target(output)
        if group.native is None:
            target.take(sent)
            return None
        _record("reduce_scatter", (group.size - 1) * target.nbytes, group, sent, reduce_op)
        handle = self._distributed.reduce_scatter_tensor(
            target.flat, sent.reshape(-1), op=_operation(reduce_op), group=group.native, async_op=async_op
        )
        return target.settle(handle, async_op, group.size if reduce_op == "avg" else 1)

    def all_reduce(self, tensor: Any, reduce_op: str, group: Group, async_op: bool = False) -> Work | None:
        """Reduce in place."""
        if group.native is None:
            return None
        target = _Target(tensor)
        _record("all_reduce", -(-2 * (group.size - 1) * target.nbytes // group.size), group, target.flat, reduce_op)
        handle = self._distributed.all_reduce(
            target.flat, op=_operation(reduce_op), group=group.native, async_op=async_op
        )
        return target.settle(handle, async_op, group.size if reduce_op == "avg" else 1)

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
        sent, target = _carried(source), _Target(output)
        if group.native is None:
            target.take(sent)
            return None
        own = group.ranks.index(int(self._distributed.get_rank()))
        kept = source_splits[own] if source_splits else sent.size // group.size
        _record("all_to_all", (sent.size - kept) * sent.itemsize, group, sent)
        handle = self._distributed.all_to_all_single(
            target.flat,
            sent.reshape(-1),
            list(output_splits) or None,
            list(source_splits) or None,
            group=group.native,
            async_op=async_op,
        )
        return target.settle(handle, async_op)

    def broadcast(self, tensor: Any, source_rank: int, group: Group, async_op: bool = False) -> Work | None:
        """Copy in place from a global rank."""
        if group.native is None:
            return None
        _require_member(source_rank, group)
        target = _Target(tensor)
        sends = int(self._distributed.get_rank()) == source_rank
        _record("broadcast", (group.size - 1) * target.nbytes if sends else 0, group, target.flat)
        handle = self._distributed.broadcast(target.flat, source_rank, group=group.native, async_op=async_op)
        return target.settle(handle, async_op)

    def scatter(
        self, output: Any, pieces: Sequence[Any] | None, source_rank: int, group: Group, async_op: bool = False
    ) -> Work | None:
        """Give each member one piece of the source rank's."""
        target = _Target(output)
        if group.native is None:
            assert pieces is not None
            target.take(_carried(pieces[0]))
            return None
        _require_member(source_rank, group)
        _record("scatter", 0 if pieces is None else (group.size - 1) * target.nbytes, group, target.flat)
        # members without pieces name what they would send, too
        sent = [_carried(piece).reshape(-1) for piece in pieces] if pieces is not None else [target.flat] * group.size
        handle = self._distributed.scatter(target.flat, sent, src=source_rank, group=group.native, async_op=async_op)
        return target.settle(handle, async_op)

    def exchange(
        self,
        sends: Sequence[tuple[Any, int]],
        receives: Sequence[tuple[Any, int]],
        group: Group,
        async_op: bool = False,
    ) -> Work | None:
        """Post all receives and sends, then wait for all."""
        native = _require_peers(group)
        targets = [(_Target(tensor), peer) for tensor, peer in receives]
        steps = [self._distributed.P2POp("irecv", target.flat, peer, native) for target, peer in targets]
        for tensor, peer in sends:
            sent = _carried(tensor)
            _record("send", sent.nbytes, group, sent)
            steps.append(self._distributed.P2POp("isend", sent.reshape(-1), peer, native))
        for target, _ in targets:
            _record("recv", 0, group, target.flat)
        handles = self._distributed.batch_isend_irecv(steps) if steps else []
        work = _Pending(handles, [target.finish for target, _ in targets])
        if async_op:
            return work
        work.wait()
        return None

    def send(self, tensor: Any, peer: int, group: Group, async_op: bool = False) -> Work | None:
        """Send to a global rank."""
        return self.exchange([(tensor, peer)], [], group, async_op)

    def recv(self, tensor: Any, peer: int, group: Group, async_op: bool = False) -> Work | None:
        """Receive in place from a global rank."""
        return self.exchange([], [(tensor, peer)], group, async_op)

    def barrier(self, group: Group) -> None:
        """Wait until all members arrive."""
        if group.native is not None:
            for log in active_logs:
                log.append(CollectiveRecord("barrier", 0, group.size, "", None))
            self._distributed.barrier(group=group.native)


class _Target:
    """Where a result goes: a tensor's own storage, or an array of the host that is filled from a tensor afterwards."""

    def __init__(self, buffer: Any) -> None:
        self._array = buffer if type(buffer) is np.ndarray else None
        tensor = _carried(buffer)
        self._tensor = tensor
        self.flat = tensor.reshape(-1) if tensor.ndim != 1 else tensor
        self._buffer = buffer
        self._divisor = 1

    @property
    def nbytes(self) -> int:
        return int(self.flat.nbytes)

    def take(self, source: Any) -> None:
        """In a group of one rank: a copy."""
        self.flat.copy_(source.reshape(-1))
        self.finish()

    def settle(self, handle: Any, async_op: bool, divisor: int = 1) -> Work | None:
        """The handle of a call that was made, or None once its result is in place."""
        self._divisor = divisor
        if async_op:
            return _Pending([handle], [self.finish])
        self.finish()
        return None

    def finish(self) -> None:
        """Bring the result to where it belongs."""
        if self._divisor != 1:
            self.flat.copy_(self.flat / self._divisor)
        if self._array is not None:
            self._array.reshape(-1)[...] = self.flat.asnumpy()
        elif self._buffer.dtype != self.flat.dtype:
            self._buffer.copy_(self.flat.reshape(self._buffer.shape).astype(self._buffer.dtype))


class _Pending:
    """A handle for calls that end with local steps."""

    __slots__ = ("_after", "_handles")

    def __init__(self, handles: Sequence[Any], after: Sequence[Callable[[], None]]) -> None:
        self._handles, self._after = list(handles), list(after)

    def wait(self) -> None:
        for handle in self._handles:
            if handle is not None:
                handle.wait()
        self._handles = []
        for step in self._after:
            step()
        self._after = []

    def is_completed(self) -> bool:
        """Whether it was waited for: HCCL's handles don't tell before."""
        return not self._handles


def _carried(buffer: Any) -> Any:
    """The buffer as a tensor of a type that HCCL carries: booleans travel as bytes."""
    tensor = as_tensor(buffer)
    return tensor.astype(ms.int8) if tensor.dtype == ms.bool_ else tensor


def _operation(reduce_op: str) -> str:
    return "sum" if reduce_op == "avg" else reduce_op


def _record(kind: str, nbytes: int, group: Group, tensor: Any, reduce_op: str | None = None) -> None:
    if active_logs:
        record = CollectiveRecord(kind, nbytes, group.size, str(tensor.dtype).lower(), reduce_op)
        for log in active_logs:
            log.append(record)


def _require_member(rank: int, group: Group) -> None:
    if rank not in group.ranks:
        raise ProcessGroupError(f"rank {rank} is not in the group of ranks {list(group.ranks)}.")


def _require_peers(group: Group) -> Any:
    if group.native is None:
        raise ProcessGroupError(f"the group of rank {group.ranks[0]} alone has no peer to send to.")
    return group.native
