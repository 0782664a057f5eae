"""What torch's DTensor communicates: a dispatch mode that counts functional collectives and their bytes on the wire.

Bytes are what one rank sends, by the same ring formulas as in `hp_core.platform.recorder`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.tensor import placement_types
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchCollectiveCount", "all_to_all_as_one", "fake_world"]


_LOCAL = frozenset({"wait_tensor", "_wrap_tensor_autograd"})
"""Ops beside the collectives that send nothing."""


class TorchCollectiveCount(TorchDispatchMode):
    """Counts the collectives that torch's DTensor calls inside the block.

    Attributes:
        messages: number of collectives.
        nbytes: bytes that this rank sends.
        nbytes_on_cpu: the same, if every all-to-all is a gather of which a part is kept.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.messages = 0
        self.nbytes = 0
        self.nbytes_on_cpu = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        kind = name.partition("::")[2]
        if name.startswith(("_c10d_functional", "_dtensor::shard_dim_alltoall")) and kind not in _LOCAL:
            self.add(kind, args, result)
        elif name.startswith("c10d::"):
            raise NotImplementedError(f"{name} isn't a functional collective; its bytes aren't counted")
        return result

    def add(self, kind: str, args: Any, result: torch.Tensor) -> None:
        """Count one collective by its arguments and its result."""
        source = args[0]
        sent_on_cpu = None
        if kind == "all_gather_into_tensor":
            sent = result.nbytes - source.nbytes
        elif kind == "reduce_scatter_tensor":
            sent = source.nbytes - result.nbytes
        elif kind in ("all_reduce", "all_reduce_"):
            size = _resolve_process_group(args[2]).size()
            sent = -(-2 * (size - 1) * source.nbytes // size)
        elif kind == "shard_dim_alltoall":
            size = _resolve_process_group(args[3]).size()
            sent_on_cpu = (size - 1) * source.nbytes
            sent = sent_on_cpu // size
        else:
            raise NotImplementedError(f"the bytes of torch's {kind} aren't known")
        self.messages += 1
        self.nbytes += sent
        self.nbytes_on_cpu += sent if sent_on_cpu is None else sent_on_cpu


@contextmanager
def all_to_all_as_one() -> Iterator[None]:
    """Let torch move a cut from one dim to another by one all-to-all, as it does on accelerators.

    On a CPU mesh it gathers the whole and keeps a part, which gloo no longer makes necessary. Only for counting, under
    `fake_world`: the values are wrong.
    """

    def exchange(source: torch.Tensor, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int) -> torch.Tensor:
        group = mesh.get_group(mesh_dim)
        for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
            if isinstance(mode, TorchCollectiveCount):
                mode.add("shard_dim_alltoall", (source, gather_dim, shard_dim, group.group_name), source)
        whole = torch.cat([source] * group.size(), dim=gather_dim)
        return whole.narrow(shard_dim, 0, whole.size(shard_dim) // group.size()).contiguous()

    with mock.patch.object(placement_types, "shard_dim_alltoall", exchange):
        yield


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    """This process as rank 0 of a world that only pretends to communicate.

    What torch remembers of it must not meet a real world: use it in a process that has none.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "fake_world() would take the place of this process's real group; call it in a process without one"
        )
    # torch advises to flatten meshes even where that can't help, once per transition
    advice = logging.getLogger("torch.distributed.tensor._redistribute")
    was_disabled, advice.disabled = advice.disabled, True
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        advice.disabled = was_disabled
        dist.destroy_process_group()
