"""`parallelize_module`: apply styles to the submodules that a plan names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from hp_core.dtensor.distribute import Replaced, mesh_or_current
from hp_core.errors import PlanError
from hp_core.mesh import DeviceMesh
from hp_core.platform import get_platform
from hp_core.tensor_parallel.styles import ParallelStyle, axis_of

__all__ = ["matching", "parallelize_module"]


def parallelize_module(
    module: Any,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
    axis: str | None = None,
) -> Any:
    """Shard a module over one axis of a mesh.

    Args:
        module: the module, changed in place. Tied parameters stay tied.
        device_mesh: the mesh; default the current one. With several axes, parameters are replicated over those that the
            styles don't work on, and the law of gradients reduces their gradients there: data parallelism needs no wrapper.
        parallelize_plan: one style for the module itself, or styles by name of submodule. Each part of a dotted name may be
            a glob: `"layers.*.attention.wq"`.
        src_data_rank: see `distribute_tensor`.
        axis: name of the mesh axis to work on; default the only one, or "tp".

    Returns:
        The same module.

    Raises:
        PlanError: a pattern matches nothing (near names are listed), two match one module, or a style doesn't fit its module.
    """
    mesh = mesh_or_current(device_mesh)
    axis_name = mesh.mesh_dim_names[axis_of(mesh, axis)]
    if parallelize_plan is None:
        raise PlanError("parallelize_module() needs a plan: a style, or a dict of styles by submodule name.")
    replaced: Replaced = {}
    named = dict(get_platform().modules.named_modules(module))
    if isinstance(parallelize_plan, ParallelStyle):
        matches = {"": ("", module, parallelize_plan)}
    else:
        matches = _match(type(module).__name__, named, parallelize_plan)
    for path, submodule, style in matches.values():
        style.apply(
            submodule,
            mesh,
            axis=axis_name,
            src_data_rank=src_data_rank,
            path=path or type(module).__name__,
            replaced=replaced,
        )
    _retie(module, replaced)
    return module


def _match(
    kind: str, named: Mapping[str, Any], plan: Mapping[str, ParallelStyle]
) -> dict[str, tuple[str, Any, ParallelStyle]]:
    """The submodules that the plan's patterns name, with their styles; all checked before anything is changed."""
    matches: dict[str, tuple[str, Any, ParallelStyle]] = {}
    patterns: dict[str, str] = {}
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle):
            raise PlanError(f"plan[{pattern!r}] is a {type(style).__name__}, not a parallel style.")
        for path in matching(named, pattern, f"plan[{pattern!r}]", f"submodule of {kind}"):
            if path in matches:
                raise PlanError(
                    f"submodule {path!r} is matched by {patterns[path]!r} and {pattern!r}; give it one style."
                )
            matches[path] = (path, named[path], style)
            patterns[path] = pattern
    return matches


def matching(names: Iterable[str], pattern: str, where: str, what: str) -> list[str]:
    """The dotted names that a pattern fits, part by part.

    Args:
        names: all names.
        pattern: each part of it may be a glob.
        where: place in the plan, for the message.
        what: what the names are, for the message.

    Raises:
        PlanError: none fits; near names are listed.
    """
    names = list(names)
    found = [path for path in names if _fits(path, pattern)]
    if not found:
        near = difflib.get_close_matches(pattern, names, n=5, cutoff=0.3)
        raise PlanError(f"{where} matches no {what}; near names: {', '.join(near) or 'none'}.")
    return found


def _fits(path: str, pattern: str) -> bool:
    parts, globs = path.split("."), pattern.split(".")
    return len(parts) == len(globs) and all(map(fnmatchcase, parts, globs))


def _retie(module: Any, replaced: Replaced) -> None:
    """Give modules outside of the plan the new version of parameters they share with modules in it."""
    modules = get_platform().modules
    for _, submodule in modules.named_modules(module):
        for name, parameter in modules.own_parameters(submodule):
            known = replaced.get(id(parameter))
            if known is not None:
                modules.tie_parameter(submodule, name, known[1])
