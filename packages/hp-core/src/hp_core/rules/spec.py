"""The specification of a distributed tensor: layout, global shape and element type, interned so that it is a cheap cache key."""

from __future__ import annotations

from typing import Any

from hp_core.layout import Layout
from hp_core.platform import get_platform
from hp_core.platform.protocol import DType

__all__ = ["TensorSpec", "spec_of"]


class TensorSpec:
    """What is known of a distributed tensor without looking at its values. Made by `spec_of`; equal specs are one object.

    Attributes:
        layout: how it lies on its mesh.
        shape: global shape, in the framework's own type.
        dtype: the framework's element type.
    """

    __slots__ = ("_gradient", "dtype", "layout", "shape")

    layout: Layout
    shape: tuple[int, ...]
    dtype: DType

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def gradient(self) -> TensorSpec:
        """Specification of the gradient, by the law of gradients."""
        if self._gradient is None:
            self._gradient: TensorSpec | None = spec_of(self.layout.gradient, self.shape, self.dtype)
        return self._gradient

    def __reduce__(self) -> tuple[Any, ...]:
        return spec_of, (self.layout, tuple(self.shape), self.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorSpec:
        return self

    def __repr__(self) -> str:
        return f"{tuple(self.shape)} {get_platform().tensors.dtype_name(self.dtype)} {self.layout}"


_interned: dict[tuple[Layout, tuple[int, ...], DType], TensorSpec] = {}


def spec_of(layout: Layout, shape: tuple[int, ...], dtype: DType) -> TensorSpec:
    """The one specification of these values.

    Raises:
        LayoutError: the shape contradicts the layout.
    """
    key = (layout, tuple(shape), dtype)
    spec = _interned.get(key)
    if spec is None:
        layout.check_shape(shape)
        spec = object.__new__(TensorSpec)
        spec.layout, spec.shape, spec.dtype = layout, get_platform().tensors.as_shape(shape), dtype
        spec._gradient = spec if layout.gradient is layout else None
        spec = _interned.setdefault(key, spec)
    return spec
