"""The one door of communication on torch: every collective and point-to-point call goes through `TorchCollectives`.

It calls the process group's own methods (torch.distributed's wrappers cost more than a small gloo collective's share of
them), records each call, carries element types that a backend can't, and turns timeouts into errors that name the peers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from hp_core.errors import CommTimeoutError, ProcessGroupError
from hp_core.platform.protocol import Group, Work
from hp_core.platform.recorder import CollectiveRecord, active_logs
from hp_core.platform.torch.direct import direct_all_gather, direct_reduce_scatter, direct_transport
from hp_core.platform.torch.ordered_bits import from_ordered_bits, ordered_bits

__all__ = ["TorchCollectives"]

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_GATHER_OPTIONS = AllgatherOptions()
_ALL_TO_ALL_OPTIONS = AllToAllOptions()
_ALL_REDUCE_OPTIONS: dict[str, Any] = {}
_REDUCE_SCATTER_OPTIONS: dict[str, Any] = {}
for _name, _op in _REDUCE_OPS.items():
    _ALL_REDUCE_OPTIONS[_name] = AllreduceOptions()
    _ALL_REDUCE_OPTIONS[_name].reduceOp = _op
    _REDUCE_SCATTER_OPTIONS[_name] = ReduceScatterOptions()
    _REDUCE_SCATTER_OPTIONS[_name].reduceOp = _op

_EVERYWHERE = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8}
)
"""Element types that every backend carries; others travel as bytes, or are widened for a reduction."""


class TorchCollectives:
    """See `hp_core.platform.protocol.Collectives`."""

    def all_gather(
        self, output: torch.Tensor, source: torch.Tensor, group: Group, async_op: bool = False
    ) -> Work | None:
        """Concatenate every member's source."""
        native = group.native
        if native is None:
            output.view(-1).copy_(source.reshape(-1))
            return None
        if source.device.type not in group.devices:
            _refuse_device(source, group)
        if active_logs:
            _record("all_gather", (group.size - 1) * source.nbytes, group, source)
        if source.dtype not in _EVERYWHERE:
            output, source = _as_bytes(output), _as_bytes(source)
        elif output.shape[1:] != source.shape[1:] or not source.dim():
            output, source = output.view(-1), source.view(-1)
        transport = direct_transport(group) if source.is_cpu else None
        if transport is not None and source.is_contiguous() and output.is_contiguous():
            work = direct_all_gather(transport, output, source)
        else:
            work = native._allgather_base(output, source, _GATHER_OPTIONS)
        return _finish(work, "all_gather", group, async_op)

    def reduce_scatter(
        self, output: torch.Tensor, source: torch.Tensor, reduce_op: str, group: Group, async_op: bool = False
    ) -> Work | None:
        """Reduce, and keep an equal share."""
        native = group.native
        if native is None:
            output.view(-1).copy_(source.reshape(-1))
            return None
        if source.device.type not in group.devices:
            _refuse_device(source, group)
        if active_logs:
            _record("reduce_scatter", (group.size - 1) * output.nbytes, group, source, reduce_op)
        transport = direct_transport(group) if source.is_cpu and reduce_op in ("sum", "avg") else None
        if transport is not None and source.dtype in _EVERYWHERE and source.is_contiguous() and output.is_contiguous():
            work = direct_reduce_scatter(transport, output, source, reduce_op)
            return _finish(work, "reduce_scatter", group, async_op)
        wide, wide_output, after = _reducible(source, reduce_op, group, output)
        if wide.shape[1:] != wide_output.shape[1:] or not wide_output.dim():
            wide, wide_output = wide.view(-1), wide_output.view(-1)
        work = native._reduce_scatter_base(
            wide_output, wide, _REDUCE_SCATTER_OPTIONS["sum" if reduce_op == "avg" else reduce_op]
        )
        return _finish(work, "reduce_scatter", group, async_op, after)

    def all_reduce(self, tensor: torch.Tensor, reduce_op: str, group: Group, async_op: bool = False) -> Work | None:
        """Reduce in place."""
        native = group.native
        if native is None:
            return None
        if tensor.device.type not in group.devices:
            _refuse_device(tensor, group)
        if active_logs:
            _record("all_reduce", -(-2 * (group.size - 1) * tensor.nbytes // group.size), group, tensor, reduce_op)
        wide, _, after = _reducible(tensor, reduce_op, group, tensor)
        work = native.allreduce([wide], _ALL_REDUCE_OPTIONS["sum" if reduce_op == "avg" else reduce_op])
        return _finish(work, "all_reduce", group, async_op, after)

    def all_to_all(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: Sequence[int],
        source_splits: Sequence[int],
        group: Group,
        async_op: bool = False,
    ) -> Work | None:
        """Exchange 1-D pieces."""
        native = group.native
        if native is None:
            output.copy_(source)
            return None
        if source.device.type not in group.devices:
            _refuse_device(source, group)
        if active_logs:
            own = source_splits[group.ranks.index(dist.get_rank())] if source_splits else source.numel() // group.size
            _record("all_to_all", (source.numel() - own) * source.element_size(), group, source)
        if source.dtype not in _EVERYWHERE:
            width = source.element_size()
            output, source = _as_bytes(output), _as_bytes(source)
            output_splits = [width * count for count in output_splits]
            source_splits = [width * count for count in source_splits]
        work = native.alltoall_base(output, source, list(output_splits), list(source_splits), _ALL_TO_ALL_OPTIONS)
        return _finish(work, "all_to_all", group, async_op)

    def broadcast(self, tensor: torch.Tensor, source_rank: int, group: Group, async_op: bool = False) -> Work | None:
        """Copy in place from a global rank."""
        native = group.native
        if native is None:
            return None
        if tensor.device.type not in group.devices:
            _refuse_device(tensor, group)
        root = _position(source_rank, group)
        if active_logs:
            sent = (group.size - 1) * tensor.nbytes if dist.get_rank() == source_rank else 0
            _record("broadcast", sent, group, tensor)
        options = BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        carried = tensor if tensor.dtype in _EVERYWHERE else _as_bytes(tensor)
        return _finish(native.broadcast([carried], options), "broadcast", group, async_op)

    def scatter(
        self,
        output: torch.Tensor,
        pieces: Sequence[torch.Tensor] | None,
        source_rank: int,
        group: Group,
        async_op: bool = False,
    ) -> Work | None:
        """Give each member one piece of the source rank's."""
        native = group.native
        if native is None:
            assert pieces is not None
            output.copy_(pieces[0])
            return None
        if output.device.type not in group.devices:
            _refuse_device(output, group)
        options = ScatterOptions()
        options.rootRank = _position(source_rank, group)
        sends: list[list[torch.Tensor]] = [] if pieces is None else [list(pieces)]
        if active_logs:
            _record("scatter", 0 if pieces is None else (group.size - 1) * output.nbytes, group, output)
        if output.dtype not in _EVERYWHERE:
            output, sends = _as_bytes(output), [[_as_bytes(piece) for piece in rank] for rank in sends]
        return _finish(native.scatter([output], sends, options), "scatter", group, async_op)

    def send(self, tensor: torch.Tensor, peer: int, group: Group, async_op: bool = False) -> Work | None:
        """Send to a global rank."""
        if active_logs:
            _record("send", tensor.nbytes, group, tensor)
        carried = tensor if tensor.dtype in _EVERYWHERE else _as_bytes(tensor)
        return _finish(
            _require(group, tensor).send([carried], _position(peer, group), 0), f"send to {peer}", group, async_op
        )

    def recv(self, tensor: torch.Tensor, peer: int, group: Group, async_op: bool = False) -> Work | None:
        """Receive in place from a global rank."""
        if active_logs:
            _record("recv", 0, group, tensor)
        carried = tensor if tensor.dtype in _EVERYWHERE else _as_bytes(tensor)
        return _finish(
            _require(group, tensor).recv([carried], _position(peer, group), 0), f"receive from {peer}", group, async_op
        )

    def exchange(
        self,
        sends: Sequence[tuple[torch.Tensor, int]],
        receives: Sequence[tuple[torch.Tensor, int]],
        group: Group,
        async_op: bool = False,
    ) -> Work | None:
        """Post all receives and sends, then wait for all."""
        posted = [self.recv(tensor, peer, group, async_op=True) for tensor, peer in receives]
        posted += [self.send(tensor, peer, group, async_op=True) for tensor, peer in sends]
        works = _All([work for work in posted if work is not None])
        if async_op:
            return works
        works.wait()
        return None

    def barrier(self, group: Group) -> None:
        """Wait until all members arrive."""
        if group.native is not None:
            if active_logs:
                active_logs[-1].append(CollectiveRecord("barrier", 0, group.size, "", None))
            _finish(group.native.barrier(BarrierOptions()), "barrier", group, False)


def _refuse_device(tensor: torch.Tensor, group: Group) -> None:
    """Refuse a tensor on a device that the group's backend can't carry, with the remedy."""
    device = tensor.device.type
    remedy = {
        "npu": "call init_process_group(backend='hccl') (or 'cpu:gloo,npu:hccl' to carry both)",
        "cuda": "call init_process_group(backend='nccl') (or 'cpu:gloo,cuda:nccl' to carry both)",
        "cpu": "call init_process_group(backend=None), which also carries CPU tensors over gloo",
    }.get(device, "materialise it on a device first")
    raise ProcessGroupError(
        f"a tensor of shape {tuple(tensor.shape)} on device {device!r} can't travel over the group of ranks "
        f"{list(group.ranks)} (backend {dist.get_backend(group.native)!r} carries {sorted(group.devices)}); {remedy}, "
        f"or move the tensor."
    )


class _Pending:
    """A handle that ends with a local step, or that names the peers when it times out."""

    __slots__ = ("_after", "_group", "_kind", "_work")

    def __init__(self, work: Any, kind: str, group: Group, after: Callable[[], None] | None) -> None:
        self._work, self._kind, self._group, self._after = work, kind, group, after

    def wait(self, timeout: float | None = None) -> None:
        """Wait, at most `timeout` seconds (default: as long as the group does)."""
        _wait(self._work, self._kind, self._group, timeout)
        if self._after is not None:
            self._after()
            self._after = None

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


class _All:
    """One handle for several."""

    __slots__ = ("_works",)

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _finish(work: Any, kind: str, group: Group, async_op: bool, after: Callable[[], None] | None = None) -> Work | None:
    if async_op:
        return _Pending(work, kind, group, after)
    _wait(work, kind, group)
    if after is not None:
        after()
    return None


def _wait(work: Any, kind: str, group: Group, timeout: float | None = None) -> None:
    try:
        if timeout is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=timeout))
    except RuntimeError as error:
        text = str(error)
        if "imed out" in text or "imeout" in text:
            raise CommTimeoutError(
                f"rank {dist.get_rank()} waited in {kind} for ranks {list(group.ranks)} until the timeout; one of them didn't "
                f"arrive. Look at what those ranks did last, or raise timeout= of init_process_group. ({text.splitlines()[0]})"
            ) from error
        if "onnection" in text:
            raise ProcessGroupError(
                f"rank {dist.get_rank()} lost a peer in {kind} among ranks {list(group.ranks)}; one of them has ended. "
                f"({text.splitlines()[0]})"
            ) from error
        raise


def _record(kind: str, nbytes: int, group: Group, tensor: torch.Tensor, reduce_op: str | None = None) -> None:
    record = CollectiveRecord(kind, nbytes, group.size, str(tensor.dtype).removeprefix("torch."), reduce_op)
    for log in active_logs:
        log.append(record)


def _reducible(
    source: torch.Tensor, reduce_op: str, group: Group, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Callable[[], None] | None]:
    """What to hand to the backend, where its result goes, and what to do after."""
    average = (lambda: output.div_(group.size)) if reduce_op == "avg" else None
    if source.is_floating_point() and reduce_op in ("max", "min"):
        bits = ordered_bits(source, reduce_op)
        bits_output = bits if output is source else bits.new_empty(output.shape)
        return bits, bits_output, lambda: output.copy_(from_ordered_bits(bits_output))  # type: ignore[return-value]
    if source.dtype in _EVERYWHERE:
        return source, output, average  # type: ignore[return-value]
    if source.is_complex() and reduce_op in ("sum", "avg"):
        return torch.view_as_real(source), torch.view_as_real(output), average  # type: ignore[return-value]
    # bool, int16 and the like: widen, reduce, and narrow again
    wide = source.to(torch.int32)
    wide_output = wide if output is source else wide.new_empty(output.shape)
    return wide, wide_output, lambda: output.copy_(wide_output)  # type: ignore[return-value]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _position(rank: int, group: Group) -> int:
    if rank not in group.ranks:
        raise ProcessGroupError(f"rank {rank} is not in the group of ranks {list(group.ranks)}.")
    return group.ranks.index(rank)


def _require(group: Group, tensor: torch.Tensor) -> Any:
    """The native group of a point-to-point call."""
    if group.native is None:
        raise ProcessGroupError(f"the group of rank {group.ranks[0]} alone has no peer to send to.")
    if tensor.device.type not in group.devices:
        _refuse_device(tensor, group)
    return group.native
