"""New DTensors: `zeros`, `ones`, `empty`, `full`, `rand`, `randn`, `randint`. Nothing is communicated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hp_core.dtensor.api import DTensorMethods
from hp_core.dtensor.distribute import mesh_or_current
from hp_core.layout import Layout, layout_of
from hp_core.mesh import DeviceMesh
from hp_core.placement import Placement
from hp_core.platform import get_platform
from hp_core.platform.protocol import DType, Tensor
from hp_core.random import random_integers, random_like
from hp_core.redistribute import program_for

if TYPE_CHECKING:
    from hp_core.dtensor.api import DTensor

__all__ = ["empty", "full", "ones", "rand", "randint", "randn", "zeros"]

Where = Layout | DeviceMesh | None
Placements = Sequence[Placement] | None


def zeros(
    *size: Any,
    dtype: DType = None,
    layout: Where = None,
    device_mesh: Where = None,
    placements: Placements = None,
    requires_grad: bool = False,
) -> DTensor:
    """A DTensor of zeros.

    Args:
        *size: the global shape, as integers or as one sequence.
        dtype: element type; default the framework's.
        layout: a Layout; or give `device_mesh` (default: the current one) with `placements`.
        device_mesh: the mesh.
        placements: one per mesh axis; default replicated.
        requires_grad: whether gradients are wanted.
    """
    return full(
        size, 0, dtype=dtype, layout=layout, device_mesh=device_mesh, placements=placements, requires_grad=requires_grad
    )


def ones(
    *size: Any,
    dtype: DType = None,
    layout: Where = None,
    device_mesh: Where = None,
    placements: Placements = None,
    requires_grad: bool = False,
) -> DTensor:
    """A DTensor of ones; arguments as for `zeros`."""
    return full(
        size, 1, dtype=dtype, layout=layout, device_mesh=device_mesh, placements=placements, requires_grad=requires_grad
    )


def empty(
    *size: Any,
    dtype: DType = None,
    layout: Where = None,
    device_mesh: Where = None,
    placements: Placements = None,
    requires_grad: bool = False,
) -> DTensor:
    """An uninitialised DTensor; arguments as for `zeros`."""
    target, shape = _target(size, layout, device_mesh, placements)
    return _finish(_new(target, shape, dtype), target, target, shape, requires_grad)


def full(
    size: Any,
    fill_value: Any,
    *,
    dtype: DType = None,
    layout: Where = None,
    device_mesh: Where = None,
    placements: Placements = None,
    requires_grad: bool = False,
) -> DTensor:
    """A DTensor filled with one value; `size` is the global shape, the rest as for `zeros`."""
    target, shape = _target(size, layout, device_mesh, placements)
    local = get_platform().tensors.full(target.local_shape(shape), fill_value, dtype, target.mesh.device_type)
    return _finish(local, target.gradient, target, shape, requires_grad)


def rand(
    *size: Any,
    dtype: DType = None,
    layout: Where = None,
    device_mesh: Where = None,
    placements: Placements = None,
    requires_grad: bool = False,
) -> DTensor:
    """A DTensor uniform in [0, 1), the same global values for every layout and world size; arguments as for `zeros`."""
    return _random("uniform", size, dtype, layout, device_mesh, placements, requires_grad)


def randn(
    *size: Any,
    dtype: DType = None,
    layout: Where = None,
    device_mesh: Where = None,
    placements: Placements = None,
    requires_grad: bool = False,
) -> DTensor:
    """A standard normal DTensor, the same global values for every layout and world size; arguments as for `zeros`."""
    return _random("normal", size, dtype, layout, device_mesh, placements, requires_grad)


def randint(
    low: int,
    high: int,
    size: Any,
    *,
    dtype: DType = None,
    layout: Where = None,
    device_mesh: Where = None,
    placements: Placements = None,
) -> DTensor:
    """A DTensor of integers in [low, high), the same global values for every layout and world size.

    Args:
        low: the least integer.
        high: one past the greatest.
        size: the global shape.
        dtype: element type; default 64-bit integers.
        layout: as for `zeros`, like the rest.
        device_mesh: the mesh.
        placements: one per mesh axis; default replicated.

    Raises:
        ShardingRuleError: the interval is empty.
    """
    target, shape = _target(size, layout, device_mesh, placements)
    dtype = get_platform().tensors.dtype_of_name("int64") if dtype is None else dtype
    local = random_integers(_new(target, shape, dtype), target, shape, low, high)
    return _finish(local, target.gradient, target, shape, False)


def _random(
    kind: str, size: Any, dtype: DType, layout: Where, device_mesh: Where, placements: Placements, requires_grad: bool
) -> DTensor:
    target, shape = _target(size, layout, device_mesh, placements)
    local = random_like(_new(target, shape, dtype), target, shape, kind)
    return _finish(local, target.gradient, target, shape, requires_grad)


def _target(size: Any, layout: Where, device_mesh: Where, placements: Placements) -> tuple[Layout, tuple[int, ...]]:
    sizes = size if isinstance(size, Sequence) else (size,)
    shape = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], Sequence) else tuple(sizes)
    where = mesh_or_current(layout if layout is not None else device_mesh)
    target = layout_of(where, placements, len(shape))
    target.check_shape(shape)
    return target, shape


def _new(target: Layout, shape: tuple[int, ...], dtype: DType) -> Tensor:
    return get_platform().tensors.full(target.local_shape(shape), None, dtype, target.mesh.device_type)


def _finish(local: Tensor, have: Layout, target: Layout, shape: tuple[int, ...], requires_grad: bool) -> DTensor:
    tensors = get_platform().tensors
    if have is not target:
        local = program_for(have, target, shape, tensors.itemsize(tensors.dtype(local)))(local)
    result = DTensorMethods.from_local(local, target, shape=shape)
    if requires_grad:
        result.requires_grad_(True)
    return result
