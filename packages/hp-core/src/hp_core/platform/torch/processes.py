"""The world of processes on torch.distributed: backends, checks before joining, groups made by their members only."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from hp_core.errors import ProcessGroupError
from hp_core.platform.protocol import Group
from hp_core.platform.torch.direct import leave_transports

__all__ = ["BACKEND_OF_DEVICE", "TorchProcesses", "check_backend"]

BACKEND_OF_DEVICE = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
DEFAULT_TIMEOUT = timedelta(minutes=10)


class TorchProcesses:
    """The world of this process, on one device type."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self._timeout: timedelta | None = None

    def init_world(
        self,
        backend: str | None,
        *,
        init_method: str | None,
        world_size: int | None,
        rank: int | None,
        timeout: timedelta | None,
    ) -> None:
        """Check everything that can be checked alone, then join the world."""
        if backend is None:
            own = BACKEND_OF_DEVICE[self.device_type]
            backend = own if self.device_type == "cpu" else f"cpu:gloo,{self.device_type}:{own}"
        else:
            check_backend(backend, torch.cuda.is_available(), importlib.util.find_spec("torch_npu") is not None)
            if "hccl" in backend:
                _load_torch_npu()
        world_size = _agree("world_size", "WORLD_SIZE", world_size)
        rank = _agree("rank", "RANK", rank)
        if not 0 <= rank < world_size:
            raise ProcessGroupError(
                f"rank {rank} is outside the world of {world_size} processes (ranks 0 to {world_size - 1})."
            )
        if init_method is None:
            missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
            if missing:
                raise ProcessGroupError(
                    f"{' and '.join(missing)} not set and no init_method given; launch with torchrun, or pass init_method."
                )
        if dist.is_initialized():
            raise ProcessGroupError(
                f"the process world exists already (rank {dist.get_rank()} of {dist.get_world_size()}); "
                f"call destroy_process_group() before joining another."
            )
        self._timeout = timeout or DEFAULT_TIMEOUT
        dist.init_process_group(
            backend, init_method=init_method, world_size=world_size, rank=rank, timeout=self._timeout
        )

    def destroy_world(self) -> None:
        """Leave the world."""
        leave_transports()
        if dist.is_initialized():
            dist.destroy_process_group()

    def is_initialized(self) -> bool:
        """Whether the world exists."""
        return dist.is_initialized()

    def rank(self) -> int:
        """Global rank; what the launcher says before the world exists, else 0."""
        return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))

    def world_size(self) -> int:
        """Number of processes; what the launcher says before the world exists, else 1."""
        return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))

    def backend(self, group: Group | None) -> str:
        """Name of the communication backend."""
        return str(dist.get_backend(None if group is None else group.native))

    def new_group(self, ranks: tuple[int, ...], own: bool = False) -> Group:
        """A group of these ranks; the whole world is the world's own group, unless one of its own is asked for."""
        if not dist.is_initialized():
            raise ProcessGroupError(
                f"ranks {list(ranks)} should communicate, but there is no process world; call init_process_group() first "
                f"(and launch with torchrun)."
            )
        if len(ranks) == dist.get_world_size() and not own:
            return self.adopt(dist.group.WORLD)
        with _named_by_ranks():
            return self.adopt(dist.new_group(list(ranks), timeout=self._timeout, use_local_synchronization=True))

    def adopt(self, native: Any) -> Group:
        """Our handle of a torch process group."""
        ranks = tuple(dist.get_process_group_ranks(native))
        return Group(ranks, native, frozenset(device.type for device in native._device_types))


@contextmanager
def _named_by_ranks() -> Iterator[None]:
    """Inside, a group made by its members only is named by their ranks, and by nothing else.

    The members meet under the group's name. torch also puts into it how many groups *this* rank has made, on which the
    members disagree as soon as one of them is part of more meshes than another; each would then wait for ever.
    """
    original = getattr(c10d, "_hash_ranks_to_str", None)

    def name(ranks: list[int]) -> str:
        found = hashlib.sha1(f"hp {ranks}".encode(), usedforsecurity=False).hexdigest()
        while found in c10d._world.pg_names.values():  # made before of the same ranks, which all members know
            found += "_"
        return found

    if original is not None:
        c10d._hash_ranks_to_str = name
    try:
        yield
    finally:
        if original is not None:
            c10d._hash_ranks_to_str = original


def check_backend(backend: str, cuda: bool, torch_npu: bool) -> None:
    """Refuse a backend that can't work here, with the remedy.

    Args:
        backend: "gloo", or per device "cpu:gloo,npu:hccl".
        cuda: whether CUDA is available.
        torch_npu: whether the package torch_npu is installed.
    """
    for part in backend.split(","):
        name = part.rpartition(":")[2]
        if name not in BACKEND_OF_DEVICE.values():
            known = ", ".join(f"{b} ({d})" for d, b in BACKEND_OF_DEVICE.items())
            raise ProcessGroupError(
                f"unknown communication backend {name!r}; use one of {known}, or None to take the device's own."
            )
        if name == "hccl" and not torch_npu:
            raise ProcessGroupError(
                "backend 'hccl' needs the package torch_npu, which is not installed. On an Ascend machine: pip install torch-npu, "
                "then `source /usr/local/Ascend/ascend-toolkit/set_env.sh`. On a machine without NPU use backend='gloo'."
            )
        if name == "nccl" and not cuda:
            raise ProcessGroupError(
                "backend 'nccl' needs CUDA, which is not available here; use backend='gloo' on CPU."
            )


def _load_torch_npu() -> None:
    try:
        importlib.import_module("torch_npu")
    except ImportError as error:
        raise ProcessGroupError(
            f"backend 'hccl': torch_npu is installed but can't be imported ({error}). Usually the CANN environment isn't set: "
            f"`source /usr/local/Ascend/ascend-toolkit/set_env.sh` and start again."
        ) from error


def _agree(what: str, variable: str, given: int | None) -> int:
    said = os.environ.get(variable)
    if given is None and said is None:
        raise ProcessGroupError(
            f"{what} is not given and {variable} not set; launch with `torchrun --nproc-per-node N script.py`, or pass {what}=."
        )
    if given is not None and said is not None and int(said) != given:
        raise ProcessGroupError(f"{what}={given} contradicts the launcher's {variable}={said}; drop one of them.")
    return int(said) if given is None and said is not None else int(given)  # type: ignore[arg-type]
