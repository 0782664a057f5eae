"""Tensor-parallel styles: how one module's parameters are cut over one mesh axis, and how its inputs and outputs lie.

Names, arguments and defaults are those of torch.distributed.tensor.parallel. A style works on *one* axis of the mesh it is
given; parameters are replicated over the other axes, and activations keep whatever layout they have there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from hp_core.dtensor.api import DTensorMethods, dtensor_type
from hp_core.dtensor.distribute import Replaced, replace_parameters
from hp_core.errors import LayoutError, PlanError
from hp_core.layout import Layout, intern
from hp_core.mesh import DeviceMesh, as_mesh
from hp_core.placement import Partial, Placement, Replicate, Shard
from hp_core.platform import get_platform
from hp_core.platform.protocol import Tensor

__all__ = [
    "ColwiseParallel",
    "NoParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "axis_of",
    "with_axis",
]

Layouts = Placement | Sequence[Placement | None] | None


class ParallelStyle:
    """Base of the styles: `apply(module, mesh)` shards a module over one axis of a mesh."""

    def apply(
        self,
        module: Any,
        mesh: DeviceMesh,
        *,
        axis: str | None = None,
        src_data_rank: int | None = 0,
        path: str = "",
        replaced: Replaced | None = None,
    ) -> Any:
        """Shard the parameters of `module` and arrange its inputs and outputs; return the module.

        Args:
            module: the module, changed in place.
            mesh: the mesh.
            axis: name of the axis to work on; default the only one, or "tp".
            src_data_rank: see `hp_core.distribute_tensor`.
            path: the module's name, for messages.
            replaced: parameters that were already distributed in the same call of `parallelize_module`.

        Raises:
            PlanError: the style doesn't fit the module, or the mesh has no such axis.
        """
        mesh = as_mesh(mesh)
        place = _Place(mesh, axis_of(mesh, axis), path or type(module).__name__, type(self).__name__)
        self.arrange(module, place, src_data_rank, {} if replaced is None else replaced)
        return module

    def arrange(self, module: Any, place: _Place, src_data_rank: int | None, replaced: Replaced) -> None:
        """What a style does; `apply` has found out where."""
        raise NotImplementedError


class _Place:
    """Where a style works: mesh, axis and module; knows how activations lie on that axis."""

    def __init__(self, mesh: DeviceMesh, axis: int, path: str, style: str) -> None:
        self.mesh, self.axis, self.path, self.style = mesh, axis, path, style
        self._others = [
            name
            for index, (name, size) in enumerate(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
            if index != axis and size > 1
        ]

    def parameter_layout(self, placement: Placement, ndim: int) -> Layout:
        """Replicated but for this axis."""
        return with_axis(intern(self.mesh), self.axis, placement, ndim)

    def take(self, value: Any, said: Placement | None, wanted: Placement | None, features: int | None = None) -> Any:
        """An input as a DTensor laid out as wanted on this axis.

        Args:
            value: the input; what is no tensor passes through.
            said: how a plain tensor lies.
            wanted: how it shall lie; None leaves it.
            features: global size of the last dim, if it is known; uneven parts can't be told from one of them.
        """
        if type(value) is not dtensor_type():
            if said is None or not get_platform().tensors.is_tensor(value):
                return value
            value = self._from_plain(value, said, features)
        if wanted is None:
            return value
        spec = value._spec
        if spec.layout.mesh is not self.mesh:
            raise LayoutError(
                f"{self.style} of module {self.path!r} works on {self.mesh!r}, but got a DTensor on {spec.layout.mesh!r}."
            )
        target = with_axis(spec.layout, self.axis, wanted, len(spec.shape))
        return value if target is spec.layout else value.redistribute(target)

    def give(self, value: Any, said: Placement | None, wanted: Placement | None, local: bool) -> Any:
        """An output laid out as wanted on this axis, as a plain local tensor if asked for."""
        value = self.take(value, said, wanted)
        if local and isinstance(value, DTensorMethods):
            self._require_single_axis("use_local_output=True gives plain tensors, which")
            return value.to_local()
        return value

    def _from_plain(self, value: Tensor, said: Placement, features: int | None) -> Any:
        self._require_single_axis("a plain tensor")
        layout = self.parameter_layout(said, value.ndim)
        shape = None
        if features is not None:
            shape = (*layout.infer_global_shape(tuple(value.shape))[:-1], features)
        return DTensorMethods.from_local(value, layout, shape=shape)

    def _require_single_axis(self, what: str) -> None:
        if self._others:
            raise PlanError(
                f"{self.style} of module {self.path!r}: {what} can't say how it lies on axes {self._others} of {self.mesh!r}. "
                f"On a mesh of several axes keep activations DTensors: use_local_output=False, and inputs made by "
                f"DTensor.from_local(batch, mesh, placements)."
            )


class _CutFeatures(ParallelStyle):
    """What the column-wise and the row-wise style are told."""

    default_input: Placement
    default_output: Placement

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layout = input_layouts or self.default_input
        self.output_layout = output_layouts or self.default_output
        self.use_local_output = use_local_output


class ColwiseParallel(_CutFeatures):
    """Cut a Linear along its output features, or an Embedding along its features.

    Args:
        input_layouts: how a plain input lies on the axis; default `Replicate()`.
        output_layouts: how the output shall lie; default `Shard(-1)`.
        use_local_output: give a plain local tensor instead of a DTensor.
    """

    default_input, default_output = Replicate(), Shard(-1)

    def arrange(self, module: Any, place: _Place, src_data_rank: int | None, replaced: Replaced) -> None:
        """Weight and bias on dim 0 (Linear), weight on dim 1 (Embedding); the input is gathered."""
        dim = {"linear": 0, "embedding": 1}[_linear_or_embedding(module, place)]
        replace_parameters(
            module, place.path, lambda _, p: place.parameter_layout(Shard(dim), p.ndim), src_data_rank, replaced
        )
        _arrange_first_input(module, place, self.input_layout, Replicate())
        _arrange_output(module, place, Shard(-1), self.output_layout, self.use_local_output)


class RowwiseParallel(_CutFeatures):
    """Cut a Linear along its input features, or an Embedding along its vocabulary; the output is a sum over the axis.

    Args:
        input_layouts: how a plain input lies on the axis; default `Shard(-1)` (for an Embedding usually `Replicate()`).
        output_layouts: how the output shall lie; default `Replicate()`.
        use_local_output: give a plain local tensor instead of a DTensor.
    """

    default_input, default_output = Shard(-1), Replicate()

    def arrange(self, module: Any, place: _Place, src_data_rank: int | None, replaced: Replaced) -> None:
        """Weight on dim 1, bias whole (Linear); weight on dim 0 (Embedding)."""
        linear = _linear_or_embedding(module, place) == "linear"

        def layout_for(name: str, parameter: Tensor) -> Layout:
            placement: Placement = Replicate() if name == "bias" else Shard(1 if linear else 0)
            return place.parameter_layout(placement, parameter.ndim)

        replace_parameters(module, place.path, layout_for, src_data_rank, replaced)
        features = dict(get_platform().modules.own_parameters(module))["weight"].shape[1] if linear else None
        _arrange_first_input(module, place, self.input_layout, Shard(-1) if linear else Replicate(), features)
        _arrange_output(module, place, Partial(), self.output_layout, self.use_local_output)


class SequenceParallel(ParallelStyle):
    """Replicate a module's parameters and run it on inputs cut along the sequence (norms, dropout).

    Args:
        sequence_dim: the dim that is cut; default 1, of [batch, sequence, ...].
        use_local_output: give a plain local tensor instead of a DTensor.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence = Shard(sequence_dim)
        self.use_local_output = use_local_output

    def arrange(self, module: Any, place: _Place, src_data_rank: int | None, replaced: Replaced) -> None:
        """Whole parameters, cut activations."""
        _replicate(module, place, src_data_rank, replaced)
        _arrange_first_input(module, place, self.sequence, self.sequence)
        _arrange_output(module, place, None, None, self.use_local_output)


class PrepareModuleInput(ParallelStyle):
    """Only arrange a module's inputs; its parameters are left alone.

    Args:
        input_layouts: how plain positional inputs lie on the axis, one per input (None leaves it as it is).
        desired_input_layouts: how the module shall get them.
        input_kwarg_layouts: the same for keyword inputs, by name.
        desired_input_kwarg_layouts: how the module shall get them.
        use_local_output: give the module plain local tensors instead of DTensors.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.said, self.wanted = _as_layouts(input_layouts), _as_layouts(desired_input_layouts)
        self.said_by_name = input_kwarg_layouts or {}
        self.wanted_by_name = desired_input_kwarg_layouts or {}
        self.use_local_output = use_local_output
        if len(self.said) != len(self.wanted):
            raise PlanError(f"input_layouts {self.said} and desired_input_layouts {self.wanted} must be equally many.")
        if set(self.said_by_name) != set(self.wanted_by_name):
            raise PlanError(
                f"input_kwarg_layouts names {sorted(self.said_by_name)}, desired_input_kwarg_layouts "
                f"{sorted(self.wanted_by_name)}; name the same inputs."
            )

    def arrange(self, module: Any, place: _Place, src_data_rank: int | None, replaced: Replaced) -> None:
        """Hook the inputs."""

        def hook(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self.said and len(args) != len(self.said):
                raise PlanError(
                    f"PrepareModuleInput of module {place.path!r} describes {len(self.said)} positional inputs, but the module was "
                    f"called with {len(args)}."
                )
            pairs = zip(args, self.said, self.wanted, strict=True) if self.said else ()
            new_args = tuple(place.give(value, said, wanted, self.use_local_output) for value, said, wanted in pairs)
            new_kwargs = {
                name: place.give(value, self.said_by_name[name], self.wanted_by_name[name], self.use_local_output)
                if name in self.said_by_name
                else value
                for name, value in kwargs.items()
            }
            return new_args or args, new_kwargs

        get_platform().modules.hook_inputs(module, hook)


class PrepareModuleOutput(ParallelStyle):
    """Only arrange a module's outputs.

    Args:
        output_layouts: how plain outputs lie on the axis, one per output (None leaves it as it is).
        desired_output_layouts: how they shall lie.
        use_local_output: give plain local tensors instead of DTensors.
    """

    def __init__(
        self, *, output_layouts: Layouts, desired_output_layouts: Layouts, use_local_output: bool = True
    ) -> None:
        self.said, self.wanted = _as_layouts(output_layouts), _as_layouts(desired_output_layouts)
        self.use_local_output = use_local_output
        if len(self.said) != len(self.wanted):
            raise PlanError(
                f"output_layouts {self.said} and desired_output_layouts {self.wanted} must be equally many."
            )

    def arrange(self, module: Any, place: _Place, src_data_rank: int | None, replaced: Replaced) -> None:
        """Hook the outputs."""

        def hook(output: Any) -> Any:
            several = isinstance(output, (tuple, list))
            values = tuple(output) if several else (output,)
            if len(values) != len(self.said):
                raise PlanError(
                    f"PrepareModuleOutput of module {place.path!r} describes {len(self.said)} outputs, but the module gave "
                    f"{len(values)}."
                )
            given = [
                place.give(value, said, wanted, self.use_local_output)
                for value, said, wanted in zip(values, self.said, self.wanted, strict=True)
            ]
            return type(output)(given) if several else given[0]

        get_platform().modules.hook_output(module, hook)


class PrepareModuleInputOutput(ParallelStyle):
    """Arrange a module's inputs and outputs; see `PrepareModuleInput` and `PrepareModuleOutput`."""

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.inputs = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.outputs = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def arrange(self, module: Any, place: _Place, src_data_rank: int | None, replaced: Replaced) -> None:
        """Both."""
        self.inputs.arrange(module, place, src_data_rank, replaced)
        self.outputs.arrange(module, place, src_data_rank, replaced)


class NoParallel(ParallelStyle):
    """Replicate a module's parameters so that it can take and give DTensors, without cutting anything.

    Args:
        input_layout: how a plain input lies on the axis; default `Replicate()`.
        output_layout: how the output shall lie; default `Replicate()`.
        use_local_output: give a plain local tensor instead of a DTensor.
    """

    def __init__(
        self,
        *,
        input_layout: Placement | None = None,
        output_layout: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layout = input_layout or Replicate()
        self.output_layout = output_layout or Replicate()
        self.use_local_output = use_local_output

    def arrange(self, module: Any, place: _Place, src_data_rank: int | None, replaced: Replaced) -> None:
        """Whole parameters, whole input."""
        _replicate(module, place, src_data_rank, replaced)
        _arrange_first_input(module, place, self.input_layout, Replicate())
        _arrange_output(module, place, Replicate(), self.output_layout, self.use_local_output)


@lru_cache(maxsize=1 << 12)
def with_axis(layout: Layout, axis: int, placement: Placement, ndim: int) -> Layout:
    """`layout` with another placement on one mesh axis; a new cut of a dim is its innermost one. Flat shares come together."""
    layout = layout.unflat
    dims = [tuple(a for a in layout.axes_of(dim) if a != axis) for dim in range(ndim)]
    partials = tuple(pair for pair in layout.partials if pair[0] != axis)
    if isinstance(placement, Shard):
        dim = placement.dim + ndim if placement.dim < 0 else placement.dim
        if not 0 <= dim < ndim:
            raise LayoutError(
                f"placement {placement} on axis {layout.mesh.mesh_dim_names[axis]!r}: the tensor has {ndim} dims."
            )
        if axis in layout.axes_of(dim):
            return layout
        dims[dim] = (*dims[dim], axis)
    elif isinstance(placement, Partial):
        partials = tuple(sorted((*partials, (axis, placement.reduce_op))))
    elif not isinstance(placement, Replicate):
        raise LayoutError(f"a style can't use {placement}; use Shard, Replicate or Partial.")
    ragged = layout.ragged if dims and dims[0] == layout.axes_of(0) else None
    return intern(layout.mesh, tuple(dims), partials, ragged)


def axis_of(mesh: DeviceMesh, axis: str | None) -> int:
    """The mesh axis that styles work on: the one named, the only one, or "tp"."""
    if axis is not None:
        return mesh.axis_index(axis)
    if mesh.ndim == 1:
        return 0
    if "tp" in mesh.mesh_dim_names:
        return mesh.axis_index("tp")
    raise PlanError(f"{mesh!r} has several axes and none is called 'tp'; say which one with axis=.")


def _replicate(module: Any, place: _Place, src_data_rank: int | None, replaced: Replaced) -> None:
    for name, submodule in get_platform().modules.named_modules(module):
        path = f"{place.path}.{name}" if name else place.path
        replace_parameters(
            submodule, path, lambda _, p: place.parameter_layout(Replicate(), p.ndim), src_data_rank, replaced
        )


def _linear_or_embedding(module: Any, place: _Place) -> str:
    kind = get_platform().modules.kind(module)
    if kind not in ("linear", "embedding"):
        raise PlanError(
            f"{place.style} cuts Linear and Embedding modules, but {place.path!r} is a {type(module).__name__}; name its Linear "
            f"children in the plan, or use PrepareModuleInput, SequenceParallel or NoParallel."
        )
    return kind


def _arrange_first_input(
    module: Any, place: _Place, said: Placement, wanted: Placement, features: int | None = None
) -> None:
    def hook(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (place.take(args[0], said, wanted, features), *args[1:]) if args else args, kwargs

    get_platform().modules.hook_inputs(module, hook)


def _arrange_output(module: Any, place: _Place, said: Placement | None, wanted: Placement | None, local: bool) -> None:
    get_platform().modules.hook_output(module, lambda output: place.give(output, said, wanted, local))


def _as_layouts(given: Layouts) -> tuple[Placement | None, ...]:
    return () if given is None else (given,) if isinstance(given, Placement) else tuple(given)
