"""What a rank holds of dense values, in each layout: operands with pending parts that differ, and the gradients by the law."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_core.dtensor.api import DTensorMethods
from hp_core.layout import Layout
from hp_core.mesh import DeviceMesh
from hp_core.platform import get_platform
from hp_core.platform.protocol import Tensor

__all__ = ["fresh_input", "gradient_part", "local_part", "own_part", "partners", "plain", "reduced"]


def fresh_input(value: Tensor, layout: Layout | None, shape: tuple[int, ...]) -> Any:
    """A copy outside of any graph: a DTensor in this layout, or the dense tensor."""
    tensor: Any = get_platform().tensors.clone(value)
    return tensor if layout is None else DTensorMethods.from_local(tensor, layout, shape=shape)


def plain(value: Any) -> Any:
    """The local tensor of a DTensor; what else is given, itself."""
    return value.to_local() if isinstance(value, DTensorMethods) else value


def own_part(value: Tensor, layout: Layout) -> Tensor:
    """A copy of what this rank holds of a value; pending reductions count as done."""
    tensors = get_platform().tensors
    return tensors.clone(tensors.crop(value, layout.bounds(tuple(value.shape))))


def local_part(value: Tensor, layout: Layout) -> Tensor:
    """This rank's part of a value; where a reduction is pending, unequal parts that give it."""
    tools = get_platform().op_samples()
    dtype = get_platform().tensors.dtype(value)
    coordinate = layout.mesh.require_coordinate(None)
    for axis, reduce_op in layout.partials:
        noise = tools.noise(value, axis)
        if reduce_op == "sum":
            value = 3 * value + noise if coordinate[axis] == 0 else -2 * value - noise
        elif reduce_op == "avg":
            value = 3 * value + noise if coordinate[axis] == 0 else -value - noise
        else:
            below = (1 - _holds_extremum(value, axis, coordinate[axis])) * (1 + abs(noise))
            value = value - below if reduce_op == "max" else value + below
    return own_part(get_platform().tensors.cast(value, dtype), layout)


def gradient_part(gradient: Tensor, layout: Layout) -> Tensor:
    """This rank's part of the gradient of an operand laid out so.

    By a pending average or extremum it is the derivative by the local part: its share of the dense gradient.
    """
    dtype = get_platform().tensors.dtype(gradient)
    coordinate = layout.mesh.require_coordinate(None)
    for axis, reduce_op in layout.partials:
        if reduce_op == "avg":
            gradient = gradient / layout.mesh.shape[axis]
        elif reduce_op in ("max", "min"):
            gradient = gradient * _holds_extremum(gradient, axis, coordinate[axis])
    return own_part(get_platform().tensors.cast(gradient, dtype), layout)


def _holds_extremum(like: Tensor, axis: int, coordinate: int) -> Tensor:
    """One where this coordinate of an axis of two ranks holds the extremum, zero where the other does."""
    tensors = get_platform().tensors
    first = tensors.cast(get_platform().op_samples().noise(like, 100 + axis) > 0, tensors.dtype(like))
    return first if coordinate == 0 else 1 - first


def partners(mesh: DeviceMesh, layout: Layout) -> list[int]:
    """Places in the mesh's list of ranks of those with whom this rank reduces."""
    axes = {axis for axis, _ in layout.partials}
    own = mesh.require_coordinate(None)
    found = []
    for place, rank in enumerate(mesh.rank_list):
        other = mesh.require_coordinate(rank)
        if all(axis in axes or other[axis] == own[axis] for axis in range(mesh.ndim)):
            found.append(place)
    return found


def reduced(parts: Sequence[Tensor], layout: Layout) -> Tensor:
    """What the parts of a tensor with pending reductions stand for."""
    extremum = get_platform().op_samples().extremum
    reduce_op = layout.partials[0][1]
    total = parts[0]
    for part in parts[1:]:
        total = extremum(part, total, reduce_op == "max") if reduce_op in ("max", "min") else total + part
    return total / len(parts) if reduce_op == "avg" else total
