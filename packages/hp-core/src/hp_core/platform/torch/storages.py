"""How many bytes of tensors are alive while some code runs, by what they are: counted, not sampled from the system.

Every storage that an op makes or touches is followed by a weak reference, also inside backwards; storages that are given
memory and freed again under living views (as sharded parameters are) count with what they have at the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

__all__ = ["StorageTracker"]

OTHER = "activations and temporaries"


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, while it is entered.

    ::

        with StorageTracker({"parameters": model.parameters()}) as tracker:
            model(x).sum().backward()
        print(tracker.peak, tracker.at_peak)

    Args:
        labels: tensors by what they are; DTensors by their local tensors. What has no label is told as activations and
            temporaries.

    Attributes:
        peak: most bytes alive at a time, after any op.
        at_peak: those bytes by label.
    """

    def __init__(self, labels: Mapping[str, Iterable[torch.Tensor]] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self.at_peak: dict[str, int] = {}
        self._alive: dict[int, StorageWeakRef] = {}
        self._labels: dict[int, str] = {}
        for label, tensors in (labels or {}).items():
            self.label(label, tensors)

    def label(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        """Tell what some tensors are; they are followed from now on."""
        for tensor in tensors:
            storage = getattr(tensor, "_local", tensor).untyped_storage()
            self._follow(storage)
            self._labels[storage._cdata] = name

    @property
    def bytes_now(self) -> dict[str, int]:
        """Bytes that are alive now, by label."""
        found: dict[str, int] = {}
        for key, reference in list(self._alive.items()):
            if reference.expired():
                del self._alive[key]
                self._labels.pop(key, None)
                continue
            size = _bytes_of(reference)
            if size:
                name = self._labels.get(key, OTHER)
                found[name] = found.get(name, 0) + size
        return found

    def look(self) -> None:
        """Compare what is alive now with the peak."""
        now = self.bytes_now
        total = sum(now.values())
        if total > self.peak:
            self.peak, self.at_peak = total, now

    def _follow(self, storage: Any) -> None:
        key = storage._cdata
        known = self._alive.get(key)
        if known is None or known.expired():
            self._labels.pop(key, None)  # the address belonged to another one
            self._alive[key] = StorageWeakRef(storage)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_iter((args, kwargs, result)):
            if isinstance(value, torch.Tensor) and type(value) in (torch.Tensor, torch.nn.Parameter):
                self._follow(value.untyped_storage())
        self.look()
        return result


def _bytes_of(reference: StorageWeakRef) -> int:
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return 0 if storage is None else int(storage.nbytes())
