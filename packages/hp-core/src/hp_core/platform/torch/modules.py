"""Walking and hooking `torch.nn.Module`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["TorchModuleTools"]


class TorchModuleTools:
    """See `hp_core.platform.protocol.ModuleTools`."""

    def named_modules(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        """The module and all below it."""
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
        """Make a parameter the very one given."""
        module.register_parameter(name, value)

    def set_buffer(self, module: nn.Module, name: str, value: Any) -> None:
        """Replace a buffer, keeping whether it is saved."""
        module._buffers[name] = value

    def hook_inputs(self, module: nn.Module, hook: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
        """Replace `(args, kwargs)` before each forward."""
        module.register_forward_pre_hook(lambda _, args, kwargs: hook(args, kwargs), with_kwargs=True)

    def hook_output(self, module: nn.Module, hook: Callable[[Any], Any]) -> None:
        """Replace the output after each forward."""
        module.register_forward_hook(lambda _, args, output: hook(output))
