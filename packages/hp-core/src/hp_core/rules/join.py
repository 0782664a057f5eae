"""Joining several tensors into one, and making several alike. A cut dim that is joined stays cut: only rows change hands."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from hp_core.errors import ShardingRuleError
from hp_core.platform import get_platform
from hp_core.rules.exchange import Source, Target, recut_for
from hp_core.rules.registry import rule
from hp_core.rules.rule import ADDEND, OpCall, Operand, Output, Strategy, solve
from hp_core.rules.view import ANY_PENDING

__all__: list[str] = []


@rule("cat", "tensors dim")
def _cat(call: OpCall) -> Strategy:
    """All dims are cut alike in all. Along the joined dim one all-to-all gives each rank its part of the result."""
    real = [spec for spec in call.specs if tuple(spec.shape) != (0,)]
    ndim = real[0].ndim if real else 1
    dim = call.dim(default=0, ndim=ndim)
    labels = tuple(range(ndim))
    shape = list(real[0].shape) if real else [0]
    shape[dim] = sum(spec.shape[dim] for spec in real)
    ragged = any(spec.layout.ragged is not None for spec in call.specs)
    strategy = solve(
        [Operand(spec, labels if spec.ndim == ndim else (None,) * spec.ndim, ADDEND) for spec in call.specs],
        [Output(labels, tuple(shape))],
        keeps=ANY_PENDING,
        unequal=frozenset({dim}),
        aligned=lambda label, _: label != dim or dim != 0 or not ragged,
    )
    target, _ = strategy.outputs[0]
    if target.axes_of(dim):
        sources = [
            Source(layout, tuple(spec.shape), dim)
            for spec, layout in zip(call.specs, strategy.layouts, strict=True)
            if tuple(spec.shape) != (0,)
        ]
        plan = recut_for(sources, [Target(target, tuple(shape), dim, ((0, 1, shape[dim]),))])
        strategy.local = "cat_recut"
        strategy.bound = {"dim": dim, "plan": plan}
    return strategy


@rule("stack", "tensors dim")
def _stack(call: OpCall) -> Strategy:
    """Along a new, whole dim."""
    first = call.specs[0]
    if any(tuple(spec.shape) != tuple(first.shape) for spec in call.specs):
        raise ShardingRuleError(f"stack: shapes differ: {[tuple(spec.shape) for spec in call.specs]}.")
    dim = call.dim(default=0, ndim=first.ndim + 1)
    labels = tuple(range(first.ndim))
    result = (*labels[:dim], None, *labels[dim:])
    return solve([Operand(spec, labels, ADDEND) for spec in call.specs], [Output(result)], keeps=ANY_PENDING)


@rule("hstack", "tensors", decomposed=True)
def _hstack(tensors: Sequence[Any]) -> Any:
    rows = [_at_least(tensor, 1) for tensor in tensors]
    return _joined(rows, 0 if rows[0].ndim == 1 else 1)


@rule("vstack row_stack", "tensors", decomposed=True)
def _vstack(tensors: Sequence[Any]) -> Any:
    return _joined([_at_least(tensor, 2) for tensor in tensors], 0)


@rule("dstack", "tensors", decomposed=True)
def _dstack(tensors: Sequence[Any]) -> Any:
    return _joined([_at_least(tensor, 3) for tensor in tensors], 2)


@rule("column_stack", "tensors", decomposed=True)
def _column_stack(tensors: Sequence[Any]) -> Any:
    return _joined([tensor.reshape(-1, 1) if tensor.ndim < 2 else tensor for tensor in tensors], 1)


@rule("atleast_1d", "*tensors", decomposed=True)
def _atleast_1d(tensors: Any) -> Any:
    return _for_each(tensors, 1)


@rule("atleast_2d", "*tensors", decomposed=True)
def _atleast_2d(tensors: Any) -> Any:
    return _for_each(tensors, 2)


@rule("atleast_3d", "*tensors", decomposed=True)
def _atleast_3d(tensors: Any) -> Any:
    return _for_each(tensors, 3)


@rule("broadcast_tensors", "*tensors", decomposed=True)
def _broadcast_tensors(tensors: Any) -> Any:
    tensors = _listed(tensors)
    ndim = max(tensor.ndim for tensor in tensors)
    shape = [1] * ndim
    for tensor in tensors:
        for dim, size in enumerate(tensor.shape, ndim - tensor.ndim):
            shape[dim] = size if shape[dim] == 1 else shape[dim]
    return tuple(tensor.expand(shape) for tensor in tensors)


@rule("meshgrid", "*tensors indexing", decomposed=True)
def _meshgrid(tensors: Any, indexing: str | None = None) -> Any:
    tensors = _listed(tensors)
    shape = [prod(tensor.shape) for tensor in tensors]
    grids = [
        tensor.reshape([size if dim == place else 1 for dim, size in enumerate(shape)]).expand(shape)
        for place, tensor in enumerate(tensors)
    ]
    if indexing == "xy" and len(grids) > 1:
        grids = [grid.transpose(0, 1) for grid in grids]
    return tuple(grids)


@rule("cartesian_prod", "*tensors", decomposed=True)
def _cartesian_prod(tensors: Any) -> Any:
    tensors = _listed(tensors)
    if len(tensors) == 1:
        return tensors[0]
    return get_platform().ops.local("stack")([grid.reshape(-1) for grid in _meshgrid(tensors)], -1)


@rule("block_diag", "*tensors", decomposed=True)
def _block_diag(tensors: Any) -> Any:
    blocks = [_at_least(tensor, 2) for tensor in _listed(tensors)]
    first = blocks[0]
    shape = (sum(block.shape[0] for block in blocks), sum(block.shape[1] for block in blocks))
    result = type(first).from_local(get_platform().tensors.zeros(shape, first._local), first.layout.replicated)
    row = column = 0
    for block in blocks:
        height, width = block.shape
        result[row : row + height, column : column + width] = block
        row, column = row + height, column + width
    return result


def _joined(tensors: Sequence[Any], dim: int) -> Any:
    return get_platform().ops.local("cat")(tensors, dim)


def _listed(tensors: Any) -> list[Any]:
    """Tensors given one by one, or as one list."""
    return list(tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)) else tensors)


def _for_each(tensors: Any, ndim: int) -> Any:
    if len(tensors) == 1 and not isinstance(tensors[0], (list, tuple)):
        return _at_least(tensors[0], ndim)
    return tuple(_at_least(tensor, ndim) for tensor in _listed(tensors))


def _at_least(tensor: Any, ndim: int) -> Any:
    """The tensor with dims of size 1 added: in front, and behind where three are wanted."""
    if tensor.ndim == 0:
        return tensor.reshape((1,) * ndim)
    if tensor.ndim == 1 and ndim >= 2:
        tensor = tensor.unsqueeze(0)
    return tensor.unsqueeze(-1) if tensor.ndim == 2 and ndim == 3 else tensor
