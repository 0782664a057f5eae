"""Which layouts the operands of a call are tried in: all, or a fixed and documented choice of them.

One operand or two: every combination. Three or more: every pair of layouts of any operand and one of the two with the
most layouts, the others going round; `exhaustive` has all of them. After these come a few with pending averages and extrema,
and with ragged shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import gcd, prod

from hp_core.layout import Layout
from hp_core.mesh import DeviceMesh
from hp_core.placement import Partial, Placement, RaggedShard, Replicate, Shard
from hp_core.platform import get_platform
from hp_core.platform.protocol import SampleOperand

__all__ = ["MESHES", "Combination", "combinations", "operand_layouts", "spread"]

Combination = tuple[Layout, ...]

MESHES = {"2": ((2,), ("tp",)), "2x2": ((2, 2), ("dp", "tp"))}
"""Shape and axis names of each mesh on which rules are checked."""

_FEW = 300
"""So many combinations of three and more operands are all tried."""


def combinations(
    mesh: DeviceMesh, operands: Sequence[SampleOperand], exhaustive: bool = False, extras: bool = True
) -> list[Combination]:
    """The combinations of layouts of these operands, in a fixed order; the extras come last.

    Args:
        mesh: of one or two axes.
        operands: the operands.
        exhaustive: all combinations of three and more operands, too.
        extras: with the few combinations of rarer placements.
    """
    choices = [operand_layouts(mesh, len(operand.tensor.shape), operand.may_pend) for operand in operands]
    counts = [len(options) for options in choices]
    if len(counts) <= 2 or exhaustive or prod(counts) <= _FEW:
        numbers = list(product(*map(range, counts)))
    else:
        numbers = _pairs(counts)
    found = [tuple(options[i] for options, i in zip(choices, number, strict=True)) for number in numbers]
    if extras:
        found += [combination for combination in _extras(mesh, operands) if combination not in found]
    return found


@lru_cache(maxsize=256)
def operand_layouts(mesh: DeviceMesh, ndim: int, may_pend: bool) -> tuple[Layout, ...]:
    """Every layout of a tensor: each placement on each axis, and both orders where two axes cut one dim."""
    base = Layout.from_device_mesh(mesh)
    options: list[Placement] = [Replicate(), *[Shard(dim) for dim in range(ndim)], *([Partial()] if may_pend else [])]
    found = [base(*placements) for placements in product(options, repeat=mesh.ndim)]
    if mesh.ndim == 2:
        reverse = tuple(reversed(mesh.mesh_dim_names))
        found += [base(*[None] * dim, reverse) for dim in range(ndim)]
    return tuple(found)


def spread(count: int, most: int) -> list[int]:
    """At most so many of the numbers below `count`, evenly strewn, always the same."""
    if count <= most:
        return list(range(count))
    step = max(round(count * 0.618), 1)
    while gcd(step, count) != 1:
        step += 1
    return sorted(i * step % count for i in range(most))


def _pairs(counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Each pair of choices of the two operands with the most; the others go round so that they meet every choice of these."""
    first, second, *others = sorted(range(len(counts)), key=lambda index: -counts[index])
    found = []
    for i, j in product(range(counts[first]), range(counts[second])):
        number = [0] * len(counts)
        number[first], number[second] = i, j
        for factor, other in enumerate(others, 1):
            number[other] = (i + factor * j) % counts[other]
        found.append(tuple(number))
    return sorted(found)


def _extras(mesh: DeviceMesh, operands: Sequence[SampleOperand]) -> list[Combination]:
    """Pending averages and extrema, and ragged shares, of single operands and of all that can have them alike."""
    tensors = get_platform().tensors
    base = Layout.from_device_mesh(mesh)
    shapes = [tuple(operand.tensor.shape) for operand in operands]
    last: list[Placement] = [Replicate()] * (mesh.ndim - 1)
    found: list[Combination] = []
    for index, operand in enumerate(operands[:2]):
        if operand.may_pend:
            ordered = not tensors.dtype_name(tensors.dtype(operand.tensor)).startswith("complex")
            for reduce_op in ("avg", "max", "min") if ordered else ("avg",):
                found.append(_one(base, index, len(operands), base(*last, Partial(reduce_op))))
            if mesh.ndim == 2 and shapes[index]:
                found.append(_one(base, index, len(operands), base(Shard(0), Partial("avg"))))
    size = shapes[0][0] if shapes and shapes[0] else 0
    if size:
        units = (1, size - 1) if size > 1 else (0, 1)
        ragged = base(*last, RaggedShard(units))
        found.append(_one(base, 0, len(operands), ragged))
        if len(operands) > 1:
            found.append(tuple(ragged if shape and shape[0] == size else base for shape in shapes))
        if mesh.ndim == 2 and len(shapes[0]) > 1:
            found.append(_one(base, 0, len(operands), base(Shard(1), RaggedShard(units))))
    return list(dict.fromkeys(found))


def _one(base: Layout, index: int, count: int, layout: Layout) -> Combination:
    return tuple(layout if other == index else base for other in range(count))
