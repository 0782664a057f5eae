"""What sharding units needs of a framework beyond `hp_core.platform`. Tensors, modules and handles are opaque."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from hp_core.platform.protocol import DType, Tensor

__all__ = ["Tools"]


class Tools(Protocol):
    """Storages that come and go under views that stay, hooks, and the engine of gradients."""

    # -- storages ---------------------------------------------------------------------------------------------------

    def flat(self, numel: int, dtype: DType, like: Tensor) -> Tensor:
        """An uninitialised 1-D tensor on the device of `like`."""

    def host(self, numel: int, dtype: DType, pin_memory: bool) -> Tensor:
        """An uninitialised 1-D tensor in the host's memory, pinned where there is a device that reads it."""

    def twin(self, tensor: Tensor) -> Tensor:
        """The same storage as another tensor, writes to which don't count as writes to `tensor`."""

    def free(self, tensor: Tensor) -> None:
        """Give the storage's memory back; views stay, and must not be read."""

    def allocate(self, tensor: Tensor) -> None:
        """Give the storage memory again, uninitialised; nothing happens if it has some."""

    def is_allocated(self, tensor: Tensor) -> bool:
        """Whether the storage has memory."""

    def view(self, flat: Tensor, start: int, shape: Sequence[int]) -> Tensor:
        """The elements from `start` on as a tensor of this shape."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy into a tensor without gradient, converting the element type; not recorded."""

    def add(self, target: Tensor, source: Tensor) -> None:
        """Add in place, converting the element type; neither has a gradient."""

    def zero(self, tensor: Tensor) -> None:
        """Fill a tensor without gradient with zeros."""

    def scale(self, tensor: Tensor, factor: float) -> None:
        """Multiply a tensor without gradient in place."""

    def rebase(self, tensor: Tensor, data: Tensor) -> None:
        """Let a leaf be on another storage, its identity and gradient kept."""

    def is_real(self, dtype: DType) -> bool:
        """Whether an element type is of real floating-point numbers."""

    def weak_table(self) -> Any:
        """A mapping by the identity of tensors that keeps none of them alive."""

    def address(self, tensor: Tensor) -> int:
        """Where in memory its values begin."""

    # -- parameters and modules -------------------------------------------------------------------------------------

    def adopt_class(self, module: Any, mixin: type) -> None:
        """Mix a class into the module's own."""

    def is_embedding(self, module: Any) -> bool:
        """Whether the module's backward doesn't read its parameters."""

    def before_forward(self, module: Any, hook: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        """Before each forward, ahead of other hooks, replace `(args, kwargs)` by what the hook returns (None: keep)."""

    def after_forward(self, module: Any, hook: Callable[[Any, Any, Any], Any]) -> None:
        """After each forward, also one that failed, replace the output by what the hook returns (None: keep)."""

    def before_state(self, module: Any, hook: Callable[..., None]) -> None:
        """Before the module's state is saved or loaded, call the hook."""

    # -- gradients --------------------------------------------------------------------------------------------------

    def recordable(self) -> AbstractContextManager[object]:
        """Tensors made inside can take part in gradients, whatever mode the caller is in."""

    def records(self) -> bool:
        """Whether gradients are recorded now."""

    def in_backward(self) -> bool:
        """Whether the engine is running a backward on this thread."""

    def running_call(self) -> Any:
        """The call of a module from whose hook this is called."""

    def is_running(self, call: Any) -> bool:
        """Whether that call hasn't returned or raised."""

    def failing(self) -> bool:
        """Whether an exception is being handled."""

    def tensors(self, value: Any) -> list[Tensor]:
        """All tensors in a structure of containers, in order; local tensors of distributed ones."""

    def on_gradient(self, tensors: Iterable[Tensor], hook: Callable[[Tensor], None]) -> bool:
        """Call the hook when the gradient of one of them is known, before it is used; whether any needs a gradient."""

    def on_accumulated(self, leaf: Tensor, hook: Callable[[Tensor], None]) -> Any:
        """Call the hook after a backward has added to the leaf's gradient."""

    def will_accumulate(self, leaf: Tensor) -> bool:
        """Whether the backward that runs now adds to a leaf's gradient; not so where gradients of other tensors are asked for."""

    def at_end_of_backward(self, function: Callable[[], None]) -> None:
        """Call it when the backward that runs now has ended."""

    def cast(self, value: Any, dtype: DType) -> Any:
        """All floating-point tensors of a structure in another element type, the structure kept."""

    def before_optimizers_step(self, hook: Callable[[Any, list[Tensor]], None]) -> None:
        """Before any optimizer of the framework steps, call the hook with it and its parameters. Said once counts."""
