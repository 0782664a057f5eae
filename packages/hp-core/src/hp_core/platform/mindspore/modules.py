"""Walking and hooking `mindspore.nn.Cell`, and parameters that are DTensors while the cell computes.

A cell keeps *local* Parameters: those are what `trainable_params()`, `weights=` of `value_and_grad`, and optimizers see. To
the cell's own code, `self.weight` is a DTensor on the very same Parameter, so gradients come out local, by the law.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from mindspore import Parameter, mint, nn
from mindspore.common.parameter import _is_parameter_generated

from hp_core.platform.foreign import refuse_foreign
from hp_core.platform.mindspore.building import building_on, copy_attributes, initialisers_of
from hp_core.platform.mindspore.initializers import initialize
from hp_core.platform.mindspore.wrapper import new_dtensor

__all__ = ["MindSporeModuleTools"]

_LINEAR = (nn.Dense, mint.nn.Linear)
_EMBEDDING = (nn.Embedding, mint.nn.Embedding)


class MindSporeModuleTools:
    """See `hp_core.platform.protocol.ModuleTools`."""

    def named_modules(self, module: Any) -> list[tuple[str, Any]]:
        """The cell and all below it.

        Raises:
            PlatformError: it is another framework's module, or none.
        """
        if not isinstance(module, nn.Cell):
            refuse_foreign(module, "mindspore.nn.Cell")
        return list(module.cells_and_names())

    def kind(self, module: Any) -> str:
        """Either "linear", "embedding", or "other"."""
        return "linear" if isinstance(module, _LINEAR) else "embedding" if isinstance(module, _EMBEDDING) else "other"

    def own_parameters(self, module: Any) -> list[tuple[str, Any]]:
        """Parameters that the cell itself holds, as DTensors where they are distributed."""
        return [(name, _seen(parameter)) for name, parameter in module._params.items() if parameter is not None]

    def own_buffers(self, module: Any) -> list[tuple[str, Any]]:
        """Buffers that the cell itself holds."""
        return [(name, buffer) for name, buffer in module._buffers.items() if buffer is not None]

    def as_parameter(self, value: Any, requires_grad: bool) -> Any:
        """A DTensor on a local Parameter, or a plain Parameter."""
        if hasattr(value, "_spec"):
            return _on_parameter(value, Parameter(value._local, requires_grad=requires_grad))
        return Parameter(value, requires_grad=requires_grad)

    def set_parameter(self, module: Any, name: str, value: Any) -> None:
        """Replace a parameter, keeping its name and whether it requires a gradient."""
        old = module._params[name]
        local = Parameter(
            getattr(value, "_local", value),
            name=name if old is None else old.name,
            requires_grad=old is None or old.requires_grad,
        )
        self.tie_parameter(module, name, _on_parameter(value, local) if hasattr(value, "_spec") else local)

    def tie_parameter(self, module: Any, name: str, value: Any) -> None:
        """Make a parameter the very one given; one without a name of its own gets that of the old one."""
        old, new = module._params.get(name), getattr(value, "_local", value)
        if old is not None and new is not old and _is_parameter_generated(new.name):
            new.name = old.name
        module._params[name] = new
        if hasattr(value, "_spec"):
            shown = frozenset({name, *getattr(type(module), "_distributed_names", ())})
            module.__class__ = _showing_dtensors(_written_class(module), shown)

    def set_buffer(self, module: Any, name: str, value: Any) -> None:
        """Replace a buffer."""
        module._buffers[name] = value

    def hook_inputs(self, module: Any, hook: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
        """Replace `(args, kwargs)` before each construct."""
        module.register_forward_pre_hook(lambda _, args, kwargs: hook(args, kwargs), with_kwargs=True)

    def hook_output(self, module: Any, hook: Callable[[Any], Any]) -> None:
        """Replace the output after each construct."""
        module.register_forward_hook(lambda _, args, output: hook(output))

    def forward_names(self, module: Any) -> list[str]:
        """Names of the parameters of the cell's construct, in order; "**" among them if it takes any name."""
        parameters = inspect.signature(module.construct).parameters.values()
        return ["**" if one.kind is inspect.Parameter.VAR_KEYWORD else one.name for one in parameters]

    def convert_on_load(self, module: Any, convert: Callable[[Any, Any], Any]) -> None:
        """Nothing to do: what MindSpore saves and loads are the local Parameters."""

    def state(self, module: Any) -> list[tuple[str, Any]]:
        """What the cell saves: parameters and buffers of it and all below."""
        found = []
        for path, cell in module.cells_and_names():
            for name, value in (*self.own_parameters(cell), *self.own_buffers(cell)):
                found.append((f"{path}.{name}" if path else name, value))
        return found

    def building_on(self, device: str, include_buffers: bool) -> AbstractContextManager[None]:
        """Cells built inside have their parameters on a device."""
        return building_on(device, include_buffers)

    def initialisers(self, module: Any, above: Sequence[Any]) -> list[Callable[[], object]]:
        """The ways in which a cell's parameters get their values, best first."""
        ways: list[Callable[[], object]] = []
        for owner in above:
            method = getattr(owner, "_init_weights", None)
            if callable(method) and _required_arguments(method) == 1:
                ways.append(lambda method=method: method(module))  # type: ignore[misc]
                break
        for name in ("_init_weights", "reset_parameters"):
            method = getattr(module, name, None)
            if callable(method) and _required_arguments(method) == 0:
                ways.append(method)
        delayed = initialisers_of(module)
        if delayed:
            ways.append(lambda: _initialize(module, delayed))
        return ways

    def copy_attributes(self, source: Any, target: Any) -> None:
        """Public attributes that user code hung on a parameter."""
        copy_attributes(source, target)


def _initialize(module: Any, delayed: dict[str, Any]) -> None:
    for name, initializer in delayed.items():
        parameter = _seen(module._params[name])
        if hasattr(parameter, "_spec"):
            initialize(parameter, initializer)


def _on_parameter(value: Any, local: Any) -> Any:
    """The DTensor on a local Parameter, which remembers it."""
    local._distributed = new_dtensor(type(value), local, value._spec)
    return local._distributed


def _required_arguments(method: Callable[..., Any]) -> int:
    """How many positional arguments it can't be called without."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(method).parameters.values()
    return sum(parameter.kind in kinds and parameter.default is inspect.Parameter.empty for parameter in parameters)


def _seen(parameter: Any) -> Any:
    return getattr(parameter, "_distributed", parameter)


def _written_class(module: Any) -> type:
    """The class that the user wrote."""
    kind = type(module)
    return kind.__mro__[1] if "_distributed_names" in kind.__dict__ else kind


@cache
def _showing_dtensors(kind: type, names: frozenset[str]) -> type:
    """A subclass of a cell's class whose attributes of these names are the DTensors on the cell's Parameters."""

    def shown(name: str) -> property:
        def get(self: Any) -> Any:
            return _seen(self._params[name])

        def put(self: Any, value: Any) -> None:
            nn.Cell.__setattr__(self, name, value)

        return property(get, put)

    body: dict[str, Any] = {name: shown(name) for name in names}
    body |= {"_distributed_names": names, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), body)
