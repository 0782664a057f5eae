"""The tools of stages on torch: pytrees, leaves and gradients."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import prod
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hp_core.platform import get_platform
from hp_pipeline.platform.torch.chunk import TorchChunk
from hp_pipeline.platform.torch.saved import TorchSaved

__all__ = ["TorchTools"]


_LEAF = pytree.tree_flatten(0)[1]
"""The structure of what is most often passed on: a single tensor."""


class TorchTools:
    """See `hp_pipeline.platform.protocol.Tools`."""

    def flatten(self, tree: Any) -> tuple[list[Any], Hashable]:
        """Leaves of nested containers, and their structure, which can be compared."""
        return ([tree], _LEAF) if isinstance(tree, torch.Tensor) else pytree.tree_flatten(tree)

    def unflatten(self, leaves: Sequence[Any], structure: Any) -> Any:
        """The containers again."""
        return leaves[0] if structure is _LEAF else pytree.tree_unflatten(list(leaves), structure)

    def is_plain(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is one that can travel: no distributed, sparse or otherwise wrapped one."""
        return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided

    def shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Its shape."""
        return tuple(tensor.shape)

    def empty(self, shape: Sequence[int], dtype: str, device: Any) -> torch.Tensor:
        """Uninitialised."""
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=device)

    def zeros(self, shape: Sequence[int], dtype: str, device: Any) -> torch.Tensor:
        """Zeros."""
        return torch.zeros(tuple(shape), dtype=getattr(torch, dtype), device=device)

    def numbers(self, values: Sequence[float], dtype: str, device: Any) -> torch.Tensor:
        """A 1-D tensor of numbers."""
        return torch.tensor(values, dtype=getattr(torch, dtype), device=device)

    def values(self, tensor: torch.Tensor) -> list[Any]:
        """The numbers of a 1-D tensor."""
        return tensor.tolist()

    def sendable(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values outside the graph, dense and row-major."""
        return tensor.detach().contiguous()

    def nbytes(self, shape: Sequence[int], dtype: str) -> int:
        """Bytes of such a tensor."""
        return prod(shape) * getattr(torch, dtype).itemsize  # type: ignore[no-any-return]

    def joined(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The bytes of dense tensors one after the other."""
        return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])

    def parted(self, joined: torch.Tensor, shapes: Sequence[tuple[tuple[int, ...], str]]) -> list[torch.Tensor]:
        """The tensors again, as views."""
        parts = joined.split([self.nbytes(shape, dtype) for shape, dtype in shapes])
        return [
            part.view(getattr(torch, dtype)).view(shape) for part, (shape, dtype) in zip(parts, shapes, strict=True)
        ]

    def leaf(self, tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
        """The same storage as a leaf of a new graph."""
        return tensor.detach().requires_grad_(requires_grad)

    def device_of(self, module: Any) -> Any:
        """Where the module's parameters are; the platform's own device for one without."""
        parameter = next(module.parameters(), None)
        return torch.device(get_platform().processes.device_type) if parameter is None else parameter.device

    def call(self, module: Any, args: Sequence[Any], kwargs: dict[str, Any], record: bool) -> Any:
        """The module's forward; without `record` nothing is kept for a backward."""
        with torch.set_grad_enabled(record):
            return module(*args, **kwargs)

    def call_loss(self, function: Callable[..., Any], args: Sequence[Any], record: bool) -> Any:
        """The loss of an output, in the same way."""
        with torch.set_grad_enabled(record):
            return function(*args)

    def is_scalar(self, value: Any) -> bool:
        """Whether it is a tensor of one element."""
        return isinstance(value, torch.Tensor) and value.numel() == 1

    def scaled(self, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        """The product with a tensor of one element, in the graph and without dims."""
        with torch.enable_grad():
            return tensor.reshape(()) if factor == 1 else tensor.reshape(()) * factor

    def detached(self, tensor: torch.Tensor) -> torch.Tensor:
        """Outside the graph."""
        return tensor.detach()

    def chunk(self, inputs: Sequence[torch.Tensor], roots: Sequence[torch.Tensor]) -> TorchChunk:
        """The graph between leaves and roots."""
        return TorchChunk(inputs, roots)

    def saved(self) -> TorchSaved:
        """What a graph to come keeps."""
        return TorchSaved()

    def added(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """The sum of two gradients; neither is changed."""
        return left.detach() + right.detach()

    def split(self, tensor: torch.Tensor, dim: int, parts: int) -> list[torch.Tensor]:
        """Cut a dim into parts whose sizes differ by at most one, larger ones first."""
        return list(torch.tensor_split(tensor, parts, dim))

    def parameter(self, module: Any, path: str) -> torch.Tensor | None:
        """The parameter with this dotted name."""
        return dict(module.named_parameters(remove_duplicate=False)).get(path)

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """What this rank holds of a parameter or gradient, as a plain tensor outside the graph."""
        tensor = tensor.detach()
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    def take_gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Its gradient, which is None from now on."""
        gradient, parameter.grad = parameter.grad, None
        return gradient

    def set_gradient(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Make this its gradient; a plain tensor becomes one of the parameter's kind."""
        if gradient is not None and hasattr(parameter, "to_local") and not hasattr(gradient, "to_local"):
            whole = torch.zeros_like(parameter.detach())
            whole.to_local().copy_(gradient)  # type: ignore[attr-defined]
            gradient = whole
        parameter.grad = gradient

    def copy_into(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Overwrite a parameter's local values."""
        self.local(target).copy_(source)
