"""`custom_shard`: a function of local tensors as a function of DTensors, with gradients by the same law as any op's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from hp_core.dtensor.agreement import agreed_global_shape
from hp_core.dtensor.api import DTensorMethods, dtensor_type
from hp_core.dtensor.distribute import Lay, layout_from, require_layout
from hp_core.dtensor.gradients import operand_local
from hp_core.errors import LayoutError
from hp_core.layout import Layout
from hp_core.mesh import DeviceMesh, as_mesh
from hp_core.placement import Placement
from hp_core.platform import get_platform

__all__ = ["custom_shard"]


def custom_shard(
    func: Callable[..., Any] | None = None,
    mesh: DeviceMesh | None = None,
    out_placements: Any = None,
    in_placements: Sequence[Lay | None] | None = None,
    redistribute_inputs: bool = False,
    *,
    in_grad_placements: Sequence[Lay | None] | None = None,
    out_shapes: Sequence[Sequence[int] | None] | None = None,
) -> Callable[..., Any]:
    """Make a function that works on this rank's parts take and give DTensors.

    A layout is given as a `Layout`, as placements (one per mesh axis), or as axis names (one entry per tensor dim, as in
    calling a `Layout`). Used as a decorator, leave `func` out::

        @custom_shard(out_placements=[Shard(0)], in_placements=([Shard(0)], [Replicate()]))
        def scaled(x, weight): ...

    Gradients follow the law of gradients. An axis on which an input or an output is cut or pending is active, and the local
    gradient of an input that is replicated there is this rank's contribution: it is summed over the axis. That is right for
    functions of the parts; one that communicates by itself may have to say `in_grad_placements`.

    The global shape of a cut output is agreed upon (one small all-gather per output) in the first call with inputs of
    these layouts, shapes and numbers, and remembered; with plain tensors among the inputs in every call. Give `out_shapes`
    where the sizes depend on the values.

    Args:
        func: takes and gives plain tensors.
        mesh: the mesh of the outputs; default that of the inputs.
        out_placements: the layout of the output; or a tuple of one per output, None for what is no tensor.
        in_placements: the layout of each positional argument, None for what is no DTensor or may lie as it does. Left out,
            all may.
        redistribute_inputs: bring inputs to these layouts; else other layouts are refused.
        in_grad_placements: for each positional argument the layout in which the function's backward gives its
            gradient, or None for what the law says.
        out_shapes: global shape of each output, or None where it is agreed upon.

    Returns:
        A function with the arguments of `func`. Without any mesh (no DTensor given, none named) it is `func` itself.

    Raises:
        LayoutError: when it is called, arguments or outputs aren't what was said; before anything is communicated.
    """
    if func is None:
        return functools.partial(
            custom_shard,
            mesh=mesh,
            out_placements=out_placements,
            in_placements=in_placements,
            redistribute_inputs=redistribute_inputs,
            in_grad_placements=in_grad_placements,
            out_shapes=out_shapes,
        )
    work = _CustomShard(func, mesh, out_placements, in_placements, redistribute_inputs, in_grad_placements, out_shapes)

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        return work(*args, **kwargs)

    return call


class _CustomShard:
    """One function and what was said of it; remembers the global shapes of its outputs."""

    def __init__(
        self,
        func: Callable[..., Any],
        mesh: DeviceMesh | None,
        out_placements: Any,
        in_placements: Sequence[Lay | None] | None,
        redistribute_inputs: bool,
        in_grad_placements: Sequence[Lay | None] | None,
        out_shapes: Sequence[Sequence[int] | None] | None,
    ) -> None:
        self._func = func
        self._name = f"custom_shard of {getattr(func, '__name__', type(func).__name__)}"
        self._mesh = None if mesh is None else as_mesh(mesh)
        several = isinstance(out_placements, tuple) and not _is_layout(out_placements)
        self._outputs: tuple[Lay | None, ...] = out_placements if several else (out_placements,)
        for lay in self._outputs:
            if lay is not None:
                require_layout(lay)
        self._inputs = None if in_placements is None else tuple(in_placements)
        self._move = redistribute_inputs
        self._gradients = None if in_grad_placements is None else tuple(in_grad_placements)
        self._shapes = (None,) * len(self._outputs) if out_shapes is None else tuple(out_shapes)
        if len(self._shapes) != len(self._outputs):
            raise LayoutError(f"{self._name}: {len(self._shapes)} out_shapes for {len(self._outputs)} outputs.")
        self._agreed: dict[Hashable, list[tuple[tuple[int, ...], tuple[int, ...]] | None]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function on local tensors and wrap what it gives."""
        tensors: list[Any] = []
        plain: list[Any] = []
        _collect((args, kwargs), tensors, plain)
        mesh = self._mesh_of(tensors)
        if mesh is None:
            return self._func(*args, **kwargs)
        inputs = self._expanded(self._inputs, len(args), "in_placements")
        gradients = self._expanded(self._gradients, len(args), "in_grad_placements")
        wanted = [self._layout_in(index, args[index], lay, mesh) for index, lay in enumerate(inputs)]
        active = self._active_axes(mesh, tensors, wanted)
        local_args = [
            self._local(value, layout, gradient, active)
            for value, layout, gradient in zip(args, wanted, gradients, strict=True)
        ]
        local_kwargs = {name: _localised(value, active) for name, value in kwargs.items()}
        result = self._func(*local_args, **local_kwargs)
        results = result if isinstance(result, (tuple, list)) else (result,)
        layouts = self._layouts_out(results, mesh)
        shapes = self._global_shapes(results, layouts, self._key(args, kwargs, plain))
        wrapped = [
            value if layout is None else DTensorMethods.from_local(value, layout, shape=shape)
            for value, layout, shape in zip(results, layouts, shapes, strict=True)
        ]
        if results is not result:
            return wrapped[0]
        return type(result)(*wrapped) if hasattr(result, "_fields") else type(result)(wrapped)

    # -- inputs -----------------------------------------------------------------------------------------------------

    def _mesh_of(self, tensors: list[Any]) -> DeviceMesh | None:
        mesh = self._mesh
        for tensor in tensors:
            if mesh is None:
                mesh = tensor.device_mesh
            elif tensor.device_mesh is not mesh:
                raise LayoutError(f"{self._name}: works on {mesh!r}, but got a DTensor on {tensor.device_mesh!r}.")
        if mesh is not None:
            mesh.require_coordinate()
        return mesh

    def _expanded(self, given: tuple[Lay | None, ...] | None, count: int, what: str) -> tuple[Lay | None, ...]:
        if given is None:
            return (None,) * count
        if len(given) != count:
            raise LayoutError(
                f"{self._name}: {what} has {len(given)} entries, but it was called with {count} positional arguments; give "
                f"one entry for each, None for what is no DTensor."
            )
        return given

    def _layout_in(self, index: int, value: Any, lay: Lay | None, mesh: DeviceMesh) -> Layout | None:
        """The layout that an argument must have; None where it may stay."""
        if lay is None:
            return None
        if not isinstance(value, dtensor_type()):
            raise LayoutError(
                f"{self._name}: in_placements says how argument {index} lies, but it is a {type(value).__name__}, not a DTensor; "
                f"wrap it with distribute_tensor() or DTensor.from_local(), or say None."
            )
        have: Layout = value.layout  # type: ignore[attr-defined]
        layout = layout_from(mesh, lay, value.ndim)  # type: ignore[attr-defined]
        if layout is not have and not self._move:
            raise LayoutError(
                f"{self._name}: argument {index} is laid out {have}, but in_placements says {layout}; redistribute it, or pass "
                f"redistribute_inputs=True."
            )
        return layout

    def _active_axes(self, mesh: DeviceMesh, tensors: list[Any], wanted: list[Layout | None]) -> frozenset[int]:
        """Axes on which some input or output is cut or pending."""
        active = frozenset().union(*[tensor.layout.active_axes for tensor in tensors])
        if any(layout is not None for layout in wanted):
            active = active.union(*[layout.active_axes for layout in wanted if layout is not None])
        for lay in self._outputs:
            if isinstance(lay, Layout):
                active |= lay.active_axes
            elif lay is not None and all(isinstance(entry, Placement) for entry in lay):
                pairs = enumerate(zip(lay, mesh.shape, strict=False))
                active |= {axis for axis, (one, size) in pairs if size > 1 and not one.is_replicate()}  # type: ignore[union-attr]
            elif lay is not None:
                active |= layout_from(mesh, lay, len(lay)).active_axes
        return active

    def _local(self, value: Any, layout: Layout | None, gradient: Lay | None, active: frozenset[int]) -> Any:
        if not isinstance(value, dtensor_type()):
            return _localised(value, active)
        target: Layout = value.layout if layout is None else layout  # type: ignore[attr-defined]
        if gradient is None:
            return _operand(value, target, active)
        return value.redistribute(target).to_local(  # type: ignore[attr-defined]
            grad_placements=layout_from(target.mesh, gradient, value.ndim)  # type: ignore[attr-defined]
        )

    # -- outputs ----------------------------------------------------------------------------------------------------

    def _layouts_out(self, results: Sequence[Any], mesh: DeviceMesh) -> list[Layout | None]:
        if len(results) != len(self._outputs):
            raise LayoutError(
                f"{self._name}: out_placements tells of {len(self._outputs)} outputs, but the function gave {len(results)}. For "
                f"several outputs give a tuple of layouts, None for what is no tensor."
            )
        is_tensor = get_platform().tensors.is_tensor
        layouts: list[Layout | None] = []
        for index, (value, lay) in enumerate(zip(results, self._outputs, strict=True)):
            if is_tensor(value) is (lay is None) or isinstance(value, dtensor_type()):
                raise LayoutError(
                    f"{self._name}: output {index} is a {type(value).__name__}, but out_placements says {lay!r} for it; say a "
                    f"layout for a plain tensor, and None for what is no tensor."
                )
            layouts.append(None if lay is None else layout_from(mesh, lay, value.ndim))
        return layouts

    def _global_shapes(
        self, results: Sequence[Any], layouts: list[Layout | None], key: Hashable | None
    ) -> list[tuple[int, ...] | None]:
        """The global shapes of the outputs; whether ranks talk depends only on what is equal on all of them."""
        known = None if key is None else self._agreed.get(key)
        found: list[tuple[tuple[int, ...], tuple[int, ...]] | None] = []
        for index, (value, layout, given) in enumerate(zip(results, layouts, self._shapes, strict=True)):
            if layout is None:
                found.append(None)
                continue
            own = tuple(get_platform().tensors.shape(value))
            if known is None:
                cut = any(layout.mesh.shape[axis] > 1 for axis in layout.sharded_axes)
                shape = given if given is not None else agreed_global_shape(layout, value, None) if cut else own
                found.append((own, tuple(shape)))
                continue
            entry = known[index]
            if entry is None or entry[0] != own:
                raise LayoutError(
                    f"{self._name}: output {index} has local shape {own}, but {entry and entry[0]} in an earlier call with the "
                    f"same input layouts and shapes. Where sizes depend on values, pass out_shapes=."
                )
            found.append(entry)
        if key is not None and known is None:
            self._agreed[key] = found
        return [None if entry is None else entry[1] for entry in found]

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any], plain: list[Any]) -> Hashable | None:
        """What tells calls apart, equal on all ranks; None if it can't be told (local shapes may change on one rank only)."""
        if plain:
            return None
        key = (_key_of(args), tuple((name, _key_of(value)) for name, value in kwargs.items()))
        try:
            hash(key)
        except TypeError:
            return None
        return key


def _is_layout(given: Any) -> bool:
    """Whether a tuple says one layout, by placements or by axis names, and not one per output."""
    return not given or any(isinstance(entry, (Placement, str)) for entry in given)


def _collect(value: Any, tensors: list[Any], plain: list[Any]) -> None:
    """DTensors and plain tensors among the arguments."""
    if isinstance(value, dtensor_type()):
        tensors.append(value)
    elif get_platform().tensors.is_tensor(value):
        plain.append(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _collect(item, tensors, plain)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, tensors, plain)


def _localised(value: Any, active: frozenset[int]) -> Any:
    """A value with the local tensors of the DTensors in it."""
    if isinstance(value, dtensor_type()):
        return _operand(value, value.layout, active)  # type: ignore[attr-defined]
    if type(value) in (tuple, list):
        return type(value)(_localised(item, active) for item in value)
    if type(value) is dict:
        return {name: _localised(item, active) for name, item in value.items()}
    return value


def _operand(value: Any, layout: Layout, active: frozenset[int]) -> Any:
    """The local tensor, as the dispatcher would give it to an op that is active on these axes."""
    target = None if layout is value.layout else layout
    local = operand_local(value, target, tuple(sorted(active - layout.active_axes)))
    autograd = get_platform().autograd
    return autograd.alias(local) if local is value._local and autograd.needs_gradient(local) else local


def _key_of(value: Any) -> Any:
    if isinstance(value, dtensor_type()):
        return value._spec  # type: ignore[attr-defined]
    if isinstance(value, (tuple, list)):
        return (type(value), *map(_key_of, value))
    if isinstance(value, dict):
        return (dict, *[(name, _key_of(item)) for name, item in value.items()])
    return (type(value), value)
