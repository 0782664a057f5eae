"""Cutting a tensor into several. Along a cut dim each piece is cut again alike: one all-to-all moves what changes hands."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from hp_core.rules.exchange import Source, Target, recut_for
from hp_core.rules.registry import rule
from hp_core.rules.rule import FACTOR, OpCall, Operand, Output, OutsideRule, Strategy, solve
from hp_core.rules.view import ANY_PENDING

__all__: list[str] = []


@rule("split", "input split_size dim")
@rule("split_with_sizes", "input split_sizes dim")
def _split(call: OpCall) -> Strategy:
    sizes = call.get("split_size", call.get("split_sizes"))
    dim = call.dim(default=0)
    total = call.specs[0].shape[dim]
    return _pieces(call, dim, _even(total, sizes) if isinstance(sizes, int) else sizes)


@rule("chunk", "input chunks dim")
def _chunk(call: OpCall) -> Strategy:
    dim = call.dim(default=0)
    total, chunks = call.specs[0].shape[dim], call.get("chunks")
    size = -(-total // chunks)
    return _pieces(call, dim, _even(total, size) if size else [0] * chunks)


@rule("tensor_split", "input indices_or_sections dim")
def _tensor_split(call: OpCall) -> Strategy:
    sections = call.get("indices_or_sections", call.get("indices", call.get("sections")))
    dim = call.dim(default=0)
    total = call.specs[0].shape[dim]
    if isinstance(sections, int):
        small, larger = divmod(total, sections)
        return _pieces(call, dim, [small + 1] * larger + [small] * (sections - larger))
    if not isinstance(sections, (tuple, list)):
        raise OutsideRule("tensor_split: pass the indices as a list of integers.")
    ends = [slice(None, index).indices(total)[1] for index in sections] + [total]
    starts = [0, *ends[:-1]]
    sizes = [max(end - start, 0) for start, end in zip(starts, ends, strict=True)]
    return _pieces(call, dim, sizes, starts)


@rule("hsplit", "input sections", decomposed=True)
def _hsplit(input: Any, sections: Any) -> Any:
    return input.tensor_split(sections, 1 if input.ndim > 1 else 0)


@rule("vsplit", "input sections", decomposed=True)
def _vsplit(input: Any, sections: Any) -> Any:
    return input.tensor_split(sections, 0)


@rule("dsplit", "input sections", decomposed=True)
def _dsplit(input: Any, sections: Any) -> Any:
    return input.tensor_split(sections, 2)


@rule("unbind", "input dim")
def _unbind(call: OpCall) -> Strategy:
    """One gather of a cut dim, not a pending sum for each of its rows."""
    spec = call.specs[0]
    dim = call.dim(default=0)
    labels = tuple(None if d == dim else d for d in range(spec.ndim))
    rest = tuple(d for d in range(spec.ndim) if d != dim)
    return solve([Operand(spec, labels, FACTOR)], [Output(rest)] * spec.shape[dim], keeps=ANY_PENDING)


def _even(total: int, size: int) -> list[int]:
    """Pieces of `size`, the last as it comes; at least one."""
    return [min(size, total - start) for start in range(0, total, size)] or [0]


def _pieces(call: OpCall, dim: int, sizes: Sequence[int], starts: Sequence[int] | None = None) -> Strategy:
    spec = call.specs[0]
    starts = [0, *accumulate(sizes)][: len(sizes)] if starts is None else starts
    labels = tuple(range(spec.ndim))
    shapes = [(*spec.shape[:dim], size, *spec.shape[dim + 1 :]) for size in sizes]
    strategy = solve(
        [Operand(spec, labels, FACTOR)],
        [Output(labels, shape) for shape in shapes],
        keeps=ANY_PENDING,
        # unequal shares of a dim are not those of a piece of it
        aligned=lambda label, _: label != dim or dim != 0 or spec.layout.ragged is None,
    )
    layout = strategy.layouts[0]
    if layout.axes_of(dim):
        targets = [
            Target(layout, shape, dim, ((start, 1, size),))
            for shape, start, size in zip(shapes, starts, sizes, strict=True)
        ]
        strategy.local = "recut_pieces"
        strategy.bound = {
            "dim": dim,
            "plan": recut_for([Source(layout, tuple(spec.shape), dim)], targets),
            "sizes": [layout.local_shape(shape)[dim] for shape in shapes],
        }
        strategy.detached = True
    return strategy
