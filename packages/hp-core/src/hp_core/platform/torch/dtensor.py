"""The torch subclass behind `DTensor`: a wrapper of global size around a local tensor, with metadata and autograd of its own.

It is made by `define_dtensor`, which is *given* the dispatcher, so that nothing here imports upward. Ops are intercepted
at function level (`__torch_function__`) and run on local tensors; torch's autograd records those.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from hp_core.errors import LayoutError, ShardingRuleError
from hp_core.geometry import box_shape, contiguous_strides

__all__ = ["define_dtensor", "handler_of", "new_dtensor"]

_make_wrapper: Any = torch.Tensor._make_wrapper_subclass


def new_dtensor(cls: type, local: torch.Tensor, spec: Any) -> Any:
    """Wrap a local tensor. This is the hot end of every op: two attributes, nothing else."""
    tensor = _make_wrapper(cls, spec.shape, dtype=spec.dtype, device=local.device)
    tensor._local = local
    tensor._spec = spec
    return tensor


def define_dtensor(dispatch: Callable[..., Any], methods: type) -> type:
    """The class `DTensor`: `methods` (framework-neutral) over torch's metadata and autograd, over `torch.Tensor`.

    Args:
        dispatch: called as `dispatch(function, args, kwargs)` for every intercepted function.
        methods: mixin with layout, redistribution and conversion.
    """
    base: Any = torch.Tensor

    class DTensor(methods, _TorchFace, base):  # type: ignore[misc]
        __doc__ = methods.__doc__

        @classmethod
        def __torch_function__(
            cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            return dispatch(function, args, kwargs)

        @classmethod
        def __torch_dispatch__(
            cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> NoReturn:
            raise ShardingRuleError(
                f"{function} reached a DTensor below the level at which DTensors are intercepted (a C++ path that skips "
                f"__torch_function__). Call it on .to_local(), or on .full_tensor()."
            )

    DTensor.__module__ = "hp_core.dtensor.api"
    DTensor.__qualname__ = "DTensor"
    return DTensor


class _TorchFace:
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
        """Address of the local tensor."""
        return self._local.data_ptr()

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
            root = _settled((self,))[0]
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
        flag = ", requires_grad=True" if self.requires_grad else ""
        return f"DTensor(shape={tuple(self.shape)}, {self._spec.layout}, local={self._local!r}{flag})"

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

    # -- torch distributed checkpoint (its documented tensor protocol) -----------------------------------------------

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
                    size=self.shape,
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
        box = layout.bounds(self.shape)
        return torch.Size([start for start, _ in box]), torch.Size(box_shape(box))

    def _owns_checkpoint_piece(self) -> bool:
        """Whether this rank writes: of the ranks that hold the same piece, the one at coordinate 0, and only if not empty."""
        layout = self._spec.layout
        coordinate = layout.mesh.require_coordinate()
        replica = any(coordinate[axis] for axis in range(layout.mesh.ndim) if axis not in layout.sharded_axes)
        return not replica and self._local.numel() > 0

    # supplied by the framework-neutral methods
    _rebuild: Callable[..., Any]
    _forget: Callable[[], None]
    _untie: Callable[[], None]
    full_tensor: Callable[..., torch.Tensor]
    reduce_partial: Callable[[], Any]
    to: Callable[..., Any]


def handler_of(function: Any) -> Callable[..., Any] | None:
    """What answers an intercepted function that is no op on values; None if it is one.

    A method that the class has itself answers its unbound form and its torch.* twin as well; other attributes are the
    local tensor's.
    """
    known = _HANDLERS.get(function)
    if known is not None:
        return known
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        attribute = function.__self__.__name__
        if attribute in _TorchFace.__dict__:
            return getattr(_TorchFace.__dict__[attribute], name)  # type: ignore[no-any-return]
        if name == "__get__" and attribute not in ("T", "mT", "H", "mH", "real", "imag"):
            return lambda tensor, *_: getattr(tensor._local, attribute)
        return None
    return _TorchFace.__dict__.get(name) if name != "detach" and callable(_TorchFace.__dict__.get(name)) else None


def autograd_backward(
    tensors: Sequence[Any],
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """`torch.autograd.backward` on DTensors: the same on their local tensors."""
    tensors = _settled((tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors))
    given = grad_tensors if grad_tensors is not None else grad_variables
    gradients = (given,) * len(tensors) if given is None or isinstance(given, torch.Tensor) else tuple(given)
    if inputs is not None:
        inputs = [_graph_input(tensor) for tensor in ((inputs,) if isinstance(inputs, torch.Tensor) else inputs)]
    torch.autograd.backward(
        [getattr(tensor, "_local", tensor) for tensor in tensors],
        [_root_gradient(tensor, gradient) for tensor, gradient in zip(tensors, gradients, strict=True)],
        retain_graph,
        create_graph,
        inputs=inputs,
    )


def autograd_grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """`torch.autograd.grad` on DTensors: the same on their local tensors, the results laid out by the law."""
    outputs = _settled((outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs))
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    given = (
        (grad_outputs,) * len(outputs)
        if grad_outputs is None or isinstance(grad_outputs, torch.Tensor)
        else grad_outputs
    )
    results = torch.autograd.grad(
        [getattr(tensor, "_local", tensor) for tensor in outputs],
        [_graph_input(tensor) for tensor in inputs],
        [_root_gradient(tensor, gradient) for tensor, gradient in zip(outputs, given, strict=True)],
        *args,
        **kwargs,
    )
    return tuple(
        new_dtensor(type(tensor), result, tensor._spec.gradient)
        if result is not None and isinstance(tensor, _TorchFace)
        else result
        for tensor, result in zip(inputs, results, strict=True)
    )


def _settled(roots: tuple[Any, ...]) -> tuple[Any, ...]:
    """Roots whose pending reductions are sums only, to which every rank's addend has the dense gradient.

    Of a pending maximum the gradient belongs to the ranks that hold it, of an average each rank has its share: those
    reductions are done first, since that is where gradients are dealt out.
    """
    for root in roots:
        if isinstance(root, _TorchFace) and root._spec.layout.partials and root._spec.layout.partials[0][1] != "sum":
            break
    else:
        return roots
    with torch.enable_grad():
        return tuple(
            root.reduce_partial()
            if isinstance(root, _TorchFace) and any(reduce_op != "sum" for _, reduce_op in root._spec.layout.partials)
            else root
            for root in roots
        )


def _root_gradient(tensor: Any, gradient: Any) -> torch.Tensor | None:
    """The gradient to start from, on the local tensor; a lone element starts from one, whatever its layout."""
    if not isinstance(tensor, _TorchFace):
        return gradient  # type: ignore[no-any-return]
    if gradient is None:
        if tensor.numel() != 1:
            raise RuntimeError(
                f"grad can be implicitly created only for scalar outputs, not for a DTensor of shape {tuple(tensor.shape)}."
            )
        return torch.ones_like(tensor._local)
    if not isinstance(gradient, _TorchFace):
        if gradient.numel() == 1 and tensor.numel() == 1:
            return gradient.expand(tensor._local.shape)  # type: ignore[no-any-return]
        raise LayoutError(
            f"the gradient of a DTensor must be a DTensor, got {type(gradient).__name__}; distribute_tensor() it."
        )
    return gradient.redistribute(tensor._spec.gradient.layout)._local  # type: ignore[attr-defined, no-any-return]


def _graph_input(tensor: Any) -> torch.Tensor:
    if isinstance(tensor, _TorchFace):
        if tensor._has_tied_use():  # type: ignore[attr-defined]
            raise ShardingRuleError(
                "the gradient of this gathered DTensor was tied to its sharded source when it was used, so it can't be asked "
                "for afterwards; call .retain_grad() right after redistribute(), or ask for the source's gradient."
            )
        return tensor._local
    return tensor  # type: ignore[no-any-return]


_HANDLERS: dict[Any, Callable[..., Any]] = {
    torch.autograd.backward: autograd_backward,
    torch.autograd.grad: autograd_grad,
    torch.Tensor.detach: _TorchFace.detach,
    torch.detach: _TorchFace.detach,
    torch.is_inference: lambda tensor: tensor._local.is_inference(),
    torch.is_nonzero: lambda tensor: bool(tensor.item()),
    torch.is_same_size: lambda left, right: tuple(left.shape) == tuple(right.shape),
    torch.result_type: lambda *operands: torch.result_type(*[getattr(value, "_local", value) for value in operands]),
    torch.Tensor.is_inference: lambda tensor: tensor._local.is_inference(),
    torch.Tensor.storage_offset: lambda tensor: tensor._local.storage_offset(),
    torch.Tensor.is_signed: lambda tensor: tensor._local.is_signed(),
    torch.is_signed: lambda tensor: tensor._local.is_signed(),
    torch.Tensor.is_set_to: lambda left, right: left._local.is_set_to(right._local),
    torch.Tensor.is_shared: lambda tensor: tensor._local.is_shared(),
    torch.Tensor.is_pinned: lambda tensor, *args: tensor._local.is_pinned(*args),
}
