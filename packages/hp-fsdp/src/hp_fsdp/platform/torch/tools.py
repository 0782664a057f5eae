"""Storages, hooks and gradients on torch: see `hp_fsdp.platform.protocol.Tools`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from math import prod
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["TorchTools"]

_graph_task = torch._C._current_graph_task_id
_classes: dict[tuple[type, type], type] = {}
_PACKAGE = "hp_fsdp"


class TorchTools:
    """See `hp_fsdp.platform.protocol.Tools`."""

    # -- storages ---------------------------------------------------------------------------------------------------

    def flat(self, numel: int, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
        """An uninitialised 1-D tensor."""
        return torch.empty(numel, dtype=dtype, device=like.device)

    def host(self, numel: int, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        """An uninitialised 1-D tensor in the host's memory."""
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=pin_memory and torch.cuda.is_available())

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same storage with another version counter."""
        return tensor.data

    def free(self, tensor: torch.Tensor) -> None:
        """Give the storage's memory back."""
        tensor.untyped_storage().resize_(0)

    def allocate(self, tensor: torch.Tensor) -> None:
        """Give the storage memory again."""
        storage = tensor.untyped_storage()
        if storage.size() == 0:
            storage.resize_(tensor.numel() * tensor.element_size())

    def is_allocated(self, tensor: torch.Tensor) -> bool:
        """Whether the storage has memory."""
        return tensor.untyped_storage().size() > 0 or tensor.numel() == 0

    def view(self, flat: torch.Tensor, start: int, shape: Sequence[int]) -> torch.Tensor:
        """A view of the elements from `start` on."""
        return flat[start : start + prod(shape)].view(shape)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy without a record."""
        target.copy_(source.detach())

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Add without a record."""
        target.add_(source)

    def zero(self, tensor: torch.Tensor) -> None:
        """Zeros, without a record."""
        tensor.zero_()

    def scale(self, tensor: torch.Tensor, factor: float) -> None:
        """Multiply without a record."""
        tensor.mul_(factor)

    def rebase(self, tensor: torch.Tensor, data: torch.Tensor) -> None:
        """Let a leaf be on another storage."""
        tensor.data = data

    def is_real(self, dtype: torch.dtype) -> bool:
        """Whether an element type is one that policies convert."""
        return dtype.is_floating_point

    def weak_table(self) -> WeakIdKeyDictionary:
        """Values by the identity of tensors."""
        return WeakIdKeyDictionary()

    def address(self, tensor: torch.Tensor) -> int:
        """Where the values lie."""
        return tensor.data_ptr()

    # -- parameters and modules -------------------------------------------------------------------------------------

    def adopt_class(self, module: nn.Module, mixin: type) -> None:
        """Give the module a class of both; classes are made once."""
        own = type(module)
        made = _classes.get((own, mixin))
        if made is None:
            body = {
                "__module__": own.__module__,
                "__doc__": own.__doc__,
                "__reduce_ex__": _reduce,
                "_parts": (mixin, own),
            }
            made = _classes[own, mixin] = type(f"HSDP{own.__name__}", (mixin, own), body)
        module.__class__ = made

    def is_embedding(self, module: nn.Module) -> bool:
        """Whether it is an embedding, whose backward needs the indices only."""
        own = nn.Embedding if isinstance(module, nn.Embedding) else nn.EmbeddingBag
        if not isinstance(module, own) or type(module).forward is not own.forward or module.max_norm is not None:
            return False
        return own is nn.Embedding or module.mode != "sum"  # weights of samples have gradients that depend on the table

    def before_forward(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        """Before each forward, ahead of other hooks."""
        module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)

    def after_forward(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        """After each forward, behind other hooks, also when it raised."""
        module.register_forward_hook(hook, always_call=True)

    def before_state(self, module: nn.Module, hook: Callable[..., None]) -> None:
        """Before `state_dict` and `load_state_dict`."""
        module.register_state_dict_pre_hook(hook)
        module.register_load_state_dict_pre_hook(hook)

    # -- gradients --------------------------------------------------------------------------------------------------

    def recordable(self) -> Any:
        """Tensors made inside take part in graphs, also in inference mode."""
        return torch.inference_mode(False)

    def records(self) -> bool:
        """Whether gradients are recorded now."""
        return torch.is_grad_enabled()

    def in_backward(self) -> bool:
        """Whether the engine is running a backward on this thread."""
        return _graph_task() != -1

    def running_call(self) -> FrameType | None:
        """The innermost frame outside of this package."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__package__") == _PACKAGE:
            frame = frame.f_back  # type: ignore[assignment]
        return frame

    def is_running(self, call: FrameType | None) -> bool:
        """Look for the frame on the stack."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not call:
            frame = frame.f_back
        return frame is not None

    def failing(self) -> bool:
        """Whether an exception is being handled."""
        return sys.exc_info()[0] is not None

    def tensors(self, value: Any) -> list[torch.Tensor]:
        """All tensors of a structure."""
        if isinstance(value, torch.Tensor):
            return [getattr(value, "_local", value)]
        return [getattr(one, "_local", one) for one in _tensors_of(value, set())]

    def on_gradient(self, tensors: Iterable[torch.Tensor], hook: Callable[[torch.Tensor], None]) -> bool:
        """A hook on each tensor that needs a gradient."""
        found = False
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(hook)
                found = True
        return found

    def on_accumulated(self, leaf: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
        """A hook behind the accumulation into a leaf."""
        return leaf.register_post_accumulate_grad_hook(hook)

    def will_accumulate(self, leaf: torch.Tensor) -> bool:
        """Ask the engine about the node of the leaf."""
        try:
            return torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)
        except RuntimeError:  # the leaf's gradient is to be returned, not accumulated
            return False

    def at_end_of_backward(self, function: Callable[[], None]) -> None:
        """A callback of the engine."""
        torch.autograd.Variable._execution_engine.queue_callback(function)

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Floating-point tensors in another element type."""
        if isinstance(value, torch.Tensor):
            return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
        return tree_map_only(
            torch.Tensor, lambda one: one.to(dtype) if one.is_floating_point() and one.dtype != dtype else one, value
        )

    def before_optimizers_step(self, hook: Callable[[Any, list[torch.Tensor]], None]) -> None:
        """Called by torch for every optimizer."""
        if hook not in _step_hooks:
            _step_hooks.append(hook)
            register_optimizer_step_pre_hook(
                lambda optimizer, *_: hook(optimizer, [p for group in optimizer.param_groups for p in group["params"]])
            )


_step_hooks: list[Any] = []


def _tensors_of(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """Tensors in containers that torch knows, in dataclasses, and in attributes of other objects."""
    for one in tree_flatten(value)[0]:
        if isinstance(one, torch.Tensor):
            yield one
        elif id(one) not in seen and not isinstance(one, (type, nn.Module)):
            seen.add(id(one))
            if is_dataclass(one):
                yield from _tensors_of([getattr(one, place.name, None) for place in fields(one)], seen)
            elif hasattr(one, "__dict__"):
                yield from _tensors_of(list(vars(one).values()), seen)


def _reduce(module: Any, _: Any) -> Any:
    """How a module of a made class is copied and pickled: by the classes that it was made of."""
    return _rebuild, module._parts, module.__getstate__() if hasattr(module, "__getstate__") else module.__dict__


def _rebuild(mixin: type, own: type) -> nn.Module:
    module: nn.Module = object.__new__(own)
    TorchTools().adopt_class(module, mixin)
    return module
