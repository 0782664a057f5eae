"""What a graph keeps on torch from forward to backward, moved to the host and back by storages.

Autograd lets its saved tensors be replaced by anything (`torch.autograd.graph.saved_tensors_hooks`): here by an object that knows
where the values are. Nobody else's tensors change: memory is freed where the graph was the last to hold it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from hp_core.errors import PlanError

__all__ = ["TorchSaved"]


class TorchSaved:
    """See `hp_pipeline.platform.protocol.Saved`."""

    def __init__(self) -> None:
        self._staying: set[int] = set()
        self._kept: list[weakref.ref[_Kept]] = []  # the graph owns them, and lets go of each as it passes it

    @property
    def on_host(self) -> int:
        """Bytes on the host."""
        hosts = {id(kept.host): kept.host for kept in self._alive() if kept.host is not None}
        return sum(host.nbytes for host in hosts.values())

    def recording(self) -> AbstractContextManager[None]:
        """What is computed inside is kept here."""
        return saved_tensors_hooks(self._pack, _unpack)

    def stay(self, tensors: Iterable[torch.Tensor]) -> None:
        """These, and all that share memory with them, aren't moved."""
        self._staying.update(_key(tensor) for tensor in tensors if type(tensor) is torch.Tensor)

    def move_out(self) -> None:
        """To the host: each storage once, however many tensors are views of it."""
        groups: dict[int, list[_Kept]] = {}
        for kept in self._alive():
            if kept.movable and kept.tensor is not None and _key(kept.tensor) not in self._staying:
                kept.check()
                groups.setdefault(_key(kept.tensor), []).append(kept)
        for group in groups.values():
            first = group[0].tensor
            assert first is not None
            host = _bytes_of(first).to("cpu", copy=True)
            for kept in group:
                kept.host, kept.tensor = host, None

    def move_in(self) -> None:
        """To where each was: with the offsets and strides that it had, and again sharing memory."""
        back: dict[int, torch.UntypedStorage] = {}
        for kept in self._alive():
            if kept.host is not None:
                if id(kept.host) not in back:
                    back[id(kept.host)] = kept.host.to(kept.device, copy=True).untyped_storage()
                kept.restore(back[id(kept.host)])

    def _alive(self) -> list[_Kept]:
        return [kept for reference in self._kept if (kept := reference()) is not None]

    def _pack(self, tensor: torch.Tensor) -> Any:
        if not isinstance(tensor, torch.nn.Parameter) and type(tensor) is not torch.Tensor:
            return tensor.detach()  # of a wrapper class; as it is it would hold the graph that holds it
        base = tensor if tensor._base is None else tensor._base
        weight = isinstance(base, torch.nn.Parameter)
        kept = _Kept(tensor, not weight and tensor.layout == torch.strided and tensor.numel() > 0)
        self._kept.append(weakref.ref(kept))
        return kept


class _Kept:
    """A saved tensor: here, or on the host.

    Attributes:
        tensor: it, if it is here.
        host: the bytes of its whole storage, if it is there.
        device: where it is at home.
        movable: whether it may leave; weights and what shares their memory don't.
    """

    __slots__ = ("__weakref__", "_version", "_view", "device", "host", "movable", "tensor")

    def __init__(self, tensor: torch.Tensor, movable: bool) -> None:
        self.movable = movable
        self.tensor: torch.Tensor | None = tensor.detach()  # of the same version counter
        self.host: torch.Tensor | None = None
        self.device = tensor.device
        self._version = tensor._version
        self._view = (tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()) if movable else None

    def check(self) -> None:
        """Autograd leaves it to hooks to see that nobody has changed a tensor in place."""
        if self.tensor is not None and self.tensor._version != self._version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.tensor.shape)} that is needed for a gradient has been modified by an inplace "
                f"operation: it is at version {self.tensor._version}, but version {self._version} was saved. Change a copy of it."
            )

    def restore(self, storage: torch.UntypedStorage) -> None:
        """It is here again, in this storage."""
        assert self._view is not None
        dtype, offset, size, stride = self._view
        self.tensor = torch.empty(0, dtype=dtype, device=self.device).set_(storage, offset, size, stride)
        self.host, self._version = None, self.tensor._version


def _unpack(kept: Any) -> torch.Tensor:
    if not isinstance(kept, _Kept):
        tensor: torch.Tensor = kept
        return tensor
    kept.check()
    if kept.tensor is None:
        raise PlanError("activations that a backward needs are on the host; a SWAP_IN step brings them back before it.")
    return kept.tensor


def _key(tensor: torch.Tensor) -> int:
    """Of the storage: its identity, as long as somebody holds it."""
    key: int = tensor.untyped_storage()._cdata
    return key


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
