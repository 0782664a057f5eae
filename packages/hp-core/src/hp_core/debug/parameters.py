"""The tensors of a model by name, as `fingerprint` and `describe` look at them: each once, tied names together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hp_core.dtensor.api import DTensorMethods, dtensor_type
from hp_core.errors import PlanError
from hp_core.geometry import Box, origin_box
from hp_core.layout import Layout
from hp_core.mesh import DeviceMesh
from hp_core.platform import get_platform
from hp_core.platform.protocol import Tensor

__all__ = ["NamedTensor", "named_buffers", "named_parameters", "named_tensors"]


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of a model.

    Attributes:
        name: its first dotted name.
        aliases: its other names, if it is tied.
        tensor: what the model holds: a plain tensor or a DTensor.
        module: the module that holds it under its first name; None for tensors given by name.
    """

    name: str
    aliases: tuple[str, ...]
    tensor: Any
    module: Any = None

    @property
    def layout(self) -> Layout | None:
        """How it lies on its mesh; None for a plain tensor."""
        return self.tensor.layout if isinstance(self.tensor, dtensor_type()) else None  # type: ignore[attr-defined]

    @property
    def local(self) -> Tensor:
        """This rank's part."""
        return self.tensor._local if isinstance(self.tensor, dtensor_type()) else self.tensor  # type: ignore[attr-defined]

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return tuple(self.tensor.shape)

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh that it lies on."""
        return None if self.layout is None else self.layout.mesh

    @property
    def boxes(self) -> tuple[Box, ...]:
        """What of the global tensor this rank holds, in the order in which it does; nothing outside of the mesh."""
        if self.layout is None:
            return (origin_box(self.shape),)
        return self.layout.boxes(self.shape) if self.layout.mesh.get_coordinate() is not None else ()


def named_parameters(model: Any) -> list[NamedTensor]:
    """The parameters of a module, in the order of modules, each once."""
    return _named(model, get_platform().modules.own_parameters)


def named_buffers(model: Any) -> list[NamedTensor]:
    """The buffers of a module, in the order of modules, each once."""
    return _named(model, get_platform().modules.own_buffers)


def named_tensors(given: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> list[NamedTensor]:
    """Tensors that were given by name."""
    pairs = list(given.items() if isinstance(given, Mapping) else given)
    for name, value in pairs:
        if not get_platform().tensors.is_tensor(value):
            raise PlanError(f"{name!r} is a {type(value).__name__}, not a tensor; give a mapping of names to tensors.")
    return [NamedTensor(name, (), ours(value)) for name, value in pairs]


def ours(tensor: Any) -> Any:
    """The tensor, as one of our DTensors if it is one of the framework's own."""
    if isinstance(tensor, dtensor_type()) or not hasattr(tensor, "device_mesh"):
        return tensor
    return DTensorMethods.from_torch(tensor.detach())


def _named(model: Any, own: Any) -> list[NamedTensor]:
    found: dict[int, tuple[Any, Any, list[str]]] = {}
    for path, module in get_platform().modules.named_modules(model):
        for name, tensor in own(module):
            full = f"{path}.{name}" if path else name
            found.setdefault(id(tensor), (module, tensor, []))[2].append(full)
    return [NamedTensor(names[0], tuple(names[1:]), ours(tensor), module) for module, tensor, names in found.values()]
