"""Cumulative ops: along a dim that is cut each rank scans its piece and puts the total of the earlier pieces before it.

The totals, of the reduced shape, are gathered; their gradients come back by one reduce-scatter.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from hp_core.rules.pieces import is_cut, ordered_pieces, over_ranks
from hp_core.rules.registry import rule
from hp_core.rules.rule import FACTOR, PLAIN, Composite, OpCall, Operand, Output, Strategy, solve

__all__: list[str] = []


@rule("cumsum cumprod logcumsumexp", "input dim dtype")
def _scan(call: OpCall) -> Strategy | Composite:
    """A cumulative sum is linear: a sum that is pending over other ranks stays so."""
    if call.inplace and is_cut(call.specs[0], (call.dim(),)):
        return Composite(partial(_computed_anew, name=call.name))
    role = FACTOR if call.name == "cumsum" else PLAIN
    return _cumulative(call, "scan_over_ranks", 1, role, scan=call.name, dtype=call.get("dtype"))


def _computed_anew(x: Any, dim: int, dtype: Any = None, *, name: str) -> Any:
    """What an in-place op writes: over ranks it can't be computed in place. The backward needs the values from before."""
    return getattr(x.clone(), name)(dim, dtype=dtype)


@rule("cummax cummin", "input dim")
def _cumulative_extremum(call: OpCall) -> Strategy:
    return _cumulative(call, "cumulative_extremum_over_ranks", 2, PLAIN, largest=call.name == "cummax")


def _cumulative(call: OpCall, local: str, outputs: int, role: str, **bound: object) -> Strategy:
    spec, dim = call.specs[0], call.dim()
    labels = tuple(range(spec.ndim))
    if not is_cut(spec, (dim,)):
        operand = Operand(spec, tuple(None if d == dim else d for d in labels), role)
        return solve([operand], [Output(operand.labels)] * outputs)
    strategy, group = over_ranks(call, (dim,), labels, local, outputs=outputs, role=role, dim=dim, **bound)
    if group is not None:
        shape = tuple(spec.shape)
        start, stop = strategy.layouts[0].bounds(shape)[dim]
        pieces = ordered_pieces(strategy.layouts[0], shape, dim, group)
        # an empty piece comes last: what lies before it doesn't matter
        strategy.bound["before"] = tuple(piece.place for piece in pieces if piece.start < start and start < stop)
        if outputs == 2:
            strategy.bound["start"] = start
    return strategy
