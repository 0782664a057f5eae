"""Walking, hooking, building and filling `torch.nn.Module`."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.nn.parameter import is_lazy

from hp_core.geometry import Box, origin_box
from hp_core.platform.foreign import refuse_foreign
from hp_core.platform.torch.checkpoint import box_views
from hp_core.platform.torch.face import TorchFace

__all__ = ["TorchModuleTools"]

_building = threading.local()
"""The contexts of `building_on` that this thread is in, outermost first."""


class TorchModuleTools:
    """See `hp_core.platform.protocol.ModuleTools`."""

    def named_modules(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        """The module and all below it.

        Raises:
            PlatformError: it is another framework's module, or none.
        """
        if not isinstance(module, nn.Module):
            refuse_foreign(module, "torch.nn.Module")
        return list(module.named_modules())

    def kind(self, module: nn.Module) -> str:
        """Either "linear", "embedding", or "other"."""
        return (
            "linear" if isinstance(module, nn.Linear) else "embedding" if isinstance(module, nn.Embedding) else "other"
        )

    def own_parameters(self, module: nn.Module) -> list[tuple[str, torch.Tensor]]:
        """Parameters that the module itself holds."""
        return [(name, parameter) for name, parameter in module._parameters.items() if parameter is not None]

    def own_buffers(self, module: nn.Module) -> list[tuple[str, torch.Tensor]]:
        """Buffers that the module itself holds."""
        return [(name, buffer) for name, buffer in module._buffers.items() if buffer is not None]

    def as_parameter(self, value: Any, requires_grad: bool) -> Any:
        """The tensor as a parameter."""
        return nn.Parameter(value, requires_grad=requires_grad)

    def set_parameter(self, module: nn.Module, name: str, value: Any) -> None:
        """Replace a parameter, keeping whether it requires a gradient."""
        old = module._parameters[name]
        requires_grad = value.is_floating_point() if old is None else old.requires_grad
        module.register_parameter(name, nn.Parameter(value, requires_grad=requires_grad))

    def tie_parameter(self, module: nn.Module, name: str, value: Any) -> None:
        """Make a parameter the very one given, past the hooks that may move what is registered (`building_on`)."""
        module._parameters[name] = value

    def set_buffer(self, module: nn.Module, name: str, value: Any) -> None:
        """Replace a buffer, keeping whether it is saved."""
        module._buffers[name] = value

    def hook_inputs(self, module: nn.Module, hook: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
        """Replace `(args, kwargs)` before each forward."""
        module.register_forward_pre_hook(lambda _, args, kwargs: hook(args, kwargs), with_kwargs=True)

    def hook_output(self, module: nn.Module, hook: Callable[[Any], Any]) -> None:
        """Replace the output after each forward."""
        module.register_forward_hook(lambda _, args, output: hook(output))

    def forward_names(self, module: nn.Module) -> list[str]:
        """Names of the parameters of the module's forward, in order; "**" among them if it takes any name."""
        parameters = inspect.signature(module.forward).parameters.values()
        return ["**" if one.kind is inspect.Parameter.VAR_KEYWORD else one.name for one in parameters]

    def convert_on_load(self, module: nn.Module, convert: Callable[[Any, Any], Any]) -> None:
        """Convert the values of a state dict for the module's own tensors before they are loaded."""
        hook = _ConvertOnLoad(convert)
        if all(getattr(known, "hook", None) != hook for known in module._load_state_dict_pre_hooks.values()):
            module.register_load_state_dict_pre_hook(hook)

    def state(self, module: nn.Module) -> list[tuple[str, Any]]:
        """What the module saves, by name."""
        return list(module.state_dict(keep_vars=True).items())

    @contextmanager
    def building_on(self, device: str, include_buffers: bool) -> Iterator[None]:
        """Modules built inside have their parameters on a device."""
        target = torch.device(device)
        stack = _building.__dict__.setdefault("stack", [])
        mine = object()
        moved: dict[int, tuple[Any, torch.Tensor]] = {}

        def move(_: nn.Module, name: str, value: Any) -> Any:
            # the hooks are torch's, for all threads: each context minds its own, and the innermost one wins
            inside = _building.__dict__.get("stack", ())
            if not inside or inside[-1] is not mine or value is None or isinstance(value, TorchFace) or is_lazy(value):
                return None
            if value.device == target or (target.index is None and value.device.type == target.type):
                return None
            known = moved.get(id(value))
            if known is not None and known[0]() is value:  # registered before under another name: it stays one tensor
                return known[1]
            result: torch.Tensor = value.detach().to(target)
            if isinstance(value, nn.Parameter):
                result = nn.Parameter(result, requires_grad=value.requires_grad)
            self.copy_attributes(value, result)
            moved[id(value)] = (ref(value), result)
            return result

        handles = [module_hooks.register_module_parameter_registration_hook(move)]
        if include_buffers:
            handles.append(module_hooks.register_module_buffer_registration_hook(move))
        stack.append(mine)
        try:
            yield
        finally:
            stack.remove(mine)
            for handle in handles:
                handle.remove()

    def copy_attributes(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Public attributes that user code hung on a parameter."""
        for name, value in getattr(source, "__dict__", {}).items():
            if not name.startswith("_"):
                setattr(target, name, value)

    def initialisers(self, module: nn.Module, above: Sequence[nn.Module]) -> list[Callable[[], object]]:
        """The ways in which a module's parameters get their values, best first."""
        ways: list[Callable[[], object]] = []
        for owner in above:
            method = getattr(owner, "_init_weights", None)
            if callable(method) and _required_arguments(method) == 1:
                ways.append(lambda method=method: method(module))  # type: ignore[misc]
                break
        for name in ("_init_weights", "reset_parameters", "_reset_parameters"):
            method = getattr(module, name, None)
            if callable(method) and _required_arguments(method) == 0:
                ways.append(method)
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.padding_idx is not None:
            return [lambda way=way: _with_padding_row(module, way) for way in ways]  # type: ignore[misc]
        return ways


@dataclass(frozen=True)
class _ConvertOnLoad:
    """Called by torch with its own copy of the state dict, which may be changed."""

    convert: Callable[[Any, Any], Any]

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, held in (*module._parameters.items(), *module._buffers.items()):
            if held is not None and prefix + name in state:
                state[prefix + name] = self.convert(held, state[prefix + name])


def _required_arguments(method: Callable[..., Any]) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(method).parameters.values()
    return sum(parameter.kind in kinds and parameter.default is inspect.Parameter.empty for parameter in parameters)


def _with_padding_row(module: Any, way: Callable[[], object]) -> None:
    """Fill an embedding and zero its padding row, which may lie on another rank: no view of it is taken."""
    row, weight = module.padding_idx, module.weight
    local = getattr(weight, "_local", weight)
    version = local._version
    module.padding_idx = None
    try:
        way()
    finally:
        module.padding_idx = row
    if local._version == version:
        return  # this way leaves embeddings out
    with torch.no_grad():
        for ((start, stop), *_), rows in _boxes_of(weight):
            if start <= row < stop:
                rows[row - start].zero_()


def _boxes_of(tensor: Any) -> list[tuple[Box, torch.Tensor]]:
    """What this rank holds of a tensor: boxes, in global coordinates, each with the tensor or view that holds it."""
    if not isinstance(tensor, TorchFace):
        return [(origin_box(tensor.shape), tensor)]
    layout, shape = tensor._spec.layout, tuple(tensor.shape)
    if layout.flat is None:
        return [(layout.bounds(shape), tensor._local)]
    return list(box_views(tensor._local, layout.boxes(shape)))
