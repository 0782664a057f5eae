"""`shard_module`: lay out a module's parameters, and the inputs and outputs of its submodules, as a plan of names says.

Where `parallelize_module` has styles that know what a Linear or a norm needs, a `ShardingPlan` says every layout itself; it is a
value that can be printed, compared and kept beside a model's configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hp_core.dtensor.api import DTensorMethods, dtensor_type
from hp_core.dtensor.distribute import Lay, Replaced, layout_from, mesh_or_current, replace_parameters
from hp_core.errors import PlanError
from hp_core.layout import Layout, layout_of
from hp_core.mesh import DeviceMesh
from hp_core.placement import Placement
from hp_core.platform import get_platform
from hp_core.tensor_parallel.plan import matching

__all__ = ["ShardingPlan", "shard_module"]

Lays = Lay | Sequence[Lay | None] | Mapping[str, Lay | None]
"""One layout, one per positional value, or one by name; None leaves a value as it is."""


@dataclass(frozen=True)
class ShardingPlan:
    """Layouts by name. Each part of a dotted name may be a glob (`"layers.*.attention.wq.weight"`); "" is the root module.

    A layout is a `Layout`, placements (one per mesh axis), or axis names (one entry per tensor dim, as in calling a
    `Layout`).

    Attributes:
        plan: by name of a parameter, its layout. Parameters that no name fits are replicated.
        input_plan: by name of a submodule, how it gets its inputs: one layout (of the first), a list of layouts (of
            the positional ones), or a dict by the names of its `forward`'s parameters, however they are passed.
        output_plan: by name of a submodule, how its output shall lie: one layout, a list, or a dict for outputs that are
            mappings.
        return_local_tensor: names of submodules whose outputs become plain local tensors.
    """

    plan: Mapping[str, Lay] = field(default_factory=dict)
    input_plan: Mapping[str, Lays] = field(default_factory=dict)
    output_plan: Mapping[str, Lays] = field(default_factory=dict)
    return_local_tensor: Sequence[str] = ()


def shard_module(
    module: Any,
    mesh: DeviceMesh | None = None,
    plan: ShardingPlan | Mapping[str, Lay] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> Any:
    """Make a module's parameters DTensors and arrange what goes in and out of its submodules.

    The same at any world size, one included. Tied parameters stay tied. A module's own buffers are replicated DTensors in
    calls in which all tensors it gets are DTensors, and plain in others. A plain tensor where the plan says a layout is
    taken as the global value, which every rank has; of parts, make a DTensor (`DTensor.from_local`).

    Args:
        module: the module, changed in place.
        mesh: the mesh; default the current one.
        plan: the plan; a dict is the layouts of parameters alone.
        src_data_rank: see `hp_core.distribute_tensor`.

    Returns:
        The same module.

    Raises:
        PlanError: a pattern fits nothing (near names are listed), or two fit one name.
        LayoutError: a layout doesn't fit its parameter. In both cases the module is as it was.
    """
    mesh = mesh_or_current(mesh)
    if isinstance(mesh, Layout):
        mesh = mesh.mesh
    if not isinstance(plan, ShardingPlan):
        plan = ShardingPlan(plan or {})
    modules = get_platform().modules
    named = dict(modules.named_modules(module))
    layouts = _parameter_layouts(module, named, mesh, plan.plan)
    inputs = _resolved(module, named, "input_plan", plan.input_plan)
    outputs = _resolved(module, named, "output_plan", plan.output_plan)
    locals_ = _resolved(module, named, "return_local_tensor", dict.fromkeys(plan.return_local_tensor, True))

    hooks: list[Callable[[], None]] = []
    for path, submodule in named.items():
        if path in inputs:
            hooks.append(partial(modules.hook_inputs, submodule, _input_hook(submodule, path, mesh, inputs[path])))
        if modules.own_buffers(submodule):
            hooks.append(partial(modules.hook_inputs, submodule, _buffer_hook(submodule, mesh)))
        if path in outputs:
            hooks.append(partial(modules.hook_output, submodule, _output_hook(path, mesh, outputs[path])))
        if path in locals_:
            hooks.append(partial(modules.hook_output, submodule, _to_local))
    replaced: Replaced = {}
    for path, submodule in named.items():
        replace_parameters(submodule, path, lambda _, p: layouts[id(p)], src_data_rank, replaced)
    for register in hooks:
        register()
    return module


def _parameter_layouts(
    module: Any, named: Mapping[str, Any], mesh: DeviceMesh, plan: Mapping[str, Lay]
) -> dict[int, Layout]:
    """The layout of every plain parameter by identity, checked against its shape; whoever isn't in the plan is replicated."""
    parameters = {
        f"{path}.{name}" if path else name: parameter
        for path, submodule in named.items()
        for name, parameter in get_platform().modules.own_parameters(submodule)
    }
    replicated = layout_of(mesh)
    said: dict[int, tuple[str, str, Layout]] = {}
    for pattern, given in plan.items():
        where = f"plan[{pattern!r}]"
        for name in matching(parameters, pattern, where, f"parameter of {type(module).__name__}"):
            parameter = parameters[name]
            layout = layout_from(mesh, given, parameter.ndim)
            layout.check_shape(tuple(parameter.shape))
            known = said.setdefault(id(parameter), (name, pattern, layout))
            if known[0] == name and known[1] != pattern:
                raise PlanError(f"parameter {name!r} is matched by {known[1]!r} and {pattern!r}; give it one layout.")
            if known[2] is not layout:
                raise PlanError(
                    f"parameter {name!r} is tied to {known[0]!r}, which is to lie {known[2]}; it can't be {layout} as well."
                )
            if isinstance(parameter, dtensor_type()) and parameter.layout is not layout:  # type: ignore[attr-defined]
                raise PlanError(
                    f"parameter {name!r} is a DTensor already, laid out {parameter.layout}; {where} says {layout}."  # type: ignore[attr-defined]
                )
    return {id(p): said[id(p)][2] if id(p) in said else replicated for p in parameters.values()}


def _resolved(module: Any, named: Mapping[str, Any], field_name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a part of the plan says, by path of a submodule."""
    found: dict[str, tuple[str, Any]] = {}
    for pattern, value in given.items():
        for path in matching(named, pattern, f"{field_name}[{pattern!r}]", f"submodule of {type(module).__name__}"):
            if path in found:
                raise PlanError(
                    f"{field_name}: submodule {path!r} is matched by {found[path][0]!r} and {pattern!r}; name it once."
                )
            found[path] = (pattern, value)
    return {path: value for path, (_, value) in found.items()}


# -- hooks ----------------------------------------------------------------------------------------------------------


def _input_hook(module: Any, path: str, mesh: DeviceMesh, given: Lays) -> Callable[..., Any]:
    by_name = given if isinstance(given, Mapping) else {}
    listed = () if isinstance(given, Mapping) else _listed(given)
    names = get_platform().modules.forward_names(module)
    unknown = [name for name in by_name if name not in names and "**" not in names]
    if unknown:
        raise PlanError(f"input_plan[{path!r}] names {unknown}, but {type(module).__name__}.forward has {names}.")

    def hook(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(listed) > len(args):
            raise PlanError(
                f"input_plan[{path!r}] tells of {len(listed)} positional inputs, but the module was called with {len(args)} "
                f"(and {sorted(kwargs)} by name); for inputs passed by name give a dict."
            )
        lays = [by_name.get(name) for name in names[: len(args)]] if by_name else list(listed)
        lays += [None] * (len(args) - len(lays))
        new_args = tuple(_laid(value, lay, mesh, path) for value, lay in zip(args, lays, strict=True))
        return new_args, {name: _laid(value, by_name.get(name), mesh, path) for name, value in kwargs.items()}

    return hook


def _output_hook(path: str, mesh: DeviceMesh, given: Lays) -> Callable[[Any], Any]:
    def hook(output: Any) -> Any:
        if isinstance(given, Mapping):
            if not isinstance(output, Mapping) or set(given) - set(output):
                have = sorted(output) if isinstance(output, Mapping) else type(output).__name__
                raise PlanError(f"output_plan[{path!r}] names the outputs {sorted(given)}, but the module gave {have}.")
            for name, lay in given.items():
                output[name] = _laid(output[name], lay, mesh, path)  # type: ignore[index]
            return output
        lays = _listed(given)
        if not isinstance(output, (tuple, list)):
            if len(lays) != 1:
                raise PlanError(f"output_plan[{path!r}] tells of {len(lays)} outputs, but the module gave one.")
            return _laid(output, lays[0], mesh, path)
        if len(lays) != len(output):
            raise PlanError(f"output_plan[{path!r}] tells of {len(lays)} outputs, but the module gave {len(output)}.")
        values = [_laid(value, lay, mesh, path) for value, lay in zip(output, lays, strict=True)]
        return type(output)(*values) if hasattr(output, "_fields") else type(output)(values)

    return hook


def _buffer_hook(module: Any, mesh: DeviceMesh) -> Callable[..., Any]:
    """Buffers follow the inputs: DTensors among DTensors, plain among plain tensors; on the same memory."""
    platform = get_platform()
    replicated = layout_of(mesh)

    def hook(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if platform.tensors.is_tensor(value)]
        distributed = bool(tensors) and all(isinstance(value, dtensor_type()) for value in tensors)
        for name, buffer in platform.modules.own_buffers(module):
            if isinstance(buffer, dtensor_type()) is distributed:
                continue
            if distributed:
                platform.modules.set_buffer(module, name, DTensorMethods.from_local(buffer, replicated))
            elif buffer.layout is replicated:
                platform.modules.set_buffer(module, name, buffer.to_local())
        return args, kwargs

    return hook


def _listed(given: Any) -> tuple[Lay | None, ...]:
    """One layout, or one per value."""
    if isinstance(given, Layout) or not given or any(isinstance(entry, (Placement, str)) for entry in given):
        return (given,)
    return tuple(given)


def _laid(value: Any, lay: Lay | None, mesh: DeviceMesh, path: str) -> Any:
    """A tensor in the layout said; what is no tensor, or has none said, passes."""
    if lay is None or not get_platform().tensors.is_tensor(value):
        return value
    layout = layout_from(mesh, lay, value.ndim)
    if not isinstance(value, dtensor_type()):
        value = DTensorMethods.from_local(value, layout_of(mesh))
    elif value.device_mesh is not mesh:  # type: ignore[attr-defined]
        raise PlanError(f"module {path!r} was sharded on {mesh!r}, but meets a DTensor on {value.device_mesh!r}.")  # type: ignore[attr-defined]
    return value.redistribute(layout)


def _to_local(output: Any) -> Any:
    """The output with plain local tensors in it."""
    if isinstance(output, dtensor_type()):
        return output.to_local()  # type: ignore[attr-defined]
    if isinstance(output, (tuple, list)):
        values = [_to_local(value) for value in output]
        return type(output)(*values) if hasattr(output, "_fields") else type(output)(values)
    if isinstance(output, Mapping):
        for name, value in list(output.items()):
            output[name] = _to_local(value)  # type: ignore[index]
    return output
