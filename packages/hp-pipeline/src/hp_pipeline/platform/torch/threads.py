"""What pairs of a backward and a forward need of torch: points of the graph that are told of both directions, a second thread
with the settings of the first, and random states.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.overrides import _pop_mode as pop_function_mode
from torch.overrides import _push_mode as push_function_mode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
from torch.utils._python_dispatch import _pop_mode as pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as push_dispatch_mode

from hp_core.dtensor.api import DTensor
from hp_core.platform import get_platform
from hp_core.platform.torch.streams import current_stream

__all__ = ["TorchThreadTools"]

_graph_task = torch._C._current_graph_task_id


class _SyncPoint(torch.autograd.Function):
    """The identity; its backward is told of, and comes once all gradients have arrived."""

    @staticmethod
    def forward(ctx: Any, backward: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.tell = backward
        return tuple(tensor.detach() for tensor in tensors)  # no views: these may be written to in place

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.tell()
        return None, *gradients


_apply: Callable[..., tuple[torch.Tensor, ...]] = _SyncPoint.apply


class TorchThreadTools:
    """See `hp_pipeline.platform.protocol.ThreadTools`."""

    def is_module(self, value: object) -> bool:
        """Whether it is one of the framework's modules."""
        return isinstance(value, torch.nn.Module)

    def replace_forward(
        self, module: torch.nn.Module, make: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Let the module call `make(its forward)` instead of its forward; its parameters keep their names."""
        module.forward = make(module.forward)

    def synced(self, tree: Any, backward: Callable[[], None]) -> Any:
        """The same values, at a point of the graph that calls `backward` when gradients pass it."""
        if not torch.is_grad_enabled():
            return tree
        leaves, structure = pytree.tree_flatten(tree)
        at = [number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not at:
            return tree
        # Of a distributed tensor it is the local one that has a place in the graph.
        inner = [leaf.to_local() if isinstance(leaf, DTensor) else leaf for leaf in (leaves[number] for number in at)]
        for number, tensor in zip(at, _apply(backward, *inner), strict=True):
            leaf = leaves[number]
            if isinstance(leaf, DTensor):
                leaves[number] = DTensor.from_local(tensor, leaf.layout, shape=leaf.shape)
            else:
                leaves[number] = tensor
        return pytree.tree_unflatten(leaves, structure)

    def like_this_thread(self, function: Callable[[], None]) -> Callable[[], None]:
        """The function with the calling thread's device, stream, modes and contexts, for another thread to call."""
        context = contextvars.copy_context()
        settings = _Settings()

        def call() -> None:
            with settings.restored():
                context.run(function)

        return call

    def in_backward(self) -> bool:
        """Whether the calling thread runs a backward."""
        return bool(_graph_task() != -1)

    def random_state(self) -> Any:
        """The state of the framework's generators: of the host and of the current device."""
        device = _accelerator()
        return torch.get_rng_state(), None if device is None else device.get_rng_state()

    def set_random_state(self, state: Any) -> None:
        """Go on from there."""
        host, on_device = state
        torch.set_rng_state(host)
        if on_device is not None:
            _accelerator().set_rng_state(on_device)

    def same_random_state(self, one: Any, other: Any) -> bool:
        """Whether the same numbers follow."""
        return all(
            torch.equal(mine, other_mine)
            for mine, other_mine in zip(one, other, strict=True)
            if mine is not None and other_mine is not None
        )


class _Settings:
    """What torch keeps for each thread, of the thread in which this is made."""

    def __init__(self) -> None:
        device = _accelerator()
        self._device = None if device is None else (device.current_device(), device.current_stream())
        self._stream = current_stream()
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        kinds = {"cpu", get_platform().processes.device_type}
        self._autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        self._cache = torch.is_autocast_cache_enabled()
        self._saved = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._function_modes, self._dispatch_modes = function_modes(), dispatch_modes()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, the calling thread has them."""
        with ExitStack() as stack:
            if self._device is not None:
                device = _accelerator()
                stack.enter_context(device.device(self._device[0]))
                stack.enter_context(device.stream(self._device[1]))
            stack.enter_context(self._stream)
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            stack.enter_context(self._autocasting())
            if self._saved is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._saved))
            for mode in self._function_modes:
                push_function_mode(mode)
                stack.callback(pop_function_mode)
            for mode in self._dispatch_modes:
                push_dispatch_mode(mode)
                stack.callback(pop_dispatch_mode)
            yield

    @contextmanager
    def _autocasting(self) -> Iterator[None]:
        # Not torch.autocast: where its outermost block of a thread ends it clears the casts of all threads.
        before = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind, *_ in self._autocast
        ]
        cache = torch.is_autocast_cache_enabled()
        self._set_autocast(self._autocast, self._cache)
        torch.autocast_increment_nesting()
        try:
            yield
        finally:
            torch.autocast_decrement_nesting()
            self._set_autocast(before, cache)

    @staticmethod
    def _set_autocast(settings: list[tuple[str, bool, torch.dtype]], cache: bool) -> None:
        for kind, enabled, dtype in settings:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(cache)


def _accelerator() -> Any:
    """The torch module of the platform's device; None on the CPU."""
    kind = get_platform().processes.device_type
    return None if kind == "cpu" else torch.get_device_module(kind)
