"""What torch code expects of a tensor, answered for a DTensor: metadata, autograd, values, copies."""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from hp_core.errors import LayoutError
from hp_core.geometry import contiguous_strides
from hp_core.platform.torch.backward import autograd_backward, settled
from hp_core.platform.torch.checkpoint import CheckpointFace
from hp_core.platform.torch.wrapper import new_dtensor

__all__ = ["TorchFace"]


class TorchFace(CheckpointFace):
    """What torch code expects of a tensor, answered from the local tensor and the global spec."""

    _local: torch.Tensor
    _spec: Any
    _is_param: bool

    # -- metadata ---------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """Global shape."""
        return self._spec.shape  # type: ignore[no-any-return]

    def size(self, dim: int | None = None) -> Any:
        """Global shape, or the size of one dim."""
        return self._spec.shape if dim is None else self._spec.shape[dim]

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self._spec.shape)

    def dim(self) -> int:
        """Number of dims."""
        return len(self._spec.shape)

    ndimension = dim

    def numel(self) -> int:
        """Number of elements of the global tensor."""
        return self._spec.shape.numel()  # type: ignore[no-any-return]

    nelement = numel

    @property
    def nbytes(self) -> int:
        """Bytes of the global tensor."""
        return self.numel() * self._local.element_size()

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        return self._local.dtype

    @property
    def device(self) -> torch.device:
        """Device of the local tensor."""
        return self._local.device

    def stride(self, dim: int | None = None) -> Any:
        """Strides that a dense global tensor would have, with the dims in memory order of the local tensor."""
        shape, local = self._spec.shape, self._local
        if local.is_contiguous() or local.dim() != len(shape):
            strides = contiguous_strides(shape)
        else:
            order = sorted(range(len(shape)), key=lambda d: (-local.stride()[d], d))
            dense = contiguous_strides([shape[d] for d in order])
            strides = tuple(dense[order.index(d)] for d in range(len(shape)))
        return strides if dim is None else strides[dim]

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        """Whether the local tensor is."""
        return self._local.is_contiguous(memory_format=memory_format)

    def is_floating_point(self) -> bool:
        """Whether the element type is floating point."""
        return self._local.is_floating_point()

    def is_complex(self) -> bool:
        """Whether the element type is complex."""
        return self._local.is_complex()

    def type(self, dtype: Any = None, non_blocking: bool = False) -> Any:
        """The local tensor's type as text; or, given an element type or its text, the tensor cast to it."""
        if dtype is None:
            return self._local.type()
        return self.to(dtype if isinstance(dtype, torch.dtype) else torch.empty(0).type(dtype).dtype)

    @property
    def is_sparse(self) -> bool:
        """Whether the local tensor is."""
        return self._local.is_sparse

    def element_size(self) -> int:
        """Bytes per element."""
        return self._local.element_size()

    def data_ptr(self) -> int:
        """Always 0, by which torch's tools know a tensor that wraps another: there is no memory of the global shape."""
        return 0

    def __dlpack__(self, **_: Any) -> NoReturn:
        raise LayoutError("a DTensor has no single block of memory; export .to_local() or .full_tensor() with DLPack.")

    def __dlpack_device__(self) -> NoReturn:
        self.__dlpack__()

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        self.numpy()

    def untyped_storage(self) -> Any:
        """Storage of the local tensor."""
        return self._local.untyped_storage()

    def __len__(self) -> int:
        if not self._spec.shape:
            raise TypeError("len() of a 0-d tensor")
        return int(self._spec.shape[0])

    # -- autograd ---------------------------------------------------------------------------------------------------

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are wanted."""
        return self._local.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._local.requires_grad = value
        self._forget()

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Set whether gradients are wanted; return self."""
        self.requires_grad = requires_grad
        return self

    @property
    def is_leaf(self) -> bool:
        """Whether no op made it."""
        return self._local.is_leaf

    @property
    def grad_fn(self) -> Any:
        """The node of the graph that made the local tensor."""
        return self._local.grad_fn

    @property
    def grad(self) -> Any:
        """The accumulated gradient, a DTensor laid out by the law of gradients, or None."""
        gradient = self._local.grad
        return None if gradient is None else new_dtensor(type(self), gradient, self._spec.gradient)

    @grad.setter
    def grad(self, value: Any) -> None:
        if value is None:
            self._local.grad = None
            return
        if not isinstance(value, type(self)):
            raise LayoutError(
                f"grad of a DTensor must be a DTensor laid out {self._spec.gradient.layout}, not {type(value).__name__}."
            )
        if value._spec.layout is not self._spec.gradient.layout:
            raise LayoutError(
                f"grad is laid out {value._spec.layout}, but the law of gradients asks for {self._spec.gradient.layout}; "
                f"redistribute it first."
            )
        self._local.grad = value._local

    @grad.deleter
    def grad(self) -> None:
        self._local.grad = None

    @property
    def data(self) -> Any:
        """The same values outside the graph."""
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        if not isinstance(value, type(self)) or value._spec.shape != self._spec.shape:
            raise LayoutError(
                f".data of a DTensor of shape {tuple(self.shape)} takes a DTensor of the same shape, got {value!r}."
            )
        self._local.data = value._local
        self._spec = value._spec
        self._forget()

    def detach(self) -> Any:
        """The same values outside the graph."""
        return new_dtensor(type(self), self._local.detach(), self._spec)

    def detach_(self) -> Any:
        """Cut this tensor from its graph."""
        self._local.detach_()
        self._forget()
        return self

    def backward(
        self, gradient: Any = None, retain_graph: bool | None = None, create_graph: bool = False, inputs: Any = None
    ) -> None:
        """Accumulate gradients, as `torch.Tensor.backward`; `gradient` is a DTensor, or left out for one element."""
        if inputs is None and gradient is not None and getattr(gradient, "_spec", None) is self._spec.gradient:
            root = settled((self,))[0]
            torch.autograd.backward(root._local, gradient._local, retain_graph, create_graph)
        else:
            autograd_backward((self,), (gradient,), retain_graph, create_graph, inputs=inputs)

    def register_hook(self, hook: Callable[[Any], Any]) -> Any:
        """Call `hook` with the gradient (a DTensor); what it returns, if anything, replaces the gradient."""
        self._untie()

        def on_local(gradient: torch.Tensor) -> torch.Tensor | None:
            result = hook(new_dtensor(type(self), gradient, self._spec.gradient))
            return None if result is None else result.redistribute(self._spec.gradient.layout)._local

        return self._local.register_hook(on_local)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> Any:
        """Call `hook` with this tensor after its gradient was accumulated."""
        return self._local.register_post_accumulate_grad_hook(lambda _: hook(self))

    def retain_grad(self) -> None:
        """Keep the gradient of this non-leaf tensor in `.grad`."""
        self._untie()
        self._local.retain_grad()

    @property
    def retains_grad(self) -> bool:
        """Whether the gradient of this non-leaf is kept."""
        return self._local.retains_grad

    # -- values -----------------------------------------------------------------------------------------------------

    def item(self) -> Any:
        """The global value of a one-element tensor."""
        return self.detach().full_tensor().item()

    def tolist(self) -> Any:
        """The global values."""
        return self.detach().full_tensor().tolist()

    def __bool__(self) -> bool:
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        return int(self.detach().full_tensor().__index__())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))  # type: ignore[attr-defined]

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refused: say whether the local or the global values are meant."""
        raise LayoutError("a DTensor has no single array; use .to_local().numpy() or .full_tensor().numpy().")

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else str(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        kind = "Parameter" if getattr(self, "_is_param", False) else "DTensor"
        local = textwrap.indent(repr(self._local.detach()), " " * 8).lstrip()
        flag = f", grad_fn={type(self.grad_fn).__name__}" if self.grad_fn is not None else ""
        flag = flag or (", requires_grad=True" if self.requires_grad else "")
        return f"{kind}(shape={tuple(self.shape)}, {self._spec.layout}{flag},\n  local={local})"

    # -- copying and saving -----------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("only DTensors created by the user (graph leaves) can be deep-copied; use .detach().")
        local = copy.deepcopy(self._local, memo)
        result = new_dtensor(type(self), local, self._spec)
        for name, value in self.__dict__.items():
            if name not in ("_local", "_spec", "_memo", "_origin"):
                setattr(result, name, copy.deepcopy(value, memo))
        memo[id(self)] = result
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        coordinate = self._spec.layout.mesh.require_coordinate()
        is_parameter = getattr(self, "_is_param", False)
        state = (
            self._local.detach(),
            self._spec.layout,
            tuple(self.shape),
            coordinate,
            self.requires_grad,
            is_parameter,
        )
        return self._rebuild, state

    # supplied by the framework-neutral methods
    _rebuild: Callable[..., Any]
    _forget: Callable[[], None]
    _untie: Callable[[], None]
    full_tensor: Callable[..., torch.Tensor]
    reduce_partial: Callable[[], Any]
    to: Callable[..., Any]
