"""How torch.distributed.checkpoint saves and loads our DTensors: its documented tensor protocol.

What a rank holds is written and read box by box: one of an ordinary layout, a few of a flat share, each a view of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hp_core.errors import LayoutError
from hp_core.geometry import Box, box_numel, box_shape

__all__ = ["CheckpointFace", "box_views"]


class CheckpointFace:
    """The protocol's three methods: what this rank writes, what it can read, and the tensor to read into."""

    _local: torch.Tensor
    _spec: Any

    def __create_write_items__(self, name: str, _: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        boxes = self._boxes()
        if not self._owns_checkpoint_piece():
            return []
        return [
            WriteItem(
                index=MetadataIndex(name, _offsets(box)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=_offsets(box), sizes=torch.Size(box_shape(box))),
                    properties=TensorProperties.create_from_tensor(self._local),
                    size=self._spec.shape,
                ),
            )
            for box in boxes
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(offsets=_offsets(box), sizes=torch.Size(box_shape(box))) for box in self._boxes()]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        local = self._local.detach()
        if self._spec.layout.flat is None:
            return local
        for box, view in box_views(local, self._boxes()):
            if _offsets(box) == index.offset:
                return view
        raise LayoutError(
            f"{index.fqn}: no box of this rank's flat share begins at {tuple(index.offset or ())}; it has {self._boxes()} of a "
            f"tensor laid out {self._spec}."
        )

    def _boxes(self) -> tuple[Box, ...]:
        """What this rank holds: one box, which may be empty; of flat shares as many as it takes."""
        layout = self._spec.layout
        if layout.is_partial():
            raise LayoutError(
                f"a tensor with a pending reduction ({layout}) can't be saved or loaded; call reduce_partial() first."
            )
        if layout.flat is not None:
            return layout.boxes(self._spec.shape)  # type: ignore[no-any-return]
        return (layout.bounds(self._spec.shape),)

    def _owns_checkpoint_piece(self) -> bool:
        """Whether this rank writes: of the ranks that hold the same piece, the one at coordinate 0, and only if not empty."""
        layout = self._spec.layout
        coordinate = layout.mesh.require_coordinate()
        replica = any(coordinate[axis] for axis in range(layout.mesh.ndim) if axis not in layout.sharded_axes)
        return not replica and self._local.numel() > 0


def box_views(local: torch.Tensor, boxes: Iterable[Box]) -> Iterator[tuple[Box, torch.Tensor]]:
    """The boxes that a flat share consists of, in order, each with the view of the local tensor that holds it."""
    start = 0
    for box in boxes:
        stop = start + box_numel(box)
        yield box, local[start:stop].view(box_shape(box))
        start = stop


def _offsets(box: Box) -> torch.Size:
    return torch.Size([start for start, _ in box])
