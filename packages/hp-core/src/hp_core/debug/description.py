"""`describe`: one table of a model's parameters as they lie on this rank, its units, its meshes and their ranks.

What is found is a value (`Description`); printing it is `tables.py`. Nothing is communicated or changed, so a rank that
hangs can be asked as well, and the ranks may be asked one at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TextIO

from hp_core.debug.parameters import NamedTensor, named_buffers, named_parameters
from hp_core.debug.tables import aligned, in_bytes, number
from hp_core.mesh import DeviceMesh
from hp_core.platform import get_platform
from hp_core.process_group import get_rank, get_world_size
from hp_core.protocols import DescribedModule, StagedModule, UnitDescription

__all__ = ["Description", "ParameterRow", "describe"]


@dataclass(frozen=True, slots=True)
class ParameterRow:
    """One parameter as it lies on this rank.

    Attributes:
        name: its dotted name.
        shape: global shape.
        layout: the layout in short; "plain" for a plain tensor.
        mesh: the mesh of the layout, or None.
        local_shape: shape of this rank's part.
        dtype: name of the element type.
        local_bytes: bytes of this rank's part.
        states: words for what is true of it: "sharded", "whole", "frozen", "grad", "meta", ...
    """

    name: str
    shape: tuple[int, ...]
    layout: str
    mesh: DeviceMesh | None
    local_shape: tuple[int, ...]
    dtype: str
    local_bytes: int
    states: tuple[str, ...]


@dataclass(frozen=True)
class Description:
    """What `describe` found of a module on this rank.

    Attributes:
        title: the module's class, and which stage it is of a pipeline.
        rank: this rank.
        world_size: number of ranks.
        backend: of the world's communication; None without a world.
        rows: the parameters, each once.
        units: FSDP's units, in the order of modules.
        meshes: those that parameters lie on.
        buffers: number of buffers, and their bytes.
    """

    title: str
    rank: int
    world_size: int
    backend: str | None
    rows: tuple[ParameterRow, ...]
    units: tuple[UnitDescription, ...]
    meshes: tuple[DeviceMesh, ...]
    buffers: tuple[int, int]

    @property
    def elements(self) -> int:
        """Elements of all parameters, globally."""
        return sum(prod(row.shape) for row in self.rows)

    @property
    def local_bytes(self) -> int:
        """Bytes of what this rank holds of the parameters; parts on the meta device take none."""
        return sum(row.local_bytes for row in self.rows if "meta" not in row.states)

    def __str__(self) -> str:
        held, local = sum(prod(row.local_shape) for row in self.rows), self.local_bytes
        trained = sum(prod(row.shape) for row in self.rows if "frozen" not in row.states)
        head = (
            f"{self.title} on rank {self.rank} of {self.world_size}"
            f"{'' if self.backend is None else f', backend {self.backend}'}: {number(len(self.rows), 'parameter')} of "
            f"{self.elements:,} elements ({trained:,} trained), here {held:,} elements, {in_bytes(local)}"
        )
        lines = [head, *map(self._mesh_line, self.meshes), "", *self._table(), *self._unit_lines()]
        if self.buffers[0]:
            lines += ["", f"{number(self.buffers[0], 'buffer')}, {in_bytes(self.buffers[1])}"]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Description of {self.title}: {number(len(self.rows), 'parameter')}, print() shows all>"

    def _table(self) -> list[str]:
        several = len(self.meshes) > 1
        cells = [("parameter", "shape", "layout", "local shape", "dtype", "bytes", "state")]
        for row in self.rows:
            where = (
                f"{row.layout} on m{self.meshes.index(row.mesh)}" if several and row.mesh is not None else row.layout
            )
            state = ", ".join(row.states)
            sizes = (_shape(row.local_shape), row.dtype, f"{row.local_bytes:,}")
            cells.append((row.name, _shape(row.shape), where, *sizes, state))
        return aligned(cells, right={5}) if self.rows else ["no parameters"]

    def _mesh_line(self, mesh: DeviceMesh) -> str:
        label = f"m{self.meshes.index(mesh)} = " if len(self.meshes) > 1 else ""
        coordinate = mesh.get_coordinate(self.rank)
        if coordinate is None:
            return f"  {label}{mesh!r}: this rank is outside"
        axes = (f"{name} {list(mesh.members((axis,), self.rank))}" for axis, name in enumerate(mesh.mesh_dim_names))
        return f"  {label}{mesh!r} at {coordinate}; ranks along {', '.join(axes)}"

    def _unit_lines(self) -> list[str]:
        if not self.units:
            return []
        cells = [("unit", "state", "parameters", "ranks", "shard", "whole", "padding", "")]
        for unit in self.units:
            ranks = " x ".join(f"{count} {name}" for name, count in unit.ranks.items())
            whole = in_bytes(unit.whole_bytes) + (", in memory" if unit.gathered else "")
            sizes = (in_bytes(unit.shard_bytes), whole, f"{100 * unit.padding:.1f}%")
            cells.append((unit.name, unit.state, str(unit.parameters), ranks, *sizes, unit.waiting))
        return ["", *aligned(cells, right={2, 6})]


def describe(model: Any, *, file: TextIO | None = None) -> Description:
    """Print one table of the parameters of a model as this rank holds them, its FSDP units, and its meshes.

    Nothing is communicated or gathered; call it on the ranks of interest. States are FSDP's ("sharded", "gathering", "whole"),
    "replicated" for what FSDP keeps whole, "frozen", "grad" where a gradient is kept, "meta" where there is no memory yet,
    and "also NAME" for the other names of a tied parameter.

    Args:
        model: a module, a pipeline stage, or several of them.
        file: where to; default standard output.

    Returns:
        What was printed, as a value; of several modules, the last one's.

    Raises:
        PlatformError: it is no module of this framework.
    """
    several = list(model) if isinstance(model, (list, tuple)) else [model]
    found = None
    for one in several:
        found = _describe(one)
        print(found, file=sys.stdout if file is None else file)
    if found is None:
        raise ValueError("describe() of no modules: give at least one.")
    return found


def _describe(model: Any) -> Description:
    platform = get_platform()
    title, module = type(model).__name__, model
    if isinstance(model, StagedModule):
        module = model.submodule
        title = f"{type(module).__name__}, stage {model.stage_index} of {model.stage_num} on ranks {list(model.group.ranks)},"
    modules = platform.modules.named_modules(module)
    units: dict[int, UnitDescription] = {}
    unit_of: dict[tuple[int, str], UnitDescription] = {}
    for path, one in modules:
        if isinstance(one, DescribedModule):
            unit = one.describe_unit()
            if unit.identity not in units:
                unit_of |= {(id(holder), name): unit for holder, name in unit.holders}
                units[unit.identity] = replace(
                    unit, name=path or "(root)", holders=()
                )  # which would keep the model alive
    rows = tuple(_row(named, unit_of) for named in named_parameters(module))
    buffers = named_buffers(module)
    return Description(
        title=title,
        rank=get_rank(),
        world_size=get_world_size(),
        backend=platform.processes.backend(None) if platform.processes.is_initialized() else None,
        rows=rows,
        units=tuple(units.values()),
        meshes=tuple(dict.fromkeys(row.mesh for row in rows if row.mesh is not None)),
        buffers=(len(buffers), sum(_bytes_of(buffer) for buffer in buffers)),
    )


def _row(named: NamedTensor, unit_of: dict[tuple[int, str], UnitDescription]) -> ParameterRow:
    platform = get_platform()
    unit = unit_of.get((id(named.module), named.name.rpartition(".")[2]))
    return ParameterRow(
        name=named.name,
        shape=named.shape,
        layout="plain" if named.layout is None else named.layout.compact_str,
        mesh=named.mesh,
        local_shape=tuple(platform.tensors.shape(named.local)),
        dtype=platform.tensors.dtype_name(platform.tensors.dtype(named.local)),
        local_bytes=_bytes_of(named),
        states=tuple(_states(named, unit)),
    )


def _states(named: NamedTensor, unit: UnitDescription | None) -> Iterable[str]:
    platform = get_platform()
    if unit is not None:
        flat = named.layout is not None and named.layout.flat is not None
        yield unit.state if flat or unit.state != "sharded" else "replicated"
    if not platform.autograd.requires_grad(named.local):
        yield "frozen"
    if platform.autograd.kept_gradient(named.tensor) is not None:
        yield "grad"
    if platform.tensors.is_meta(named.local):
        yield "meta"
    yield from (f"also {name}" for name in named.aliases)


def _bytes_of(named: NamedTensor) -> int:
    tensors = get_platform().tensors
    return prod(tensors.shape(named.local)) * tensors.itemsize(tensors.dtype(named.local))


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
