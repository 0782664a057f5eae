"""`Feed`: what a rank was called with, cut into micro-batches. The runtime takes from it, and knows nothing of batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hp_core.platform import get_platform
from hp_core.platform.protocol import Tensor
from hp_pipeline.platform import get_tools

__all__ = ["Feed"]


@dataclass
class Feed:
    """What a rank was called with, cut into micro-batches.

    Attributes:
        args: positional inputs of the first stage.
        kwargs: keyword inputs.
        targets: what the loss is made with; None for a loss of the output alone.
        loss_fn: makes the loss; None where the output is the loss.
        rows: rows of the whole batch; None if none was cut.
        weight: from micro-batch and rows of the whole batch, what its loss is multiplied by.
        train: whether there are backwards.
    """

    args: Sequence[Sequence[Any]] = ()
    kwargs: Sequence[Mapping[str, Any]] = ()
    targets: Sequence[Any] | None = None
    loss_fn: Callable[..., Any] | None = None
    rows: int | None = None
    weight: Callable[[int, int | None], float] = lambda micro_batch, rows: 1.0
    train: bool = True

    def tensors(self, micro_batch: int) -> list[Tensor]:
        """All tensors among the inputs and the target of a micro-batch; they are the caller's."""
        tools, is_tensor = get_tools(), get_platform().tensors.is_tensor
        target = None if self.targets is None else self.targets[micro_batch]
        leaves, _ = tools.flatten((tuple(self.args[micro_batch]), dict(self.kwargs[micro_batch]), target))
        return [leaf for leaf in leaves if is_tensor(leaf)]
