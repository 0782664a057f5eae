"""What MindSpore code expects of a tensor, answered for a DTensor: metadata, indexing, values, copies.

A DTensor shares its local tensor's storage, so whatever MindSpore answers without asking `__fallback__` would silently
mean the local tensor. Those methods are answered or refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NoReturn

from mindspore import ops

from hp_core.errors import LayoutError, ShardingRuleError
from hp_core.geometry import contiguous_strides
from hp_core.platform.mindspore.initializers import initialize
from hp_core.platform.mindspore.op import MindSporeOp
from hp_core.platform.mindspore.wrapper import new_dtensor
from hp_core.platform.select import get_platform

__all__ = ["REFUSED", "MindSporeFace"]

_GETITEM = MindSporeOp("getitem", "getitem", lambda tensor, index: tensor[index])


REFUSED = (
    "assign_value", "cauchy", "fill", "get_bytes", "isreal", "resize", "set_", "set_dtype", "to_dlpack",
)  # fmt: skip
"""Methods that MindSpore would run on the local tensor without telling, and that mean nothing of the global one."""


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise ShardingRuleError(
            f"{name}() has no meaning for a DTensor of shape {tuple(self.shape)} laid out {self._spec.layout}: it would work on "
            f"this rank's part alone. Call it on .to_local() or on .full_tensor()."
        )

    refuse.__name__ = name
    return refuse


class MindSporeFace:
    """What MindSpore code expects of a tensor, answered from the local tensor and the global spec."""

    _local: Any
    _spec: Any
    _dispatch: Callable[..., Any]

    # -- metadata ---------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self._spec.shape  # type: ignore[no-any-return]

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self._spec.shape)

    def dim(self) -> int:
        """Number of dims."""
        return len(self._spec.shape)

    def numel(self) -> int:
        """Number of elements of the global tensor."""
        return prod(self._spec.shape)

    nelement = numel
    ndimension = dim

    @property
    def size(self) -> int:
        """Number of elements of the global tensor."""
        return prod(self._spec.shape)

    @property
    def dtype(self) -> Any:
        """Element type."""
        return self._local.dtype

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self._local.itemsize  # type: ignore[no-any-return]

    @property
    def nbytes(self) -> int:
        """Bytes of the global tensor."""
        return self.numel() * self.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one element to the next of a dense global tensor."""
        return tuple(stride * self.itemsize for stride in contiguous_strides(self._spec.shape))

    def stride(self, dim: int | None = None) -> Any:
        """Elements from one element to the next of a dense global tensor."""
        strides = contiguous_strides(self._spec.shape)
        return strides if dim is None else strides[dim]

    def is_contiguous(self) -> bool:
        """Whether the local tensor is."""
        return self._local.is_contiguous()  # type: ignore[no-any-return]

    def contiguous(self) -> Any:
        """Itself, or a DTensor whose local tensor is dense."""
        if self._local.is_contiguous():
            return self
        return new_dtensor(type(self), self._local.contiguous(), self._spec)

    def __len__(self) -> int:
        if not self._spec.shape:
            raise TypeError("len() of a 0-d tensor")
        return int(self._spec.shape[0])

    # -- gradients --------------------------------------------------------------------------------------------------

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are wanted."""
        return bool(self._local._requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Set whether gradients are wanted; return self."""
        self._local.requires_grad_(requires_grad)
        self._forget()
        return self

    def detach(self) -> Any:
        """The same values outside the graph."""
        return new_dtensor(type(self), ops.stop_gradient(self._local), self._spec)

    def register_hook(self, hook: Callable[[Any], Any]) -> Any:
        """Call `hook` with the gradient (a DTensor); what it returns replaces the gradient."""
        self._untie()

        def on_local(gradient: Any) -> Any:
            result = hook(new_dtensor(type(self), gradient, self._spec.gradient))
            return gradient if result is None else result.redistribute(self._spec.gradient.layout)._local

        return self._local.register_hook(on_local)

    @property
    def data(self) -> Any:
        """The same values outside the graph."""
        return self.detach()

    def value(self) -> Any:
        """Itself."""
        return self

    def set_data(self, data: Any, slice_shape: bool = False) -> Any:
        """Give it other values: a plain tensor is the global value, one that an initializer describes is drawn in pieces.

        Returns:
            Itself.
        """
        if type(data) is not type(self) and data.has_init:
            initialize(self, data.init)
            return self
        if tuple(data.shape) != tuple(self.shape):
            raise LayoutError(f"set_data() of a DTensor of shape {tuple(self.shape)} got shape {tuple(data.shape)}.")
        if type(data) is not type(self):
            tools, layout = get_platform().tensors, self._spec.layout
            own = tools.clone(tools.crop(data, layout.bounds(tuple(self.shape))))
            data = type(self).from_local(own, layout, shape=tuple(self.shape))
        self.copy_(data)
        return self

    # -- indexing ---------------------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        return self._dispatch(_GETITEM, (self, index), {})

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise ShardingRuleError(
            "MindSpore's CPU back end has no views to write to, so x[...] = value isn't there for DTensors; compute the result "
            "with where(), cat() or masked_fill()."
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))  # type: ignore[attr-defined]

    def type_as(self, other: Any) -> Any:
        """Cast to the element type of another tensor."""
        return self.astype(other.dtype)

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
        return int(self.item())

    def asnumpy(self) -> NoReturn:
        """Refused: say whether the local or the global values are meant."""
        raise LayoutError("a DTensor has no single array; use .to_local().asnumpy() or .full_tensor().asnumpy().")

    numpy = asnumpy

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        self.asnumpy()

    def __repr__(self) -> str:
        flag = ", requires_grad=True" if self.requires_grad else ""
        return f"DTensor(shape={tuple(self.shape)}, {self._spec.layout}, local={self._local!r}{flag})"

    __str__ = __repr__

    def __hash__(self) -> int:
        return id(self)

    # -- copying and saving -----------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = new_dtensor(type(self), self._local.copy(), self._spec)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        coordinate = self._spec.layout.mesh.require_coordinate()
        state = (self._local, self._spec.layout, tuple(self.shape), coordinate, self.requires_grad, False)
        return self._rebuild, state

    locals().update({name: _refusing(name) for name in REFUSED})

    # supplied by the framework-neutral methods
    _rebuild: Callable[..., Any]
    _forget: Callable[[], None]
    _untie: Callable[[], None]
    full_tensor: Callable[..., Any]
    from_local: Callable[..., Any]
    astype: Callable[..., Any]
    copy_: Callable[..., Any]
