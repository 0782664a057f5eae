"""torch's autograd behind the protocol: one function with a forward and a backward given as callables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["TorchAutograd"]

_grad_enabled = torch.is_grad_enabled
_graph_task = torch._C._current_graph_task_id


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, forward: Any, backward: Any) -> torch.Tensor:
        ctx.backward_of = backward
        ctx.set_materialize_grads(False)
        result: torch.Tensor = forward(tensor)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[Any, None, None]:
        return (None if gradient is None else ctx.backward_of(gradient)), None, None


# Past Function.apply, which only looks for functorch transforms: those don't see DTensors anyway.
_apply: Callable[..., torch.Tensor] = super(torch.autograd.Function, _WithGradient).apply


class TorchAutograd:
    """See `hp_core.platform.protocol.Autograd`."""

    keeps_gradients = True

    def kept_gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """`.grad` of a leaf."""
        return parameter.grad if parameter.is_leaf else None

    def needs_gradient(self, tensor: torch.Tensor) -> bool:
        """Whether gradients are recorded now and this tensor takes part."""
        return tensor.requires_grad and _grad_enabled()

    def with_gradient(
        self,
        tensor: torch.Tensor,
        forward: Callable[[torch.Tensor], torch.Tensor],
        backward: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """`forward(tensor)` with `backward` as its gradient."""
        result: torch.Tensor = _apply(tensor, forward, backward)
        return result

    def is_leaf(self, tensor: torch.Tensor) -> bool:
        """Whether no op of the graph made it."""
        return tensor.is_leaf

    def pending_share(self, tensor: torch.Tensor, keeps: bool) -> torch.Tensor:
        """A copy, or as many zeros, whose gradient is the tensor's own."""
        share = tensor.clone()
        if not keeps:
            # the clone saved nothing for its backward (the identity), so its values may go
            share.data.zero_()
        return share

    def version(self, tensor: torch.Tensor) -> int:
        """How often the storage was written to."""
        return 0 if tensor.is_inference() else tensor._version

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same storage as another node of the graph."""
        return tensor.view_as(tensor)

    def detach(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same storage outside the graph."""
        return tensor.detach()

    def unrecorded(self, function: Callable[[], None]) -> None:
        """Call it with gradients not recorded."""
        with torch.no_grad():
            function()

    def requires_grad(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor takes part in gradients."""
        return tensor.requires_grad

    def recomputes(self) -> bool:
        """Whether gradients are being recorded while the engine runs a backward."""
        return _graph_task() != -1 and _grad_enabled()
