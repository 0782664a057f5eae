"""Ops that only rearrange dims: reshapes, transpositions, expansion. They carry every kind of pending reduction.

A reshape groups input dims with the output dims they become. A cut of a group's leading dim passes through when the
pieces' borders, in elements, are the borders of the output's pieces too; any other cut is undone first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

from hp_core.errors import ShardingRuleError
from hp_core.geometry import Interval, chunk_interval
from hp_core.platform import get_platform
from hp_core.rules.registry import rule
from hp_core.rules.rule import FACTOR, PLAIN, OpCall, Operand, Output, Strategy, solve
from hp_core.rules.spec import TensorSpec

__all__ = ["ANY_PENDING", "VIEW_OPS", "reshape_groups"]

VIEW_OPS = frozenset(
    """
    view reshape flatten unflatten squeeze unsqueeze transpose t T mT adjoint H mH permute movedim expand broadcast_to expand_as
    view_as reshape_as split split_with_sizes chunk tensor_split unbind getitem select narrow ravel diagonal unfold
    """.split()
)
"""Ops whose dense result shares storage with the first operand: writing to it writes to the operand."""

ANY_PENDING = frozenset({"sum", "avg", "max", "min"})


@rule("view reshape", "input *shape")
def _reshape(call: OpCall) -> Strategy:
    shape = call.get("shape", ())
    if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
        shape = shape[0]
    dtype = call.get("dtype", shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else None)
    if dtype is not None:
        return _reinterpreted(call, dtype)
    if not all(isinstance(size, int) for size in shape):
        raise ShardingRuleError(f"{call.name}: shape must be integers, got {shape!r}.")
    return reshaped(call, _resolved(call, shape))


@rule("view_as reshape_as", "input other")
def _reshape_as(call: OpCall) -> Strategy:
    return _shaped_as_other(call, reshaped(call, tuple(call.spec("other").shape)), "reshape_first")


def _reinterpreted(call: OpCall, dtype: Any) -> Strategy:
    """The same bytes as another element type; of another size, then the last dim is as much longer or shorter."""
    spec = call.specs[0]
    itemsize = get_platform().tensors.itemsize
    labels: tuple[int | None, ...] = tuple(range(spec.ndim))
    if itemsize(dtype) != itemsize(spec.dtype):
        labels = (*labels[:-1], None)
    return solve([Operand(spec, labels, PLAIN)], [Output(labels)])


@rule("as_strided", "input size stride storage_offset")
def _as_strided(call: OpCall) -> Strategy:
    raise ShardingRuleError(
        "as_strided: strides of the global tensor say nothing of this rank's memory; use indexing, view, unfold, diagonal or "
        "transpose, or x.full_tensor().as_strided(...)."
    )


@rule("unfold", "input dimension size step")
def _unfold(call: OpCall) -> Strategy:
    """Windows along one dim, which must be whole, in a new last dim."""
    spec, dim = call.specs[0], call.dim("dimension")
    labels = tuple(None if d == dim else d for d in range(spec.ndim))
    return solve([Operand(spec, labels, FACTOR)], [Output((*labels, None))], keeps=ANY_PENDING)


@rule("ravel", "input")
@rule("flatten", "input start_dim end_dim")
def _flatten(call: OpCall) -> Strategy:
    shape = tuple(call.spec("input").shape)
    start, end = call.dim("start_dim", 0), call.dim("end_dim", -1)
    return reshaped(call, (*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]) if shape else (1,))


@rule("unflatten", "input dim sizes")
def _unflatten(call: OpCall) -> Strategy:
    shape = tuple(call.spec("input").shape)
    dim = call.dim()
    sizes = tuple(call.get("sizes"))
    if sizes.count(-1) == 1:
        known = prod(size for size in sizes if size != -1)
        sizes = tuple(shape[dim] // known if size == -1 and known else size for size in sizes)
    if prod(sizes) != shape[dim]:
        raise ShardingRuleError(
            f"unflatten: sizes {sizes} don't multiply to {shape[dim]}, the size of dim {dim} of shape {shape}."
        )
    return reshaped(call, (*shape[:dim], *sizes, *shape[dim + 1 :]))


@rule("squeeze", "input dim")
def _squeeze(call: OpCall) -> Strategy:
    shape = tuple(call.spec("input").shape)
    dims = call.dims()
    return reshaped(call, tuple(size for dim, size in enumerate(shape) if dim not in dims or size != 1))


@rule("unsqueeze", "input dim")
def _unsqueeze(call: OpCall) -> Strategy:
    shape = tuple(call.spec("input").shape)
    dim = call.dim(ndim=len(shape) + 1)
    return reshaped(call, (*shape[:dim], 1, *shape[dim:]))


@rule("transpose", "input dim0 dim1")
def _transpose(call: OpCall) -> Strategy:
    order = list(range(call.specs[0].ndim))
    first, second = call.dim("dim0"), call.dim("dim1")
    if order:
        order[first], order[second] = order[second], order[first]
    return _permuted(call, order)


@rule("t T mT adjoint H mH", "input")
def _transposed(call: OpCall) -> Strategy:
    ndim = call.specs[0].ndim
    order = list(range(ndim))
    if call.name in ("T", "t"):
        order.reverse()
    else:
        order[-2:] = [ndim - 1, ndim - 2]
    return _permuted(call, order)


@rule("permute", "input *dims")
def _permute(call: OpCall) -> Strategy:
    dims = call.get("dims", ())
    if len(dims) == 1 and isinstance(dims[0], (tuple, list)):
        dims = dims[0]
    ndim = call.specs[0].ndim
    order = [dim % ndim for dim in dims]
    if sorted(order) != list(range(ndim)):
        raise ShardingRuleError(
            f"permute: dims {tuple(dims)} don't name each dim of shape {tuple(call.specs[0].shape)} once."
        )
    return _permuted(call, order)


@rule("movedim", "input source destination")
def _movedim(call: OpCall) -> Strategy:
    ndim = call.specs[0].ndim
    sources, targets = call.dims("source"), call.dims("destination")
    order = [dim for dim in range(ndim) if dim not in sources]
    for target, source in sorted(zip(targets, sources, strict=True)):
        order.insert(target, source)
    return _permuted(call, order)


@rule("expand", "input *sizes")
def _expand(call: OpCall) -> Strategy:
    sizes = call.get("sizes", ())
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = sizes[0]
    return _expanded(call, tuple(sizes))


@rule("broadcast_to", "input size")
def _broadcast_to(call: OpCall) -> Strategy:
    return _expanded(call, tuple(call.get("size")))


@rule("expand_as", "input other")
def _expand_as(call: OpCall) -> Strategy:
    return _shaped_as_other(call, _expanded(call, tuple(call.spec("other").shape)), "expand_first")


@rule("alias", "input")
def _same(call: OpCall) -> Strategy:
    return _permuted(call, list(range(call.specs[0].ndim)))


def _shaped_as_other(call: OpCall, strategy: Strategy, local: str) -> Strategy:
    """Of the other operand only the shape matters: it stays as it is, and its cuts make no gradient a contribution."""
    layouts = (*strategy.layouts, call.spec("other").layout)
    return Strategy(layouts, strategy.outputs, local=local, bound=strategy.bound, complete=frozenset({0}))


def _permuted(call: OpCall, order: Sequence[int]) -> Strategy:
    spec = call.specs[0]
    return solve([Operand(spec, tuple(range(spec.ndim)), FACTOR)], [Output(tuple(order))], keeps=ANY_PENDING)


def _expanded(call: OpCall, sizes: tuple[int, ...]) -> Strategy:
    spec = call.specs[0]
    offset = len(sizes) - spec.ndim
    if offset < 0:
        raise ShardingRuleError(f"{call.name}: sizes {sizes} are fewer than the dims of shape {tuple(spec.shape)}.")
    labels: list[int | None] = []
    result: list[int | None] = [None] * len(sizes)
    shape = list(sizes)
    for dim, size in enumerate(spec.shape):
        wanted = sizes[offset + dim]
        kept = wanted in (-1, size)
        if not kept and size != 1:
            raise ShardingRuleError(f"{call.name}: dim {dim} of shape {tuple(spec.shape)} can't become {wanted}.")
        shape[offset + dim] = size if kept else wanted
        labels.append(dim if kept else None)
        result[offset + dim] = dim if kept else None
    strategy = solve([Operand(spec, tuple(labels), FACTOR)], [Output(tuple(result), tuple(shape))], keeps=ANY_PENDING)
    strategy.local = "expand_first"
    strategy.bound = {"shape": strategy.outputs[0][0].local_shape(shape)}
    return strategy


def reshaped(call: OpCall, shape: tuple[int, ...]) -> Strategy:
    """The strategy of any op that gives the first operand's elements, in order, another shape."""
    spec = call.specs[0]
    operand_labels: list[Any] = [None] * spec.ndim
    result_labels: list[Any] = [None] * len(shape)
    steps: dict[Any, tuple[int, int, int, int]] = {}
    for index, (inputs, outputs) in enumerate(reshape_groups(tuple(spec.shape), shape)):
        lead_in, lead_out = inputs[0], outputs[0]
        operand_labels[lead_in] = result_labels[lead_out] = index
        inner_in = prod(spec.shape[dim] for dim in inputs[1:])
        inner_out = prod(shape[dim] for dim in outputs[1:])
        steps[index] = (spec.shape[lead_in], inner_in, shape[lead_out], inner_out)

    def aligned(label: Any, axes: tuple[int, ...]) -> bool:
        size_in, inner_in, size_out, inner_out = steps[label]
        if size_in == size_out:
            return True
        if spec.layout.ragged is not None:
            return False
        parts = [spec.layout.mesh.shape[axis] for axis in axes]
        for coordinate in product(*map(range, parts)):
            low_in, high_in = _nested(size_in, parts, coordinate)
            low_out, high_out = _nested(size_out, parts, coordinate)
            same = (low_in * inner_in, high_in * inner_in) == (low_out * inner_out, high_out * inner_out)
            if not same and (low_in < high_in or low_out < high_out):
                return False
        return True

    operand = Operand(spec, tuple(operand_labels), FACTOR)
    strategy = solve([operand], [Output(tuple(result_labels), shape)], keeps=ANY_PENDING, aligned=aligned)
    strategy.local = "reshape_first" if call.name != "view" or strategy.layouts[0] is not spec.layout else "view_first"
    strategy.bound = {"shape": strategy.outputs[0][0].local_shape(shape)}
    return strategy


def reshape_groups(source: tuple[int, ...], target: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Smallest runs of source dims and target dims with equal products; dims of size 1 belong to none.

    (2, 3, 4) -> (6, 4) gives [([0, 1], [0]), ([2], [1])].
    """
    groups: list[tuple[list[int], list[int]]] = []
    if 0 in source:
        return groups
    inputs = [dim for dim, size in enumerate(source) if size != 1]
    outputs = [dim for dim, size in enumerate(target) if size != 1]
    i = o = 0
    while i < len(inputs) and o < len(outputs):
        left, right = [inputs[i]], [outputs[o]]
        size_left, size_right = source[inputs[i]], target[outputs[o]]
        while size_left != size_right:
            if size_left < size_right:
                i += 1
                left.append(inputs[i])
                size_left *= source[inputs[i]]
            else:
                o += 1
                right.append(outputs[o])
                size_right *= target[outputs[o]]
        groups.append((left, right))
        i, o = i + 1, o + 1
    return groups


def _resolved(call: OpCall, shape: Sequence[int]) -> tuple[int, ...]:
    """The target shape with its -1 filled in, checked against the number of elements."""
    source: TensorSpec = call.specs[0]
    numel = prod(source.shape)
    known = prod(size for size in shape if size != -1)
    missing = [dim for dim, size in enumerate(shape) if size == -1]
    if len(missing) == 1 and known and numel % known == 0:
        shape = [numel // known if size == -1 else size for size in shape]
    if len(missing) > 1 or prod(shape) != numel or any(size < 0 for size in shape):
        raise ShardingRuleError(
            f"{call.name}: shape {tuple(shape)} is invalid for a tensor of shape {tuple(source.shape)} ({numel} elements)."
        )
    return tuple(shape)


def _nested(size: int, parts: Sequence[int], coordinate: Sequence[int]) -> Interval:
    interval = (0, size)
    for count, index in zip(parts, coordinate, strict=True):
        interval = chunk_interval(interval, count, index, size)
    return interval
