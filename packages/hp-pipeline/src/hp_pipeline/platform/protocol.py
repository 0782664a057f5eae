"""What a framework must provide to run stages. Tensors, trees and modules are opaque above this line."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from hp_core.platform.protocol import Tensor

__all__ = ["Chunk", "Saved", "ThreadTools", "Tools"]


class Chunk(Protocol):
    """The graph of one forward of a stage, cut at the stage's inputs, until its backward is done."""

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The whole backward.

        Args:
            gradients: for each root the gradient that arrives; None where there is none.

        Returns:
            The gradients of the inputs. Those of weights have been added to the parameters'.
        """

    def backward_inputs(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The part of the backward that other stages wait for; keeps what `backward_weights` needs."""

    def backward_weights(self) -> None:
        """The rest: gradients of weights."""

    def release_inputs(self) -> None:
        """Let go of the inputs' memory; their gradients are made without it."""


class Saved(Protocol):
    """What the graph of one forward keeps for its backward, and where that is."""

    @property
    def on_host(self) -> int:
        """Bytes on the host."""

    def recording(self) -> AbstractContextManager[None]:
        """What is computed inside is kept here."""

    def stay(self, tensors: Iterable[Tensor]) -> None:
        """These, and all that share memory with them, aren't moved: others hold them as well."""

    def move_out(self) -> None:
        """To the host."""

    def move_in(self) -> None:
        """Back to where it was, with the same bits."""


class Tools(Protocol):
    """The framework's part of a stage."""

    def flatten(self, tree: Any) -> tuple[list[Any], Hashable]:
        """Leaves of nested containers, and their structure, which can be compared."""

    def unflatten(self, leaves: Sequence[Any], structure: Any) -> Any:
        """The containers again."""

    def is_plain(self, tensor: Tensor) -> bool:
        """Whether the tensor is one that can travel: no distributed, sparse or otherwise wrapped one."""

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        """Its shape."""

    def empty(self, shape: Sequence[int], dtype: str, device: Any) -> Tensor:
        """Uninitialised."""

    def zeros(self, shape: Sequence[int], dtype: str, device: Any) -> Tensor:
        """Zeros."""

    def numbers(self, values: Sequence[float], dtype: str, device: Any) -> Tensor:
        """A 1-D tensor of numbers."""

    def values(self, tensor: Tensor) -> list[Any]:
        """The numbers of a 1-D tensor."""

    def sendable(self, tensor: Tensor) -> Tensor:
        """The same values outside the graph, dense and row-major."""

    def nbytes(self, shape: Sequence[int], dtype: str) -> int:
        """Bytes of such a tensor."""

    def joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """The bytes of dense tensors one after the other, as a 1-D tensor of `uint8`."""

    def parted(self, joined: Tensor, shapes: Sequence[tuple[tuple[int, ...], str]]) -> list[Tensor]:
        """The tensors again, as views; each begins where its elements may begin."""

    def leaf(self, tensor: Tensor, requires_grad: bool) -> Tensor:
        """The same storage as a leaf of a new graph."""

    def device_of(self, module: Any) -> Any:
        """Where the module's parameters are; the platform's own device for one without."""

    def call(self, module: Any, args: Sequence[Any], kwargs: dict[str, Any], record: bool) -> Any:
        """The module's forward; without `record` nothing is kept for a backward."""

    def call_loss(self, function: Callable[..., Any], args: Sequence[Any], record: bool) -> Any:
        """The loss of an output, in the same way."""

    def is_scalar(self, value: Any) -> bool:
        """Whether it is a tensor of one element."""

    def scaled(self, tensor: Tensor, factor: float) -> Tensor:
        """The product with a tensor of one element, in the graph and without dims."""

    def detached(self, tensor: Tensor) -> Tensor:
        """Outside the graph."""

    def chunk(self, inputs: Sequence[Tensor], roots: Sequence[Tensor]) -> Chunk:
        """The graph between leaves and roots."""

    def saved(self) -> Saved:
        """What a graph to come keeps."""

    def added(self, left: Tensor, right: Tensor) -> Tensor:
        """The sum of two gradients; neither is changed."""

    def split(self, tensor: Tensor, dim: int, parts: int) -> list[Tensor]:
        """Cut a dim into parts whose sizes differ by at most one, larger ones first."""

    def parameter(self, module: Any, path: str) -> Tensor | None:
        """The parameter with this dotted name."""

    def local(self, tensor: Tensor) -> Tensor:
        """What this rank holds of a parameter or gradient, as a plain tensor outside the graph."""

    def take_gradient(self, parameter: Tensor) -> Tensor | None:
        """Its gradient, which is None from now on."""

    def set_gradient(self, parameter: Tensor, gradient: Tensor | None) -> None:
        """Make this its gradient; a plain tensor becomes one of the parameter's kind."""

    def copy_into(self, target: Tensor, source: Tensor) -> None:
        """Overwrite a parameter's local values."""


class ThreadTools(Protocol):
    """The framework's part of a backward and a forward that run as a pair."""

    def is_module(self, value: object) -> bool:
        """Whether it is one of the framework's modules."""

    def replace_forward(self, module: Any, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Let the module call `make(its forward)` instead of its forward; its parameters keep their names."""

    def synced(self, tree: Any, backward: Callable[[], None]) -> Any:
        """The same values, at a point of the graph that calls `backward` when all gradients have come back to it; where none
        are recorded nothing is added.
        """

    def like_this_thread(self, function: Callable[[], None]) -> Callable[[], None]:
        """The function with the calling thread's device, stream, modes and contexts, for another thread to call."""

    def in_backward(self) -> bool:
        """Whether the calling thread runs a backward."""

    def random_state(self) -> Any:
        """The state of the framework's generators: of the host and of the current device."""

    def set_random_state(self, state: Any) -> None:
        """Go on from there."""

    def same_random_state(self, one: Any, other: Any) -> bool:
        """Whether the same numbers follow."""
