"""Clipping gradients by the norm over all parameters, whatever meshes they lie on, in one collective.

The norm is that of the dense model: each element counts once, however many ranks hold it (`counting`). Gradients that are
views of one chunk are read and scaled as one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf, isfinite
from typing import Any

from hp_core.errors import HyperParallelError
from hp_core.mesh import DeviceMesh, as_mesh
from hp_core.platform import get_platform
from hp_core.platform.protocol import Group, Tensor
from hp_core.process_group import get_rank, get_world_size, group_of_ranks
from hp_fsdp.counting import Place, Sum, count_once
from hp_fsdp.platform.norms import get_norm_tools

__all__ = ["ClippingError", "NonFiniteNormError", "clip_grad_norm_", "total_grad_norm"]

Distinct = Mapping[str, "Iterable[Tensor] | None"]
"""Axes along which ranks list different parameters, and which these are (None: all)."""


class ClippingError(HyperParallelError, ValueError):
    """An argument of gradient clipping makes no sense."""


class NonFiniteNormError(HyperParallelError, RuntimeError):
    """The norm of the gradients is infinite or not a number."""


def clip_grad_norm_(
    params: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    mesh: DeviceMesh | None = None,
    distinct: Distinct | None = None,
) -> Tensor:
    """Scale gradients in place so that the norm of them all, as one vector, is at most `max_norm`.

    All ranks that hold some of the parameters call this, with parameters laid out alike, whether or not they have
    gradients. It takes one collective over the ranks of all parameters' meshes. (If no mesh among them has all these ranks
    and they aren't the world, it takes one for each set of ranks; `mesh` makes that one.) Plain tensors count as held by
    all ranks alike; with plain tensors only, nothing is communicated.

    A pipeline stage or an expert that is a plain tensor isn't in other ranks' lists, which is said so::

        clip_grad_norm_(stage.parameters(), 1.0, mesh=world, distinct={"pp": None})
        clip_grad_norm_(model.parameters(), 1.0, mesh=world, distinct={"ep": model.experts.parameters()})

    Args:
        params: parameters, DTensors on any meshes and plain tensors in any mix; one that is listed twice counts once.
        max_norm: the largest norm that gradients may have.
        norm_type: order of the norm: a number > 0, or infinity.
        error_if_nonfinite: whether a norm that is infinite or NaN is an error, before anything is scaled; else gradients are
            multiplied by zero or NaN.
        mesh: all ranks that hold parameters of the model (ours or torch's mesh).
        distinct: by name of an axis of `mesh`, which parameters differ along it from rank to rank (None: all). A DTensor whose
            own mesh has the axis lies along it as its layout says.

    Returns:
        The norm before scaling, a plain tensor without dims, equal on all ranks; float32, or float64 if a parameter is.

    Raises:
        ClippingError: an order that isn't > 0, a negative `max_norm`, or `distinct` without `mesh`.
        LayoutError: a parameter lies on ranks of which this one can't know enough; see the message.
        NonFiniteNormError: the norm isn't finite and that is an error.
    """
    if not max_norm >= 0:
        raise ClippingError(f"clip_grad_norm_(max_norm={max_norm}): it must be >= 0.")
    gradients = _Gradients(params, norm_type, mesh, distinct)
    total = gradients.norm(error_if_nonfinite)
    if max_norm != inf:
        get_norm_tools().clip(gradients.tensors, float(max_norm), total)
    return total


def total_grad_norm(
    params: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    mesh: DeviceMesh | None = None,
    distinct: Distinct | None = None,
) -> Tensor:
    """The norm that `clip_grad_norm_` would clip by, with the same arguments; nothing is scaled."""
    return _Gradients(params, norm_type, mesh, distinct).norm(error_if_nonfinite)


class _Gradients:
    """What a rank has of all gradients, and how it counts."""

    def __init__(self, params: Any, norm_type: float, mesh: DeviceMesh | None, distinct: Distinct | None) -> None:
        self.order = float(norm_type)
        if not self.order > 0:
            raise ClippingError(
                f"norm_type={norm_type}: the order of the norm must be > 0, or infinity. (An order of 0 counts elements, which "
                f"scaling doesn't change; below 0 a gradient with a zero has norm 0.)"
            )
        tools = get_norm_tools()
        listed = [params] if get_platform().tensors.is_tensor(params) else params
        self.params = list({id(parameter): parameter for parameter in listed}.values())
        layouts = tuple(tools.layout(parameter) for parameter in self.params)
        whole = None if mesh is None else as_mesh(mesh)
        self.counting = count_once(
            layouts, get_rank(), get_world_size(), whole, _distinct_axes(self.params, whole, distinct)
        )
        self.by_place: dict[Place, list[Tensor]] = {}
        for parameter, place in zip(self.params, self.counting.places, strict=True):
            gradient = tools.gradient(parameter)
            if gradient is not None:
                self.by_place.setdefault(place, []).append(gradient)
        for place, tensors in self.by_place.items():
            self.by_place[place] = tools.merged(tensors)

    @property
    def tensors(self) -> list[Tensor]:
        """All local gradients, neighbours as one."""
        return [tensor for tensors in self.by_place.values() for tensor in tensors]

    def norm(self, error_if_nonfinite: bool) -> Tensor:
        """The total norm."""
        tools, collectives = get_norm_tools(), get_platform().collectives
        terms = []
        for index, one in enumerate(self.counting.sums):
            group = group_of_ranks(one.ranks)
            slots = tools.slots(one.slots, self._device_type(one, group))
            for place, tensors in self.by_place.items():
                if place.sum == index:
                    tools.add_powers(slots, place.slot, tensors, self.order, place.weight)
            collectives.all_reduce(slots, "max" if self.order == inf else "sum", group)
            terms += [slots[slot] for slot in one.read]
        total = tools.total(terms, self.order, any(tools.is_wide(parameter) for parameter in self.params))
        if error_if_nonfinite and not tools.is_finite(total):
            raise NonFiniteNormError(self._complaint(total))
        return total

    def _device_type(self, one: Sum, group: Group) -> str:
        """The type of device on which the sum is made: the same on all ranks, and one that the group carries."""
        platform = get_platform()
        if one.mesh is None:  # plain tensors only
            return platform.tensors.device_type_of(self.params[0]) if self.params else platform.processes.device_type
        wanted = one.mesh.device_type or platform.processes.device_type
        return wanted if group.native is None or wanted in group.devices else min(group.devices)

    def _complaint(self, total: Tensor) -> str:
        tools = get_norm_tools()
        bad = []
        for index, parameter in enumerate(self.params):
            gradient = tools.gradient(parameter)
            if gradient is not None:
                slots = tools.slots(1, get_platform().tensors.device_type_of(gradient))
                tools.add_powers(slots, 0, tools.merged([gradient]), inf, 1.0)
                if not isfinite(slots[0]):
                    bad.append(index)
        where = f"those of parameters {bad} of the list" if bad else "none; other ranks have such"
        return (
            f"the norm of order {self.order:g} of the gradients is {float(total)}, so they can't be clipped by it. Of the "
            f"gradients on rank {get_rank()} these aren't finite: {where}. Nothing was scaled; skip the step, or pass "
            f"error_if_nonfinite=False."
        )


def _distinct_axes(params: list[Any], mesh: DeviceMesh | None, distinct: Distinct | None) -> tuple[frozenset[int], ...]:
    """For each parameter the axes along which others stand in its place."""
    if mesh is None:
        if distinct:
            raise ClippingError(f"distinct={list(distinct)} names axes of a mesh; pass mesh= as well.")
        return ()
    chosen = {
        mesh.axis_index(axis): None if some is None else {id(parameter) for parameter in some}
        for axis, some in (distinct or {}).items()
    }
    return tuple(
        frozenset(axis for axis, ids in chosen.items() if ids is None or id(parameter) in ids) for parameter in params
    )
