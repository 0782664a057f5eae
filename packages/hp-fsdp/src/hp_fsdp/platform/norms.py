"""What clipping needs of a framework: local gradients, sums of powers over flat storage, and scaling in place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

from hp_core.errors import PlatformError
from hp_core.layout import Layout
from hp_core.platform import get_platform
from hp_core.platform.protocol import Tensor

__all__ = ["NormTools", "get_norm_tools"]


class NormTools(Protocol):
    """Norms of gradients. Nothing here is recorded for gradients, and nothing waits for the device."""

    def layout(self, parameter: Any) -> Layout | None:
        """How the gradient of a distributed parameter lies, ours or the framework's own; None for a plain one."""

    def gradient(self, parameter: Any) -> Tensor | None:
        """The local tensor of its gradient, if it has one; a pending sum is done first."""

    def is_wide(self, parameter: Any) -> bool:
        """Whether its element type has more than 32 bits per real number."""

    def merged(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors that are neighbours in one storage as one 1-D tensor on it, others as they are; those without elements not."""

    def slots(self, count: int, device_type: str) -> Tensor:
        """Zeros to add up in, of the widest element type that the device has."""

    def add_powers(self, slots: Tensor, slot: int, tensors: Sequence[Tensor], order: float, weight: float) -> None:
        """Add the weighted sum of all elements' absolute values to the power `order`; for infinity take the maximum."""

    def total(self, slots: Sequence[Tensor], order: float, wide: bool) -> Tensor:
        """The norm of which slots hold the powers: 0-dim, float32, or float64 if `wide`."""

    def is_finite(self, total: Tensor) -> bool:
        """Whether the number is finite; waits for the device."""

    def clip(self, tensors: Sequence[Tensor], max_norm: float, total: Tensor) -> None:
        """Multiply in place by `max_norm / (total + 1e-6)`, if that is less than one."""


@lru_cache(maxsize=1)
def get_norm_tools() -> NormTools:
    """Those of the framework in use.

    Raises:
        PlatformError: hp-fsdp doesn't support it.
    """
    name = get_platform().name
    if name != "torch":
        raise PlatformError(
            f"hp-fsdp clips gradients of torch; the platform in use is {name!r}. Set HYPER_PARALLEL_PLATFORM=torch."
        )
    from hp_fsdp.platform.torch.norms import TorchNormTools

    return TorchNormTools()
