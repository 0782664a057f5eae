"""Parameters laid out as sharded units lay them: views of one chunk, with gradients that are views of another.

`unit` gives the function that makes them; tests pass it to the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from hp_core import DTensor, FlatShard, Replicate
from hp_core.geometry import box_numel
from hp_core.layout import from_placements


class Unit:
    """One flat buffer over the mesh axis `axis`.

    Args:
        values: the dense parameters.
        mesh: the mesh.
        axis: the axis whose ranks share the buffer.
        outer: for each parameter its placements on all axes (that on `axis` is not looked at); default replicated.
        whole: no parameter is cut: each lies in the chunk that has least.
        gap: elements of padding before each parameter.
    """

    def __init__(
        self,
        values: Sequence[torch.Tensor],
        mesh: Any,
        axis: int = 0,
        outer: Sequence[Sequence[Any]] | None = None,
        whole: bool = False,
        gap: int = 0,
    ) -> None:
        placements = [list(given) for given in outer or [[Replicate()] * mesh.ndim] * len(values)]
        for given in placements:
            given[axis] = Replicate()
        self.pieces = [
            from_placements(mesh, given, value.dim()) for given, value in zip(placements, values, strict=True)
        ]
        sizes = [
            torch.Size(layout.largest_local_shape(value.shape)).numel()
            for layout, value in zip(self.pieces, values, strict=True)
        ]
        ranks, rank = mesh.shape[axis], mesh.get_coordinate()[axis]
        if whole:
            fill, homes = [0] * ranks, []
            for size in sizes:
                home = fill.index(min(fill))
                homes.append((home, fill[home] + gap))
                fill[home] += gap + size
            self.size = max(fill)
            offsets = [home * self.size + start for home, start in homes]
        else:
            offsets, end = [], 0
            for size in sizes:
                offsets.append(end + gap)
                end += gap + size
            self.size = -(-end // ranks)
        self.chunk = torch.zeros(self.size, dtype=values[0].dtype)
        self.params: list[Any] = []
        self.places: list[tuple[int, int]] = []
        for value, given, offset in zip(values, placements, offsets, strict=True):
            given[axis] = FlatShard(self.size, offset)
            layout = from_placements(mesh, given, value.dim())
            start, stop = layout.flat_interval(value.shape)
            first = offset + start - rank * self.size if stop > start else 0
            self.places.append((first, first + stop - start))
            view = self.chunk[slice(*self.places[-1])]
            view.copy_(_share(value, layout))
            self.params.append(nn.Parameter(DTensor.from_local(view, layout, shape=value.shape)))

    def give(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Gradients in a new chunk, as a reduction leaves them."""
        chunk = torch.zeros_like(self.chunk)
        for param, gradient, place in zip(self.params, gradients, self.places, strict=True):
            param.grad = None
            if gradient is not None:
                view = chunk[slice(*place)]
                view.copy_(_share(gradient, param.layout))
                param._local.grad = view


def _share(value: torch.Tensor, layout: Any) -> torch.Tensor:
    boxes = layout.boxes(value.shape)
    parts = [value[tuple(slice(*interval) for interval in box)].reshape(box_numel(box)) for box in boxes]
    return torch.cat(parts) if parts else value.new_empty(0)


@pytest.fixture(scope="session")
def unit() -> Callable[..., Unit]:
    """The maker of parameters on chunks."""
    return Unit
