"""Models without memory, and their parameters made piece by piece: a model larger than one rank is built, cut, then filled.

`init_empty_weights` builds modules on the meta device, `parallelize_module` or `shard_module` lays them out there, and
`init_parameters` makes each rank's pieces and fills them with the values that a dense model would get.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from hp_core.dtensor.api import DTensorMethods, dtensor_type
from hp_core.errors import PlanError
from hp_core.layout import Layout, layout_of
from hp_core.mesh import DeviceMesh
from hp_core.platform import get_platform
from hp_core.platform.protocol import Tensor
from hp_core.process_group import get_rank

__all__ = ["init_empty_weights", "init_on_device", "init_parameters"]


def init_empty_weights(include_buffers: bool = False) -> AbstractContextManager[None]:
    """Parameters of modules built inside this context are on the meta device: they have a shape, but no memory.

    Tied parameters stay tied. The context concerns the thread that entered it, may be nested, and ends with an exception as
    it does without one.

    Args:
        include_buffers: whether buffers go there as well. They usually hold what is computed once (rotary frequencies,
            masks), so by default they are real.
    """
    return init_on_device("meta", include_buffers)


def init_on_device(device: str, include_buffers: bool = False) -> AbstractContextManager[None]:
    """Parameters of modules built inside this context are on `device`; see `init_empty_weights`.

    A parameter that its module makes elsewhere is moved as it is registered, so at most one is in two places. DTensors
    stay where they are.

    Args:
        device: what the framework calls it: "meta", "cpu", "cuda:1", "npu".
        include_buffers: whether buffers go there as well.
    """
    return get_platform().modules.building_on(device, include_buffers)


def init_parameters(module: Any, *, device: str | None = None, init_fn: Callable[[Any], object] | None = None) -> Any:
    """Give a module that was built on the meta device its memory and its values. Nothing is communicated.

    Each rank makes only its own pieces: those of parameters that are DTensors, the whole of plain ones. What fills
    them is, for each module from the leaves to the root: `init_fn`, then the method `_init_weights(module)` of the
    module or of the nearest one above it (the custom of Hugging Face's models), then its `reset_parameters()`.
    Each is called only while something of the module is left unfilled, and can't touch what was filled before; so a
    tied parameter gets its values from the first module that has it. All of them see DTensors, plain parameters
    included, and random numbers come from the layout-independent generator: after `manual_seed(s)` the global values are
    the same for every layout and any number of ranks, one included.

    Args:
        module: the module, changed in place. What is not on the meta device is left as it is.
        device: type of the device; default that of each parameter's mesh.
        init_fn: called with each module that has something to fill; fills it in place, all of it or a part.

    Returns:
        The same module.

    Raises:
        PlanError: nothing fills some parameter or buffer (all of them are named; the module is then left as it was), or
            one was replaced instead of filled.
    """
    named = get_platform().modules.named_modules(module)
    paths = dict(named)
    fresh = _Fresh(device)
    try:
        for path, submodule in named:
            fresh.make(path, submodule)
        for path, submodule in _leaves_first(named):
            if fresh.of(submodule):
                above = [paths[prefix] for prefix in _prefixes(path) if prefix in paths]
                _fill(submodule, path, above, init_fn, fresh)
        fresh.require_filled()
    except BaseException:
        fresh.withdraw()
        raise
    fresh.finish()
    return module


@dataclass
class _Entry:
    """A parameter or buffer that is being made.

    Attributes:
        old: the one on the meta device.
        new: the one with memory; a parameter is a DTensor in any case.
        name: path of the first module that has it, and its name there.
        is_buffer: which of the two it is.
        local: the local tensor of `new` before it was filled.
        version: how often that had been written to.
    """

    old: Any
    new: Any
    name: str
    is_buffer: bool
    local: Tensor
    version: int

    @property
    def filled(self) -> bool:
        """Whether something has written to it."""
        local = _local(self.new)
        return local is not self.local or get_platform().autograd.version(local) != self.version


class _Fresh:
    """What `init_parameters` makes, and where each belongs."""

    def __init__(self, device: str | None) -> None:
        self._device = device
        self._entries: dict[int, _Entry] = {}
        self._places: dict[int, list[tuple[Any, str, _Entry]]] = {}

    def make(self, path: str, module: Any) -> None:
        """Give memory to what the module itself holds on the meta device."""
        modules = get_platform().modules
        own = modules.own_parameters(module)
        whole = _replicated([value for _, value in own])
        for name, value, is_buffer in (
            *((name, value, False) for name, value in own),
            *((name, value, True) for name, value in modules.own_buffers(module)),
        ):
            if not get_platform().tensors.is_meta(_local(value)):
                continue
            entry = self._entries.get(id(value))
            if entry is None:
                full_name = f"{path}.{name}" if path else name
                entry = self._entries[id(value)] = self._entry(value, full_name, is_buffer, whole)
            self._places.setdefault(id(module), []).append((module, name, entry))
            _put(module, name, entry.new, is_buffer)

    def _entry(self, value: Any, name: str, is_buffer: bool, whole: Layout) -> _Entry:
        platform = get_platform()
        tensors = platform.tensors
        distributed = isinstance(value, dtensor_type())
        layout = value.layout if distributed else whole
        shape = tuple(tensors.shape(value))
        wrapped = distributed or not is_buffer
        local_shape = layout.local_shape(shape) if wrapped else shape
        new = tensors.full(local_shape, None, tensors.dtype(value), self._device or layout.mesh.device_type)
        if tensors.is_meta(new):
            raise PlanError(
                "init_parameters() was called inside a context that makes tensors on the meta device, or with that device; "
                "call it outside, with a device that has memory."
            )
        if wrapped:
            new = DTensorMethods.from_local(new, layout, shape=shape)
        if not is_buffer:
            new = platform.modules.as_parameter(new, False)
        return _Entry(value, new, name, is_buffer, _local(new), platform.autograd.version(_local(new)))

    def of(self, module: Any) -> list[_Entry]:
        """What was made of the things that the module itself holds."""
        return [entry for _, _, entry in self._places.get(id(module), ())]

    def shield(self, module: Any) -> None:
        """Put scratch tensors where the module holds what was filled already."""
        for _, name, entry in self._places[id(module)]:
            if entry.filled:
                tensors = get_platform().tensors
                value: Any = entry.new
                scratch = tensors.empty(tensors.shape(_local(value)), _local(value))
                if isinstance(entry.new, dtensor_type()):
                    scratch = DTensorMethods.from_local(scratch, value.layout, shape=tuple(value.shape))
                if not entry.is_buffer:
                    scratch = get_platform().modules.as_parameter(scratch, False)
                _put(module, name, scratch, entry.is_buffer)

    def unshield(self, module: Any) -> None:
        """Put back what `shield` took away."""
        for _, name, entry in self._places[id(module)]:
            if entry.filled:
                _put(module, name, entry.new, entry.is_buffer)

    def check_in_place(self, module: Any, path: str) -> None:
        """What was to be filled must still be there; a buffer may have been computed anew."""
        modules = get_platform().modules
        held = dict(modules.own_parameters(module)) | dict(modules.own_buffers(module))
        for _, name, entry in self._places[id(module)]:
            found = held.get(name)
            if entry.filled or found is entry.new:
                continue
            if not entry.is_buffer or found is None or get_platform().tensors.is_meta(_local(found)):
                raise PlanError(
                    f"init_parameters: what fills {type(module).__name__} {path!r} put another object in place of {name!r}; "
                    f"write to the tensor that is there (with fill_, copy_ or the framework's initialisers)."
                )
            entry.new, entry.version = found, -1

    def require_filled(self) -> None:
        """Raise when something was not filled."""
        missing = [entry.name for entry in self._entries.values() if not entry.filled]
        if missing:
            raise PlanError(
                f"init_parameters: nothing gives values to {', '.join(missing)}: the modules that hold them have no "
                f"reset_parameters(), none above has _init_weights(module), or these leave them out. Pass init_fn=, which is "
                f"called with each such module and fills what it holds in place; or leave buffers real "
                f"(init_empty_weights(include_buffers=False))."
            )

    def withdraw(self) -> None:
        """Put everything back on the meta device."""
        for module, name, entry in self._all_places():
            _put(module, name, entry.old, entry.is_buffer)

    def finish(self) -> None:
        """Plain parameters become plain again, and gradients are wanted as before."""
        platform = get_platform()
        final: dict[int, Any] = {}
        for module, name, entry in self._all_places():
            if id(entry) not in final:
                value = entry.new
                if not entry.is_buffer:
                    if not isinstance(entry.old, dtensor_type()):
                        value = value.to_local()
                    value = platform.modules.as_parameter(value, platform.autograd.requires_grad(_local(entry.old)))
                    platform.modules.copy_attributes(entry.old, value)
                final[id(entry)] = value
            _put(module, name, final[id(entry)], entry.is_buffer)

    def _all_places(self) -> Iterable[tuple[Any, str, _Entry]]:
        return [place for places in self._places.values() for place in places]


def _fill(module: Any, path: str, above: list[Any], init_fn: Callable[[Any], object] | None, fresh: _Fresh) -> None:
    """Call what gives the module its values, until all of them are given."""
    ways = get_platform().modules.initialisers(module, above)
    if init_fn is not None:
        ways.insert(0, lambda: init_fn(module))
    for way in ways:
        if all(entry.filled for entry in fresh.of(module)):
            break
        fresh.shield(module)
        way()
        fresh.unshield(module)
        fresh.check_in_place(module, path)


def _leaves_first(named: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Modules in the order in which their constructors end: the children of each in turn, then itself."""
    order: list[tuple[str, Any]] = []
    open_: list[tuple[str, Any]] = []
    for path, module in named:
        while open_ and open_[-1][0] and not path.startswith(open_[-1][0] + "."):
            order.append(open_.pop())
        open_.append((path, module))
    return order + open_[::-1]


def _prefixes(path: str) -> list[str]:
    """The path itself and those above it, nearest first; the root is ""."""
    parts = path.split(".") if path else []
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]


def _replicated(values: list[Any]) -> Layout:
    """How a plain parameter lies while it is filled: whole on the mesh of its neighbours, or on this rank alone."""
    for value in values:
        if isinstance(value, dtensor_type()):
            return layout_of(value.device_mesh)  # type: ignore[attr-defined]
    return layout_of(DeviceMesh((1,), ("rank",), (get_rank(),)))


def _local(value: Any) -> Tensor:
    return value._local if isinstance(value, dtensor_type()) else value  # type: ignore[attr-defined]


def _put(module: Any, name: str, value: Any, is_buffer: bool) -> None:
    modules = get_platform().modules
    (modules.set_buffer if is_buffer else modules.tie_parameter)(module, name, value)
