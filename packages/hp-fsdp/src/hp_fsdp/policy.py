"""What `fully_shard` is told about element types and where shards live: small immutable values."""

from __future__ import annotations

from dataclasses import dataclass

from hp_core.platform.protocol import DType

__all__ = ["CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy", "UnitOptions"]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Element types of a unit; shards, gradients of shards and optimizer states keep the parameters' own.

    Attributes:
        param_dtype: in which parameters are gathered and the module computes; None: their own.
        reduce_dtype: in which gradients are accumulated over micro-batches and reduced; None: `param_dtype`.
        output_dtype: to which floating-point outputs are cast; None: as they are.
        cast_forward_inputs: whether floating-point inputs are cast to `param_dtype`. Integers, booleans and whatever isn't
            a tensor are left as they are, and containers keep their structure.
    """

    param_dtype: DType | None = None
    reduce_dtype: DType | None = None
    output_dtype: DType | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class OffloadPolicy:
    """Shards stay on the device: the default."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, their gradients and the optimizer's states live in the host's memory; parameters are gathered on the device.

    Attributes:
        pin_memory: whether the host's memory is pinned, so that copies run beside the computation.
    """

    pin_memory: bool = True


@dataclass(frozen=True)
class UnitOptions:
    """What a `fully_shard` call decides for good.

    Attributes:
        precision: element types.
        offload: where shards live, if not on the device.
        max_padding: how much padding is accepted, as a multiple of the unit's elements; None: what seems sensible.
        overlap: whether communication runs beside the computation.
    """

    precision: MixedPrecisionPolicy = MixedPrecisionPolicy()
    offload: CPUOffloadPolicy | None = None
    max_padding: float | None = None
    overlap: bool = True
