"""Rows of a cut dim change hands: one all-to-all forward, one back for the gradient, nothing but the rows that move.

What goes where is worked out once, in `hp_core.rules.exchange`; here tensors are packed and unpacked along that list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hp_core.platform.protocol import Recut, Run
from hp_core.platform.torch.collectives import TorchCollectives

__all__ = ["cat_recut", "recut", "recut_pieces", "reorder", "repeat_recut"]

_all_to_all = TorchCollectives().all_to_all


def recut(tensor: torch.Tensor, *, steps: Sequence[tuple[int, Recut]]) -> torch.Tensor:
    """Exchange rows along one dim after the other: pairs (dim, what goes where)."""
    for dim, plan in steps:
        tensor = _recut(tensor, dim, plan)
    return tensor


def recut_pieces(tensor: torch.Tensor, *, dim: int, plan: Recut, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Exchange rows, then take the result apart: this rank's part of each piece."""
    result: tuple[torch.Tensor, ...] = _recut(tensor, dim, plan).split(list(sizes), dim)
    return result


def cat_recut(*tensors: torch.Tensor, dim: int, plan: Recut) -> torch.Tensor:
    """This rank's part of the joined tensors, from its parts of each."""
    return _recut(torch.cat(tensors, dim), dim, plan)


def repeat_recut(tensor: torch.Tensor, *, steps: Sequence[tuple[int, Recut]], repeats: Sequence[int]) -> torch.Tensor:
    """Repeat cut dims by exchanging rows, the others in place."""
    return recut(tensor, steps=steps).repeat(tuple(repeats))


def reorder(
    tensor: torch.Tensor, *, steps: Sequence[tuple[int, Recut]], runs: Sequence[tuple[int, Sequence[Run]]]
) -> torch.Tensor:
    """Put rows in another order: along cut dims by exchange, along whole ones here: pairs (dim, rows in their new order)."""
    for dim, pieces in runs:
        taken = [_take(tensor, dim, rows) for rows in pieces if rows[2]]
        tensor = torch.cat(taken, dim) if taken else tensor
    return recut(tensor, steps=steps)


class _Recut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, plan: Recut) -> torch.Tensor:
        ctx.dim, ctx.plan, ctx.rows = dim, plan, tensor.shape[dim]
        places = [[(start, 1, count) for start, count in pieces] for pieces in plan.receives]
        result = tensor.new_empty(_with_rows(tensor, dim, plan.length))
        for rows, arrived in _exchanged(tensor, dim, plan, plan.sends, places):
            _take(result, dim, rows).copy_(arrived)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        dim, plan = ctx.dim, ctx.plan
        places = [[(start, 1, count) for start, count in pieces] for pieces in plan.receives]
        result = gradient.new_zeros(_with_rows(gradient, dim, ctx.rows))
        # a row that was sent twice gets two gradients
        for (start, step, count), arrived in _exchanged(gradient, dim, plan, places, plan.sends):
            if step < 0:
                start, step, arrived = start + step * (count - 1), -step, arrived.flip(dim)
            _take(result, dim, (start, step, count)).add_(arrived)
        return result, None, None


def _recut(tensor: torch.Tensor, dim: int, plan: Recut) -> torch.Tensor:
    result: torch.Tensor = _Recut.apply(tensor, dim, plan)  # type: ignore[no-untyped-call]
    return result


def _exchanged(
    tensor: torch.Tensor, dim: int, plan: Recut, sends: Sequence[Sequence[Run]], receives: Sequence[Sequence[Run]]
) -> list[tuple[Run, torch.Tensor]]:
    """Send the rows `sends`, and give what arrives, with the rows that it is meant for."""
    found = [(place, _take(tensor, dim, rows)) for rows, place in zip(sends[plan.own], receives[plan.own], strict=True)]
    if not plan.moves:
        return found
    width = _with_rows(tensor, dim, 1).numel()
    others = [member for member in range(plan.group.size) if member != plan.own]
    packed = [_take(tensor, dim, rows).reshape(-1) for member in others for rows in sends[member]]
    source = torch.cat(packed) if packed else tensor.new_empty(0)
    source_splits = [0 if m == plan.own else width * sum(rows[2] for rows in sends[m]) for m in range(plan.group.size)]
    splits = [0 if m == plan.own else width * sum(rows[2] for rows in receives[m]) for m in range(plan.group.size)]
    received = tensor.new_empty(sum(splits))
    _all_to_all(received, source, splits, source_splits, plan.group)
    at = 0
    for member in others:
        for rows in receives[member]:
            size = width * rows[2]
            found.append((rows, received[at : at + size].view(_with_rows(tensor, dim, rows[2]))))
            at += size
    return found


def _take(tensor: torch.Tensor, dim: int, rows: Run) -> torch.Tensor:
    """These rows: a view, or a copy in reverse order."""
    start, step, count = rows
    if step == 1:
        return tensor.narrow(dim, start, count)
    low = start if step > 0 else start + step * (count - 1)
    span = tensor.narrow(dim, low, abs(step) * (count - 1) + 1)
    picked = span[(slice(None),) * dim + (slice(None, None, abs(step)),)]
    return picked if step > 0 else picked.flip(dim)


def _with_rows(tensor: torch.Tensor, dim: int, rows: int) -> torch.Size:
    return torch.Size((*tensor.shape[:dim], rows, *tensor.shape[dim + 1 :]))
