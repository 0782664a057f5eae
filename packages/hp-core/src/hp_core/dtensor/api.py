"""`DTensor`: a local tensor and a layout, with the global tensor's metadata. Construction, conversion, redistribution.

The class itself is made by the platform from `DTensorMethods` on first use of `hp_core.dtensor.api.DTensor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hp_core.dtensor.agreement import agreed_global_shape
from hp_core.dtensor.arriving import Arriving
from hp_core.dtensor.gradients import Origin, redistribute_local
from hp_core.errors import LayoutError
from hp_core.layout import Layout, intern, layout_of
from hp_core.mesh import DeviceMesh
from hp_core.placement import Placement
from hp_core.platform import get_platform
from hp_core.platform.protocol import DType, Tensor
from hp_core.process_group import on_destroy
from hp_core.redistribute.execution import ABSENT_SHAPE, Arrivals
from hp_core.rules.spec import TensorSpec, spec_of

__all__ = ["DTensor", "DTensorMethods", "dtensor_type"]

_class: type | None = None


def dtensor_type() -> type:
    """The class `DTensor` of the current platform; the first call makes it."""
    global _class
    if _class is None:
        from hp_core.dtensor.dispatch import dispatch

        _class = get_platform().define_dtensor(dispatch, DTensorMethods)
        get_platform().allow_in_files((rebuild, intern, DeviceMesh))
    return _class


class DTensorMethods:
    """A global tensor of which each rank of a mesh holds a part, as its layout says.

    Ops on DTensors run on the local tensors and give DTensors; collectives happen where layouts ask for them. Values,
    shapes and gradients mean the global tensor: the gradient of a replicated tensor is the full, dense gradient.
    """

    _local: Tensor  # missing while an asynchronous redistribution is on its way
    _spec: TensorSpec
    _memo: dict[Any, Any] | None = None
    _origin: Origin | None = None
    _is_detached_view: bool = False  # a view in the dense program, but here of a copy that was moved

    def __getattr__(self, name: str) -> Any:
        """Only called for what isn't there: the local tensor of a redistribution on its way is waited for."""
        arriving: Arriving | None = self.__dict__.get("_arriving") if name == "_local" else None
        if arriving is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        local = arriving.wait()
        if self._origin is not None:
            self._origin.version = get_platform().autograd.version(local)
        self._local = local
        del self._arriving
        return local

    # -- making one -------------------------------------------------------------------------------------------------

    @staticmethod
    def from_local(
        local: Tensor,
        layout: Layout | DeviceMesh,
        placements: Sequence[Placement] | None = None,
        *,
        shape: Sequence[int] | None = None,
        run_check: bool = False,
        grad_placements: Sequence[Placement] | Layout | None = None,
    ) -> DTensor:
        """Take local tensors as the parts of one global tensor. Nothing is communicated, unless `run_check` is set.

        Args:
            local: this rank's part; on a rank outside of the mesh any tensor without elements, of the right dtype.
            layout: a Layout, or a mesh (ours or torch's) with `placements`.
            placements: one per mesh axis; default replicated.
            shape: global shape; needed when the parts are uneven, and outside of the mesh; else told from this rank's part.
            run_check: exchange the parts' shapes (one small all-gather), so that uneven parts give the right global shape
                and parts that don't fit together are refused alike on all ranks.
            grad_placements: the layout in which the local gradient is wanted, if not by the law of gradients;
                `Partial` leaves it unreduced.

        Raises:
            LayoutError: the local shape isn't what the layout gives this rank of a tensor of that shape.
        """
        cls = dtensor_type()
        if isinstance(local, cls):
            raise LayoutError(f"from_local() takes a plain tensor, got a DTensor laid out {local._spec.layout}.")  # type: ignore[attr-defined]
        platform = get_platform()
        local_shape = platform.tensors.shape(local)
        resolved = layout_of(layout, placements, len(local_shape if shape is None else shape))
        device = platform.tensors.device_type_of(local)
        if device != resolved.mesh.device_type and resolved.mesh.device_type is not None and device != "meta":
            raise LayoutError(
                f"the local tensor is on a device of type {device!r}, but {resolved.mesh!r} is of type "
                f"{resolved.mesh.device_type!r}; move the tensor, or make the mesh for {device!r}."
            )
        if resolved.mesh.get_coordinate() is None:
            local = _nothing(local, local_shape, shape, resolved)
            local_shape = ABSENT_SHAPE
        elif run_check:
            shape = agreed_global_shape(resolved, local, shape)
        spec = _spec_of_part(
            resolved, local_shape, None if shape is None else tuple(shape), platform.tensors.dtype(local)
        )
        autograd = platform.autograd
        if autograd.needs_gradient(local):
            if grad_placements is None:
                if autograd.is_leaf(local):  # else its gradient would land on the caller's own tensor
                    local = autograd.alias(local)
            else:
                wanted = layout_of(*_layout_arguments(resolved.mesh, grad_placements), spec.ndim)
                local = _with_gradient_layout(local, resolved.gradient, wanted, spec)
        return platform.new_dtensor(cls, local, spec)  # type: ignore[no-any-return]

    # -- what it is -------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """How the tensor lies on its mesh."""
        return self._spec.layout

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The layout as one placement per mesh axis."""
        return self._spec.layout.placements

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh."""
        return self._spec.layout.mesh

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part; (0,) outside of the mesh."""
        return get_platform().tensors.shape(self._local)

    def is_partial(self) -> bool:
        """Whether a reduction is pending."""
        return self._spec.layout.is_partial()

    # -- conversion -------------------------------------------------------------------------------------------------

    def to_local(self, *, grad_placements: Sequence[Placement] | Layout | None = None) -> Tensor:
        """This rank's part as a plain tensor, in the graph.

        Args:
            grad_placements: the layout that the gradient of the result will have, if not by the law of gradients: pass
                `Partial()` for an axis on which each rank will contribute only its share.
        """
        local = self._local
        autograd = get_platform().autograd
        if not autograd.needs_gradient(local):
            return local
        if grad_placements is None:
            return autograd.alias(local) if autograd.is_leaf(local) else local
        given = layout_of(*_layout_arguments(self._spec.layout.mesh, grad_placements), self._spec.ndim)
        return _with_gradient_layout(local, given, self._spec.layout.gradient, self._spec)

    def full_tensor(self) -> Tensor:
        """The global tensor as a plain tensor, equal on every rank; its gradient is the dense one.

        Raises:
            MeshError: this rank is outside of the mesh; `redistribute()` to a mesh that it is part of first.
        """
        self._spec.layout.mesh.require_coordinate()
        return self.redistribute(self._spec.layout.replicated).to_local()

    def to_torch(self) -> Any:
        """The same tensor as a `torch.distributed.tensor.DTensor`, without a copy and in the graph.

        Raises:
            LayoutError: torch's placements can't say this layout.
        """
        return get_platform().dtensor_to_native(self)

    @staticmethod
    def from_torch(tensor: Any) -> DTensor:
        """A `torch.distributed.tensor.DTensor` as one of ours, without a copy and in the graph.

        Raises:
            LayoutError: its placements mean no layout that we have.
        """
        local, mesh, placements, orders = get_platform().native_parts(tensor)
        shape = tuple(tensor.shape)
        layout = layout_of(mesh, tuple(placements), len(shape))
        if orders:
            dims = [orders.get(dim, layout.axes_of(dim)) for dim in range(len(shape))]
            layout = intern(layout.mesh, tuple(dims), layout.partials)
        return DTensorMethods.from_local(local, layout, shape=shape)

    # -- redistribution ---------------------------------------------------------------------------------------------

    def redistribute(
        self,
        layout: Layout | DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        backward_dtype: DType = None,
        async_op: bool = False,
    ) -> DTensor:
        """The same global tensor in another layout; in the backward the gradient takes the way back.

        The layout may lie on another mesh, of other ranks. All ranks of both meshes call this, and run the backward, in
        the same order: a rank outside of this tensor's mesh on what `from_local` of nothing gave it, and a rank outside
        of the other mesh gets such a tensor, on which it calls `backward()` when the others run theirs.

        Args:
            layout: a Layout, or the mesh with `placements`; left out, `placements` are on this tensor's mesh.
            placements: one per mesh axis.
            backward_dtype: element type in which the gradient travels; default its own.
            async_op: return while the last collective of the plan runs; the result waits for it when first used (by an
                op, `to_local`, `grad`, `repr`, ...; shape and layout are known before). Until then this tensor must not
                be written to; if it is, the first use is an error. The backward is synchronous.

        Raises:
            RedistributeError: there is no way.
        """
        spec = self._spec
        if type(layout) is not Layout or placements is not None:
            layout = layout_of(spec.layout.mesh if layout is None else layout, placements, spec.ndim)
        if layout is spec.layout and backward_dtype is None:
            return self  # type: ignore[return-value]
        platform = get_platform()
        local = self._local
        target = spec_of(layout, spec.shape, spec.dtype)
        arrivals: Arrivals | None = [] if async_op else None
        moved = redistribute_local(local, spec.layout, layout, spec.shape, spec.dtype, (), backward_dtype, arrivals)
        result = platform.new_dtensor(
            type(self), moved if moved is not local else platform.autograd.alias(local), target
        )
        if platform.autograd.needs_gradient(local) and _may_tie(spec.layout, layout, backward_dtype is not None):
            result._origin = Origin(local, spec.layout, platform.autograd.version(moved), backward_dtype)
        if arrivals:
            result._arriving = Arriving(moved, arrivals, local, target)
            del result._local
        return result  # type: ignore[no-any-return]

    def reduce_partial(self) -> DTensor:
        """The same tensor with its pending reductions done (all-reduce); itself if there are none."""
        return self.redistribute(self._spec.layout.gradient)

    # -- what dispatch and the platform's class keep on it ------------------------------------------------------------

    def _forget(self) -> None:
        """Drop what was remembered for gradients: the tensor was written to, or its part in the graph changed."""
        self._memo = None
        self._origin = None

    def _untie(self) -> None:
        """Let gradients pass through this tensor itself, because someone wants to see them here."""
        if self._has_tied_use():
            raise LayoutError(
                "the gradient of this gathered DTensor was tied to its sharded source when it was used; register hooks and "
                "call retain_grad() right after redistribute(), before the first op."
            )
        self._origin = None

    @property
    def _rebuild(self) -> Any:
        return rebuild

    def _has_tied_use(self) -> bool:
        return self._origin is not None and self._origin.used


def rebuild(
    local: Tensor,
    layout: Layout,
    shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    requires_grad: bool,
    is_parameter: bool,
) -> Any:
    """Make a DTensor from its pickled parts, on the rank that it belongs to.

    Raises:
        LayoutError: this process is at another coordinate of the mesh than the one that pickled it.
    """
    own = layout.mesh.get_coordinate()
    if own != coordinate:
        raise LayoutError(
            f"this holds the piece of mesh coordinate {coordinate} of a tensor laid out {layout}; this process is at {own}. "
            f"Load it on the rank that saved it, or use torch.distributed.checkpoint to change the layout."
        )
    tensor = DTensorMethods.from_local(local, layout, shape=shape)
    return (
        get_platform().modules.as_parameter(tensor, requires_grad)
        if is_parameter
        else tensor.requires_grad_(requires_grad)
    )


@lru_cache(maxsize=1 << 14)
def _spec_of_part(
    layout: Layout, local_shape: tuple[int, ...], shape: tuple[int, ...] | None, dtype: DType
) -> TensorSpec:
    """The spec of the tensor of which this rank holds a part of `local_shape`; its global shape is told if not given."""
    if shape is not None and layout.mesh.get_coordinate() is None:
        return spec_of(layout, shape, dtype)
    global_shape = layout.infer_global_shape(local_shape) if shape is None else shape
    expected = layout.local_shape(global_shape)
    if tuple(local_shape) != expected:
        raise LayoutError(
            f"rank {layout.mesh._own_rank()} holds a local tensor of shape {tuple(local_shape)}, but of a global tensor of "
            f"shape {tuple(global_shape)} laid out {layout} its part is {expected}. Pass the right shape=, or another layout."
        )
    return spec_of(layout, global_shape, dtype)


on_destroy(_spec_of_part.cache_clear)


def _nothing(local: Tensor, local_shape: tuple[int, ...], shape: Sequence[int] | None, layout: Layout) -> Tensor:
    """What a rank outside of the mesh holds."""
    if shape is None or 0 not in local_shape:
        raise LayoutError(
            f"rank {layout.mesh._own_rank()} is outside of {layout.mesh!r}, so it holds nothing of a tensor laid out there, "
            f"but was given a local tensor of shape {tuple(local_shape)} and shape={shape}. Pass a tensor without elements "
            f"and the global shape=."
        )
    if tuple(local_shape) == ABSENT_SHAPE:
        return local
    autograd, reshape = get_platform().autograd, get_platform().tensors.reshape
    if not autograd.needs_gradient(local):
        return reshape(local, ABSENT_SHAPE)
    # it keeps its place in the graph: this rank takes part in the backward, too
    return autograd.with_gradient(local, lambda t: reshape(t, ABSENT_SHAPE), lambda g: reshape(g, local_shape))


def _layout_arguments(mesh: DeviceMesh, given: Sequence[Placement] | Layout) -> tuple[Any, Any]:
    return (given, None) if isinstance(given, Layout) else (mesh, tuple(given))


def _with_gradient_layout(local: Tensor, have: Layout, want: Layout, spec: TensorSpec) -> Tensor:
    """An alias of `local` whose gradient arrives laid out `have` and is passed on laid out `want`."""
    from hp_core.redistribute import program_for

    autograd = get_platform().autograd
    path = program_for(have, want, spec.shape, get_platform().tensors.itemsize(spec.dtype))
    return autograd.with_gradient(local, autograd.alias, path)


@lru_cache(maxsize=1 << 14)
def _may_tie(src: Layout, dst: Layout, asked: bool) -> bool:
    """Whether a varying use can send its gradient straight to the source: plain cuts and sums only.

    Not between meshes: ranks outside of the target's have no uses, so they couldn't know which way the gradient takes.

    It is worth it where the way is shorter, or where it is asked to be in an element type of its own.
    """
    if src.mesh is not dst.mesh:
        return False
    kinds = {reduce_op for layout in (src, dst) for _, reduce_op in layout.partials}
    return kinds <= {"sum"} and not dst.partials and (asked or bool(dst.active_axes ^ src.active_axes))


if TYPE_CHECKING:

    class DTensor(DTensorMethods, Any):  # type: ignore[misc]
        """The platform's tensor subclass."""

else:

    def __getattr__(name: str) -> Any:
        if name == "DTensor":
            return dtensor_type()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
