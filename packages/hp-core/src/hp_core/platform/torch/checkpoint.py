"""How torch.distributed.checkpoint saves and loads our DTensors: its documented tensor protocol."""

from __future__ import annotations

from typing import Any

import torch

from hp_core.errors import LayoutError
from hp_core.geometry import box_shape

__all__ = ["CheckpointFace"]


class CheckpointFace:
    """The protocol's three methods: what this rank writes, what it can read, and the tensor to read into."""

    _local: torch.Tensor
    _spec: Any

    def __create_write_items__(self, name: str, _: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        offsets, sizes = self._chunk()
        if not self._owns_checkpoint_piece():
            return []
        return [
            WriteItem(
                index=MetadataIndex(name, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
                    properties=TensorProperties.create_from_tensor(self._local),
                    size=self._spec.shape,
                ),
            )
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        offsets, sizes = self._chunk()
        return [ChunkStorageMetadata(offsets=offsets, sizes=sizes)]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self._local.detach()

    def _chunk(self) -> tuple[torch.Size, torch.Size]:
        layout = self._spec.layout
        if layout.is_partial():
            raise LayoutError(
                f"a tensor with a pending reduction ({layout}) can't be saved or loaded; call reduce_partial() first."
            )
        box = layout.bounds(self._spec.shape)
        return torch.Size([start for start, _ in box]), torch.Size(box_shape(box))

    def _owns_checkpoint_piece(self) -> bool:
        """Whether this rank writes: of the ranks that hold the same piece, the one at coordinate 0, and only if not empty."""
        layout = self._spec.layout
        coordinate = layout.mesh.require_coordinate()
        replica = any(coordinate[axis] for axis in range(layout.mesh.ndim) if axis not in layout.sharded_axes)
        return not replica and self._local.numel() > 0
