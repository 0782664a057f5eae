"""`fully_shard`: makes one unit of a module's parameters, and hooks its forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hp_core.dtensor.api import dtensor_type
from hp_core.dtensor.distribute import as_held
from hp_core.errors import LayoutError, PlanError
from hp_core.layout import Layout
from hp_core.mesh import DeviceMesh, get_current_mesh
from hp_core.platform import get_platform
from hp_core.platform.protocol import Tensor
from hp_fsdp.data_mesh import DataMesh
from hp_fsdp.hooks import hook_module
from hp_fsdp.hsdp_module import ATTRIBUTE, HSDPModule, unit_of
from hp_fsdp.member import Member
from hp_fsdp.optimizers import watch_optimizers
from hp_fsdp.plan import granule_of
from hp_fsdp.platform import get_tools
from hp_fsdp.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, UnitOptions
from hp_fsdp.registry import member_of, remember_former, was_replaced
from hp_fsdp.segment import local_of
from hp_fsdp.unit import Switches, Unit

__all__ = ["fully_shard"]

Granularity = Callable[[str, Tensor], "str | int"]


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int = True,
    shard_granularity: Granularity | None = None,
    max_padding: float | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[Tensor] | None = None,
    replicate_params: Iterable[Tensor] | None = None,
    overlap: bool = True,
) -> Any:
    """Shard a module's parameters over the data-parallel ranks; nothing is communicated.

    The parameters that no earlier call took make one *unit*: they are gathered by one all-gather before the module's
    forward and backward, and their gradients are reduced by one reduce-scatter. Call it from the inside out: on the blocks of
    a model, then on the model. Between uses modules hold DTensors of the global shapes, of which each rank has its share;
    make optimizers of these, after the call. Gradients of the ranks are averaged. All ranks must hold the
    same values (seed them alike): each keeps its share of its own.

    Args:
        module: a module, or a list of modules that make one unit together.
        mesh: the data axes: one (FSDP), or two (HSDP: replicate, shard); default the current mesh. Parameters that are
            DTensors already (tensor parallel) lie on other axes of the mesh that both were taken from.
        reshard_after_forward: True frees the gathered parameters after the forward, and gathers them again for the backward; False
            keeps them; a number of ranks keeps them shared among that many neighbours. The unit whose forward ends last is
            kept in any case.
        shard_granularity: called with the dotted name and the value of each parameter; returns where it may be cut: "element" (the
            default), "row", a number of rows, or "whole".
        max_padding: how much padding a granularity may cost, as a multiple of the unit's own elements; by default a plan that
            wastes much is refused.
        mp_policy: element types to gather, compute and reduce in.
        offload_policy: where shards live.
        ignored_params: are left alone.
        replicate_params: are kept whole on every rank, in their own element type; their gradients are averaged by one all-reduce.
        overlap: whether gathers run one unit ahead and reductions behind the computation.

    Returns:
        The same module, of a class that is both its own and `HSDPModule`.

    Raises:
        PlanError: the module was sharded before, or a module that holds it was; a parameter is on another device than the mesh;
            a granularity that no plan can meet; CPU offload on a CPU.
        MeshError: the mesh hasn't one or two axes, or this rank is outside of it; or a parameter's mesh has none in common with it.
    """
    modules: list[Any] = list(module) if isinstance(module, (list, tuple)) else [module]
    data = DataMesh(_mesh_or_current(mesh))
    switches = Switches()
    switches.reshard_after_forward, switches.keep_among = _after_forward(reshard_after_forward, data)
    offload = _offload(offload_policy, data)
    for one in modules:
        if unit_of(one) is not None:
            raise PlanError(f"fully_shard(): this {type(one).__name__} was sharded before; shard each module once.")
    ignored, replicated = ({id(one) for one in given or ()} for given in (ignored_params, replicate_params))
    found, ties = _collect(modules, ignored, replicated, data, shard_granularity)
    options = UnitOptions(mp_policy or MixedPrecisionPolicy(), offload, max_padding, overlap)
    for member, _ in found:
        if member.replicated and options.precision.param_dtype not in (None, member.dtype):
            raise PlanError(
                f"fully_shard(): parameter {member.name!r} is to be replicated, and the module to compute in "
                f"{options.precision.param_dtype}; replicated parameters are used as they are. Take it out of replicate_params, or "
                f"convert it before."
            )
    unit = Unit(modules, found, data, options, switches)
    for member, original in found:
        if not member.replicated:
            remember_former(original, member)
            for holder, _ in member.holders:
                get_platform().modules.convert_on_load(holder, as_held)
    for holder, name, member in ties:
        _tie(holder, name, member)
    for one in modules:
        one.__dict__[ATTRIBUTE] = unit
        get_tools().adopt_class(one, HSDPModule)
        hook_module(unit, one, True)
    watch_optimizers()
    return module


def _mesh_or_current(mesh: Any) -> Any:
    mesh = get_current_mesh() if mesh is None else mesh
    if mesh is None:
        raise PlanError("fully_shard(): no mesh given and none current; pass mesh=, or call inside `with mesh:`.")
    return mesh


def _after_forward(given: bool | int, data: DataMesh) -> tuple[bool, int]:
    if isinstance(given, bool):
        return given, 0
    if not isinstance(given, int) or not 0 < given <= data.shards or data.shards % given:
        raise PlanError(
            f"fully_shard(reshard_after_forward={given!r}): give True, False, or a number of ranks that divides the {data.shards} "
            f"of the shard axis."
        )
    return given != 1, given if 1 < given < data.shards else 0


def _offload(policy: OffloadPolicy | None, data: DataMesh) -> CPUOffloadPolicy | None:
    if not isinstance(policy, CPUOffloadPolicy):
        return None
    if _device_type(data) == "cpu":
        raise PlanError(
            "fully_shard(offload_policy=CPUOffloadPolicy()): the mesh is on CPUs, where shards are already; leave it out."
        )
    return policy


def _device_type(data: DataMesh) -> str:
    return data.mesh.device_type or get_platform().processes.device_type


def _collect(
    modules: Sequence[Any], ignored: set[int], replicated: set[int], data: DataMesh, granularity: Granularity | None
) -> tuple[list[tuple[Member, Any]], list[tuple[Any, str, Member]]]:
    """The parameters that no unit has taken, each once with all that hold it; and places of such that one has taken."""
    found: dict[int, tuple[Member, Any]] = {}
    ties: list[tuple[Any, str, Member]] = []
    foreign: Member | None = None
    inside: set[int] = set()
    tools = get_platform().modules
    for number, root in enumerate(modules):
        for path, module in tools.named_modules(root):
            inside.add(id(module))
            for name, parameter in tools.own_parameters(module):
                if id(parameter) in ignored:
                    continue
                owner = member_of(parameter)
                if owner is not None:
                    if not any(id(one) in inside for one in owner.unit.modules):
                        foreign = owner
                    continue
                former = was_replaced(parameter)
                if former is not None:
                    ties.append((module, name, former))
                    continue
                known = found.get(id(parameter))
                if known is None:
                    full_name = ".".join(part for part in (str(number) if len(modules) > 1 else "", path, name) if part)
                    member = _member(full_name, parameter, id(parameter) in replicated, data, granularity)
                    known = found[id(parameter)] = member, parameter
                known[0].holders.append((module, name))
    if foreign is not None and not found:
        raise PlanError(
            f"fully_shard(): the parameters of this {type(modules[0]).__name__} belong to the unit of {foreign.unit.name} already; "
            f"shard from the inside out: the blocks first, then the model that holds them."
        )
    return list(found.values()), ties


def _member(name: str, parameter: Any, replicated: bool, data: DataMesh, granularity: Granularity | None) -> Member:
    platform = get_platform()
    local = local_of(parameter)
    outer: Layout | None = parameter.layout if isinstance(parameter, dtensor_type()) else None  # type: ignore[attr-defined]
    local_shape = tuple(platform.tensors.shape(local))
    if outer is not None:
        if outer.flat is not None or outer.is_partial():
            raise LayoutError(
                f"fully_shard(): parameter {name!r} is laid out {outer}; lay it out in shards and replicas."
            )
        shared = set(outer.mesh.mesh_dim_names) & set(data.mesh.mesh_dim_names)
        if shared:
            raise LayoutError(
                f"fully_shard(): parameter {name!r} is laid out on {outer.mesh!r}, which has the data axis {sorted(shared)[0]!r}; "
                f"lay it out on the other axes only, mesh['tp'] for example."
            )
    device = platform.tensors.device_type_of(local)
    wanted = _device_type(data)
    if device not in (wanted, "meta"):
        raise PlanError(
            f"fully_shard(): parameter {name!r} is on a device of type {device!r}, but the mesh is of type {wanted!r}; move the "
            f"module there first, with .to({wanted!r})."
        )
    granule = 1
    if granularity is not None and not replicated:
        granule = granule_of(granularity(name, parameter), local_shape, name)
    return Member(
        name=name,
        holders=[],
        shape=tuple(platform.tensors.shape(parameter)),
        local_shape=local_shape,
        outer=outer,
        dtype=platform.tensors.dtype(local),
        requires_grad=platform.autograd.requires_grad(local),
        granule=granule,
        replicated=replicated,
    )


def _tie(module: Any, name: str, member: Member) -> None:
    """A parameter that an earlier unit has taken is held here as well: this module uses that unit from now on."""
    member.holders.append((module, name))
    module._parameters[name] = member.sharded
    unit = member.unit
    unit.shared = True
    get_platform().modules.convert_on_load(module, as_held)
    hook_module(unit, module, False)
