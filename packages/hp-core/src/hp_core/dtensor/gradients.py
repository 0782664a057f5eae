"""The law of gradients: how local tensors enter an op so that every gradient comes out whole.

Along each mesh axis the gradient of a sharded tensor is sharded alike; that of a replicated or a partial one is
replicated: the full, dense gradient, equal on every rank. An axis is *active* in an op when some operand is sharded or
partial on it. The local backward of an operand that is replicated on an active axis gives only this rank's contribution,
so such an operand passes through `vary`: identity forward, all-reduce backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from math import prod
from typing import Any
from weakref import ref

from hp_core.layout import Layout
from hp_core.platform import get_platform
from hp_core.platform.protocol import DType, Tensor
from hp_core.process_group import on_destroy
from hp_core.redistribute import Program, program_for

__all__ = ["Origin", "Vary", "operand_local", "redistribute_local"]

Vary = tuple[int, ...]
"""Mesh axes, ascending, over which the local gradients of an operand are contributions to a sum."""


class Origin:
    """Where a gathered tensor came from, so that what varies can send its gradient straight back there.

    Attributes:
        source: local tensor before the redistribution.
        layout: its layout.
        version: the gathered local tensor's version then; a write since then cuts the tie.
        backward_dtype: element type in which the gradient travels; None for its own.
        used: whether a gradient was tied to the source.
    """

    __slots__ = ("backward_dtype", "layout", "source", "used", "version")

    def __init__(self, source: Tensor, layout: Layout, version: int, backward_dtype: DType = None) -> None:
        self.source, self.layout, self.version, self.used = source, layout, version, False
        self.backward_dtype = backward_dtype


def operand_local(tensor: Any, layout: Layout | None, vary: Vary) -> Tensor:
    """The local tensor with which a DTensor enters an op.

    Args:
        tensor: the DTensor.
        layout: layout that the op asks for; None if it is the tensor's own.
        vary: axes on which the op makes this operand's gradient a contribution.
    """
    local = tensor._local
    spec = tensor._spec
    if layout is None:
        if vary and get_platform().autograd.needs_gradient(local):
            return _varied(tensor, vary)
        return local
    return redistribute_local(local, spec.layout, layout, spec.shape, spec.dtype, vary)


def redistribute_local(
    local: Tensor,
    src: Layout,
    dst: Layout,
    shape: tuple[int, ...],
    dtype: DType,
    vary: Vary = (),
    backward_dtype: DType = None,
    arrivals: list[Callable[[], None]] | None = None,
) -> Tensor:
    """Redistribute a local tensor, with its gradient.

    Between two meshes all ranks of both must call it; a rank outside of a mesh has a local tensor without elements there.

    Args:
        local: this rank's local tensor.
        src: its layout.
        dst: the layout wanted.
        shape: global shape.
        dtype: element type.
        vary: axes on which the result's gradient will be a contribution to a sum.
        backward_dtype: element type in which the gradient travels; default its own.
        arrivals: if given, the communication is only started, and what is left to do before the result may be used is
            put here: functions to call in this order, unrecorded.
    """
    platform = get_platform()
    itemsize = platform.tensors.itemsize(dtype)
    forward = program_for(src, dst, shape, itemsize)
    if not platform.autograd.needs_gradient(local):
        return forward(local) if arrivals is None else forward.start(local, arrivals)
    if src.partials and src.partials[0][1] in ("max", "min") and forward.plan.steps and _changes_pending(src, dst):
        local = _settle_extremum(local, src, shape, itemsize)
        src = src.gradient
        if src is dst and not vary:
            return local
        forward = program_for(src, dst, shape, itemsize)
    backward = _gradient_path(src, dst, shape, dtype, vary, backward_dtype)
    if forward.keeps is not None and isinstance(backward, Program) and backward.is_identity:
        return platform.autograd.pending_share(local, forward.keeps)
    if src is dst:
        return platform.autograd.with_gradient(local, platform.autograd.alias, backward)
    # a started result has its node in the graph already, and is filled in place later
    run = forward if arrivals is None else partial(forward.start, arrivals=arrivals)
    return platform.autograd.with_gradient(local, run, backward)


def _changes_pending(src: Layout, dst: Layout) -> bool:
    return src.mesh is not dst.mesh or src.partials != dst.partials


def _varied(tensor: Any, axes: Vary) -> Tensor:
    """The alias of a tensor's local whose gradient is summed over `axes`; one per tensor and set of axes.

    All uses share the alias, so that autograd adds their contributions locally and one collective carries the sum.
    """
    autograd = get_platform().autograd
    local = tensor._local
    version = autograd.version(local)
    memo = tensor._memo
    if memo is None:
        memo = tensor._memo = {}
    else:
        entry = memo.get(axes)
        if entry is not None and entry[0] == version:
            return entry[1]
    spec = tensor._spec
    origin: Origin | None = tensor._origin
    if origin is not None and origin.version == version and autograd.requires_grad(origin.source):
        # the gradient goes straight to what was gathered: one reduce-scatter instead of all-reduce and slice
        origin.used = True
        source, target = origin.source, origin.layout
        path = _gradient_path(target, spec.layout, spec.shape, spec.dtype, axes, origin.backward_dtype)
        alias = autograd.with_gradient(source, lambda _: autograd.detach(local), _forgetting(tensor, axes, path))
    else:
        path = _gradient_path(spec.layout, spec.layout, spec.shape, spec.dtype, axes)
        alias = autograd.with_gradient(local, autograd.alias, _forgetting(tensor, axes, path))
    memo[axes] = (version, alias)
    return alias


def _forgetting(tensor: Any, axes: Vary, backward: Any) -> Any:
    """`backward`, which also drops the alias from the memo: the next step starts a graph of its own.

    Kept, the old node would run last in every later backward, since the engine goes by age.
    """
    owner = ref(tensor)

    def run(gradient: Tensor) -> Tensor:
        tensor = owner()
        if tensor is not None and tensor._memo is not None:
            tensor._memo.pop(axes, None)
        return backward(gradient)

    return run


@lru_cache(maxsize=1 << 14)
def _gradient_path(
    src: Layout, dst: Layout, shape: tuple[int, ...], dtype: DType, vary: Vary = (), backward_dtype: DType = None
) -> Any:
    """The function that carries the gradient of a tensor at `dst` back to `src`."""
    tensors = get_platform().tensors
    contributions = dst.gradient.with_partials(tuple((axis, "sum") for axis in {*vary, *_extremum_axes(dst)}))
    target = src.gradient.with_partials(tuple((axis, "sum") for axis in _extremum_axes(src)))
    program = program_for(contributions, target, shape, tensors.itemsize(backward_dtype or dtype))
    factor = _average_factor(src, dst)

    def run(gradient: Tensor) -> Tensor:
        own_dtype = tensors.dtype(gradient)
        if backward_dtype is not None and backward_dtype != own_dtype:
            gradient = tensors.cast(gradient, backward_dtype)
        result = program(gradient)
        if factor != 1.0:
            result = tensors.scale_(result if result is not gradient else tensors.clone(result), factor)
        return tensors.cast(result, own_dtype) if backward_dtype is not None else result

    return run if factor != 1.0 or backward_dtype is not None else program


on_destroy(_gradient_path.cache_clear)


def _extremum_axes(layout: Layout) -> tuple[int, ...]:
    """Axes with a pending max or min: the gradient of each rank's part is its own share, so it counts as a contribution."""
    return tuple(axis for axis, reduce_op in layout.partials if reduce_op in ("max", "min"))


def _average_factor(src: Layout, dst: Layout) -> float:
    """The local derivative of a pending average over n ranks is 1/n of the dense gradient, in `src` as in `dst`."""
    before, after = (
        prod(layout.mesh.shape[axis] for axis, reduce_op in layout.partials if reduce_op == "avg")
        for layout in (src, dst)
    )
    return after / before


def _settle_extremum(local: Tensor, src: Layout, shape: tuple[int, ...], itemsize: int) -> Tensor:
    """Finish a pending max or min; the gradient goes to the ranks that hold the extremum, shared equally among ties."""
    platform = get_platform()
    if src.mesh.get_coordinate() is None:
        return local  # outside of the mesh there is nothing to settle
    reduce = program_for(src, src.gradient, shape, itemsize)
    result = reduce(platform.autograd.detach(local))
    mask, ties = platform.tensors.tie_count(platform.autograd.detach(local), result)
    pending = src.with_partials(tuple((axis, "sum") for axis, _ in src.partials))
    share = mask / program_for(pending, src.gradient, shape, itemsize)(ties)
    return platform.autograd.with_gradient(local, lambda _: result, lambda gradient: gradient * share)
