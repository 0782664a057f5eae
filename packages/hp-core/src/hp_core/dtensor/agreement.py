"""Agreement on what the parts of a tensor make up: their shapes are exchanged, and all ranks come to the same end."""

from __future__ import annotations

from collections.abc import Sequence

from hp_core.errors import LayoutError
from hp_core.layout import Layout
from hp_core.platform import get_platform
from hp_core.platform.protocol import Tensor

__all__ = ["agreed_global_shape", "combined_shape"]

_MOST_DIMS = 16


def agreed_global_shape(layout: Layout, local: Tensor, shape: Sequence[int] | None) -> tuple[int, ...]:
    """The global shape of which every rank of the mesh holds its part.

    Args:
        layout: how the tensor lies.
        local: this rank's part.
        shape: the global shape this rank was given, or None.

    Raises:
        LayoutError: the parts don't fit together, or not to the shapes given; on all ranks alike.
    """
    platform = get_platform()
    mesh = layout.mesh
    own = tuple(platform.tensors.shape(local))
    given = own if shape is None else tuple(shape)
    if max(len(own), len(given)) > _MOST_DIMS:
        raise LayoutError(f"run_check handles up to {_MOST_DIMS} dims, not {max(len(own), len(given))}.")
    message = [len(own), *own, *[0] * (_MOST_DIMS - len(own)), 0 if shape is None else 1, len(given), *given]
    message += [0] * (2 * _MOST_DIMS + 3 - len(message))
    group = mesh.get_group(mesh.mesh_dim_names)
    sent = platform.tensors.from_ints(message, local)
    received = platform.tensors.empty((group.size * len(message),), sent)
    platform.collectives.all_gather(received, sent, group)
    flat = platform.tensors.to_ints(received)
    parts: dict[int, tuple[int, ...]] = {}
    asked: dict[int, tuple[int, ...]] = {}
    for position, rank in enumerate(group.ranks):
        row = flat[position * len(message) : (position + 1) * len(message)]
        parts[rank] = tuple(row[1 : 1 + row[0]])
        if row[_MOST_DIMS + 1]:
            asked[rank] = tuple(row[_MOST_DIMS + 3 : _MOST_DIMS + 3 + row[_MOST_DIMS + 2]])
    return combined_shape(layout, parts, asked)


def combined_shape(
    layout: Layout, parts: dict[int, tuple[int, ...]], asked: dict[int, tuple[int, ...]]
) -> tuple[int, ...]:
    """The one global shape that fits all parts; a pure function of what all ranks know.

    Args:
        layout: how the tensor lies.
        parts: local shape by rank, of all ranks of the mesh.
        asked: global shape by rank, of those that were given one.
    """
    mesh = layout.mesh
    told = f"Local shapes by rank: {parts}" + (f"; global shapes given: {asked}." if asked else ".")
    if len({len(part) for part in parts.values()}) > 1 or len(set(asked.values())) > 1:
        raise LayoutError(
            f"the parts of a tensor laid out {layout} differ in number of dims or in the shape given. {told}"
        )
    if asked:
        shape = next(iter(asked.values()))
    elif layout.flat is not None:
        shape = layout.infer_global_shape(parts[mesh.rank_list[0]])  # refuses: nobody knows
    else:
        first = mesh.require_coordinate(mesh.rank_list[0])
        sizes = list(parts[mesh.rank_list[0]])
        for dim in range(len(sizes)):
            line = mesh.members(layout.axes_of(dim), mesh.rank_at(first))
            sizes[dim] = sum(parts[rank][dim] for rank in line)
        shape = tuple(sizes)
    wrong = {rank: part for rank, part in parts.items() if part != layout.local_shape(shape, rank)}
    if wrong:
        expected = {rank: layout.local_shape(shape, rank) for rank in wrong}
        raise LayoutError(
            f"the parts don't make up a tensor of shape {shape} laid out {layout}: ranks {sorted(wrong)} should hold {expected}. "
            f"{told} Cut the tensor in ceil-sized chunks (torch.chunk), or pass another layout."
        )
    return shape
