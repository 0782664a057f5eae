"""Norms of gradients on torch: see `hp_fsdp.platform.norms.NormTools`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import inf, isfinite
from typing import Any

import torch

from hp_core.dtensor.api import DTensorMethods
from hp_core.layout import Layout

__all__ = ["TorchNormTools"]

_WIDTH = 1 << 10
"""Elements of which the CPU takes one norm. It adds float32 numbers up one after another, and what is added to a large sum
gets lost: over 2**26 equal elements, 0.5% of the norm.
"""
_BLOCK = 1 << 24
_HALF_BLOCK = 1 << 18
"""Elements of which the CPU has the norms of all pieces at a time; of half precision also a copy in float32."""
_HALVES = (torch.float16, torch.bfloat16)


class TorchNormTools:
    """See `hp_fsdp.platform.norms.NormTools`."""

    def layout(self, parameter: Any) -> Layout | None:
        """The layout of the gradient, by the law of gradients."""
        if _is_native(parameter):
            parameter = DTensorMethods.from_torch(parameter.detach())
        return parameter.layout.gradient if isinstance(parameter, DTensorMethods) else None

    def gradient(self, parameter: Any) -> torch.Tensor | None:
        """The local gradient; of torch's own DTensor it may be pending, or laid out unlike the parameter."""
        if isinstance(parameter, DTensorMethods):
            local: torch.Tensor | None = parameter._local.grad
            return local
        gradient: torch.Tensor | None = parameter.grad
        if gradient is None or not _is_native(gradient):
            return gradient
        with torch.no_grad():
            given = DTensorMethods.from_torch(gradient)
            wanted: Any = given.redistribute(self.layout(parameter))
            if wanted is not given:
                parameter.grad = wanted.to_torch()
        return wanted._local  # type: ignore[no-any-return]

    def is_wide(self, parameter: torch.Tensor) -> bool:
        """Whether it is float64 or complex128."""
        return parameter.dtype in (torch.float64, torch.complex128)

    @torch.no_grad()
    def merged(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs of neighbours, found by their storages and offsets; room between them is left alone: it may be others'."""
        result: list[torch.Tensor] = []
        flat: list[tuple[int, torch.dtype, int, torch.Tensor]] = []
        for tensor in tensors:
            if not tensor.numel():
                continue
            if tensor.is_contiguous() and not tensor.is_sparse:
                flat.append((tensor.untyped_storage()._cdata, tensor.dtype, int(tensor.storage_offset()), tensor))
            else:
                result.append(tensor)
        flat.sort(key=lambda entry: (entry[0], str(entry[1]), entry[2]))
        first = 0
        for index, (storage, dtype, offset, tensor) in enumerate(flat, 1):
            end = offset + tensor.numel()
            if index < len(flat) and flat[index][:3] == (storage, dtype, end):
                continue
            begin = flat[first][2]
            result.append(tensor if first == index - 1 else tensor.as_strided((end - begin,), (1,), begin))
            first = index
        return result

    def slots(self, count: int, device_type: str) -> torch.Tensor:
        """Float64 zeros; float32 on an NPU, whose collectives don't carry more."""
        return torch.zeros(count, dtype=torch.float32 if device_type == "npu" else torch.float64, device=device_type)

    @torch.no_grad()
    def add_powers(
        self, slots: torch.Tensor, slot: int, tensors: Sequence[torch.Tensor], order: float, weight: float
    ) -> None:
        """Norms of pieces, accumulated in float32 or wider, then their powers in the type of `slots`."""
        norms = [norm.to(slots.device, slots.dtype) for norm in _norms(tensors, order)]
        if not norms:
            return
        norm = torch.cat(norms)
        if order == inf:
            slots[slot] = torch.maximum(slots[slot], norm.amax())
        else:
            slots[slot] += norm.pow_(order).sum() * weight

    @torch.no_grad()
    def total(self, slots: Sequence[torch.Tensor], order: float, wide: bool) -> torch.Tensor:
        """The root of the sum, or the maximum."""
        powers = slots[0] if len(slots) == 1 else torch.stack([one.to(slots[0].device) for one in slots])
        norm = powers.amax() if order == inf else powers.sum().pow(1.0 / order)
        return norm.to(torch.float64 if wide else torch.float32)

    def is_finite(self, total: torch.Tensor) -> bool:
        """Whether the number is neither infinite nor NaN."""
        return isfinite(total.item())

    @torch.no_grad()
    def clip(self, tensors: Sequence[torch.Tensor], max_norm: float, total: torch.Tensor) -> None:
        """One call per device and element type; a coefficient that the CPU knows to be one saves the pass."""
        coefficient = (max_norm / (total + 1e-6)).clamp(max=1.0)
        if coefficient.is_cpu and coefficient.item() == 1.0:
            return
        groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for tensor in tensors:
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        for (device, _), group in groups.items():
            torch._foreach_mul_(group, coefficient.to(device))


def _is_native(value: Any) -> bool:
    """Whether it is one of torch's own DTensors, of which there are none before their module was loaded."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _norms(tensors: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
    """Norms of pieces of the tensors, each list 1-D: their powers add up."""
    result: list[torch.Tensor] = []
    lists: dict[tuple[torch.device, bool], list[torch.Tensor]] = {}
    for tensor in tensors:
        half = tensor.dtype in _HALVES
        if tensor.is_cpu and tensor.is_contiguous() and tensor.numel() > _WIDTH:
            flat = tensor.view(-1)
            even = flat.numel() // _WIDTH * _WIDTH
            for block in flat[:even].split(_HALF_BLOCK if half else _BLOCK):
                norms = torch.linalg.vector_norm(
                    block.view(-1, _WIDTH), order, dim=1, dtype=torch.float32 if half else None
                )
                result.append(torch.linalg.vector_norm(norms.double(), order).view(1))
            tensor = flat[even:]
        if tensor.numel():
            lists.setdefault((tensor.device, half), []).append(tensor)
    for (_, half), group in lists.items():
        result.append(torch.stack(torch._foreach_norm(group, order, dtype=torch.float32 if half else None)))
    return result
