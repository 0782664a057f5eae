"""A flat buffer of a unit: parameters of one element type, this rank's chunk of them, and their gradients.

The chunk is the only thing that stays. The buffer gets memory when it is gathered and gives it back when it is resharded;
parameters are views of it all the time, so gathering copies nothing in and nothing out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_core.dtensor.api import DTensorMethods, dtensor_type
from hp_core.errors import PlanError
from hp_core.layout import Layout
from hp_core.platform import get_platform
from hp_core.platform.protocol import DType, Tensor, Work
from hp_core.process_group import get_rank, group_of_ranks
from hp_core.rules.spec import spec_of
from hp_fsdp.data_mesh import DataMesh
from hp_fsdp.member import Member
from hp_fsdp.plan import BufferPlan, Item, plan_buffer
from hp_fsdp.platform import get_tools
from hp_fsdp.policy import MixedPrecisionPolicy, UnitOptions
from hp_fsdp.registry import forget, remember, remember_former

__all__ = ["Segment", "local_of"]

ALIGN = 16
"""Chunks are a multiple of this many elements, so that views start where vector instructions like it."""


class Segment:
    """Parameters of one element type in one flat buffer.

    Attributes:
        members: the parameters, in the order in which they were found.
        plan: where each lies.
        dtype: element type of the shards.
        compute_dtype: in which the module computes.
        reduce_dtype: in which gradients are accumulated and reduced.
        chunk: this rank's part, `[plan.chunk]`; the shards are views of it.
        buffer: all parts, `[ranks * plan.chunk]`, with memory only while gathered.
        gradients: the gradients of all parts, with memory only from the unit's backward to its reduction.
    """

    def __init__(self, members: Sequence[Member], data: DataMesh, options: UnitOptions) -> None:
        self.members = list(members)
        self.data = data
        self.policy = options.precision
        self.offload = options.offload
        self._set_dtype(members[0].dtype)
        items = [Item(member.name, member.numel, member.granule) for member in members]
        self.plan: BufferPlan = plan_buffer(items, data.shards, ALIGN, max_padding=options.max_padding)
        for index, member in enumerate(self.members):
            member.offset = self.plan.offsets[index]
            member.start, member.stop = self.plan.interval(index, data.shard_index)
        self.chunk: Tensor = None
        self.near: Tensor = None  # nothing, on the device where the module computes
        self.buffer: Tensor = None
        self.gradients: Tensor = None
        self.kept: Tensor = None  # a larger part than the chunk, of a forward that resharded to fewer ranks
        self._gathering: Work | None = None

    def _set_dtype(self, dtype: DType) -> None:
        policy = self.policy if get_tools().is_real(dtype) else MixedPrecisionPolicy()
        self.dtype = dtype
        self.compute_dtype: DType = dtype if policy.param_dtype is None else policy.param_dtype
        self.reduce_dtype: DType = self.compute_dtype if policy.reduce_dtype is None else policy.reduce_dtype

    # -- making -----------------------------------------------------------------------------------------------------

    def shard(self, originals: Sequence[Any]) -> None:
        """Cut this rank's chunk out of the whole parameters, and make the sharded ones on it."""
        tools, platform = get_tools(), get_platform()
        sample = local_of(originals[0])
        on_meta = platform.tensors.is_meta(sample)
        self.near = tools.flat(0, self.dtype, sample)
        self.chunk = self._new_chunk(sample)
        self.on_meta = on_meta
        if not on_meta:
            tools.zero(self.chunk)
        for member, original in zip(self.members, originals, strict=True):
            view = self.shard_view(member)
            if not on_meta and member.stop > member.start:
                whole = platform.tensors.reshape(platform.autograd.detach(local_of(original)), (-1,))
                tools.copy(view, whole[member.start : member.stop])
            self._set_sharded(member, view, member.requires_grad)
            platform.modules.copy_attributes(original, member.sharded)

    def _new_chunk(self, like: Tensor) -> Tensor:
        tools = get_tools()
        if self.offload is not None and not get_platform().tensors.is_meta(like):
            return tools.host(self.plan.chunk, self.dtype, self.offload.pin_memory)
        return tools.flat(self.plan.chunk, self.dtype, like)

    def _set_sharded(self, member: Member, local: Tensor, requires_grad: bool) -> None:
        platform = get_platform()
        spec = spec_of(self.layout_of(member), member.shape, platform.tensors.dtype(local))
        # not from_local(): an offloaded shard isn't on the mesh's device
        member.sharded = platform.modules.as_parameter(platform.new_dtensor(dtensor_type(), local, spec), requires_grad)
        member.shard = member.sharded._local
        member.address = get_tools().address(member.shard)
        remember(member.sharded, member)

    def shard_view(self, member: Member) -> Tensor:
        """The part of the chunk that is this parameter's."""
        length = member.stop - member.start
        first = member.offset + member.start - self.data.shard_index * self.plan.chunk if length else 0
        return get_tools().view(self.chunk, first, (length,))

    def layout_of(self, member: Member) -> Layout:
        """The layout of the sharded parameter on the mesh of all its axes."""
        return self.data.sharded_layout(member.outer, self.plan.chunk, member.offset)

    def _make_buffer(self) -> None:
        """The flat buffer and the parameters on it, fit for training whatever mode this is called in."""
        tools, platform = get_tools(), get_platform()
        with tools.recordable():
            self._make_views(tools, platform)

    def _make_views(self, tools: Any, platform: Any) -> None:
        self.buffer = tools.flat(self.plan.ranks * self.plan.chunk, self.compute_dtype, self.near)
        self._raw = tools.twin(self.buffer)
        for member in self.members:
            view = tools.view(self.buffer, member.offset, member.local_shape)
            if member.outer is not None:
                view = DTensorMethods.from_local(view, member.outer, shape=member.shape)
            member.full = platform.modules.as_parameter(view, platform.autograd.requires_grad(member.shard))
            member.leaf = local_of(member.full)
            platform.modules.copy_attributes(member.sharded, member.full)
            remember_former(member.full, member)

    def _make_gradients(self) -> None:
        """The flat gradient buffer, and each member's place in it."""
        tools = get_tools()
        with tools.recordable():
            self._make_landings(tools)

    def _make_landings(self, tools: Any) -> None:
        self.gradients = tools.flat(self.plan.ranks * self.plan.chunk, self.reduce_dtype, self.near)
        for member in self.members:
            member.landing = tools.view(self.gradients, member.offset, member.local_shape)

    # -- following what users do to parameters ------------------------------------------------------------------------

    def refresh(self) -> bool:
        """Take in parameters that were replaced, filled, or moved since the last use; whether anything was.

        Raises:
            PlanError: one is still on the meta device, or what replaced it is something else.
        """
        tools = get_tools()
        moved = False
        for member in self.members:
            module, name = member.holders[0]
            held = module._parameters.get(name)
            if member.shard is None:  # read from a file
                member.shard = local_of(member.sharded)
                remember(member.sharded, member)
                moved = True
            if held is not member.sharded and (held is None or held is not member.full):  # gathered by hand
                self._adopt(member, held)
                moved = True
            elif tools.address(member.shard) != member.address:
                moved = True
        if moved or self.on_meta:
            self._rebuild()
            return True
        return False

    def _adopt(self, member: Member, held: Any) -> None:
        """What a user or `init_parameters` has put in place of a parameter becomes the sharded one."""
        platform = get_platform()
        forget(member.sharded)
        requires_grad = held is not None and platform.autograd.requires_grad(local_of(held))
        if isinstance(held, dtensor_type()) and held.layout is self.layout_of(member):  # type: ignore[attr-defined]
            member.sharded = held
            member.shard = local_of(held)
            remember(held, member)
        elif held is not None and tuple(held.shape) == member.shape:
            if isinstance(held, dtensor_type()):
                whole = held.detach().redistribute(self.layout_of(member))._local  # type: ignore[attr-defined]
            else:
                if member.outer is not None:
                    raise PlanError(
                        f"parameter {member.name!r} was replaced by a plain tensor, but it is laid out {member.outer}; put a "
                        f"DTensor in its place, or load values with load_state_dict(), which keeps the parameter."
                    )
                whole = platform.tensors.reshape(platform.autograd.detach(held), (-1,))[member.start : member.stop]
            self._set_sharded(member, platform.tensors.clone(whole), requires_grad)
            platform.modules.copy_attributes(held, member.sharded)
        else:
            found = "nothing" if held is None else f"a tensor of shape {tuple(held.shape)}"
            raise PlanError(
                f"rank {get_rank()}: parameter {member.name!r} of shape {member.shape} was replaced by {found} after "
                f"fully_shard(); replace parameters before, or write to them in place."
            )
        for module, name in member.holders:
            module._parameters[name] = member.sharded

    def _rebuild(self) -> None:
        """A new chunk of the shards as they are now, which become views of it; the buffers are made anew when needed."""
        tools, platform = get_tools(), get_platform()
        empty = [member.name for member in self.members if platform.tensors.is_meta(member.shard)]
        if empty:
            raise PlanError(
                f"rank {get_rank()}: {', '.join(empty[:3])}{' and others' if len(empty) > 3 else ''} of a sharded module "
                f"{'are' if len(empty) > 1 else 'is'} still on the meta device; call init_parameters(model) before the forward."
            )
        dtypes = {platform.tensors.dtype(member.shard) for member in self.members}
        if len(dtypes) > 1:
            raise PlanError(
                f"parameters that share a flat buffer have come to be of {len(dtypes)} element types "
                f"({', '.join(sorted(map(platform.tensors.dtype_name, dtypes)))}); convert all of a module, or do so before "
                f"fully_shard()."
            )
        self._set_dtype(dtypes.pop())
        self.chunk = self._new_chunk(self.members[0].shard)
        if self.offload is None:
            self.near = tools.flat(0, self.dtype, self.chunk)
        tools.zero(self.chunk)
        for member in self.members:
            member.dtype = self.dtype
            view = self.shard_view(member)
            tools.copy(view, member.shard)
            tools.rebase(member.shard, view)
            member.address = tools.address(view)
            member.full = member.leaf = member.landing = None
            member.handles = []
        self.buffer = self.gradients = self.kept = None
        self.on_meta = False

    # -- gathering --------------------------------------------------------------------------------------------------

    def start_gather(self) -> None:
        """Begin the all-gather into the buffer."""
        tools = get_tools()
        if self.buffer is None:
            self._make_buffer()
        else:
            tools.allocate(self.buffer)
        source, group = self.chunk, self.data.gather_group
        if self.kept is not None:
            source = self.kept
            group = group_of_ranks(self.data.neighbours(self.plan.ranks * self.plan.chunk // source.numel()))
            self.kept = None
        elif self.compute_dtype != self.dtype or self.offload is not None:
            own = self.data.shard_index * self.plan.chunk
            source = tools.view(self._raw, own, (self.plan.chunk,))
            tools.copy(source, self.chunk)
        self._gathering = get_platform().collectives.all_gather(self._raw, tools.twin(source), group, async_op=True)

    def finish_gather(self) -> None:
        """Return when the buffer may be read."""
        work, self._gathering = self._gathering, None
        if work is not None:
            work.wait()

    def free(self, keep_among: int = 0) -> None:
        """Give the buffer's memory back.

        Args:
            keep_among: if not 0, keep a part of it instead of the chunk alone: this many neighbouring ranks hold it together.
        """
        self.finish_gather()
        if self.buffer is None:
            return
        if keep_among:
            length = self.plan.ranks * self.plan.chunk // keep_among
            start = self.data.shard_index % keep_among * length
            self.kept = get_platform().tensors.clone(get_tools().view(self._raw, start, (length,)))
        else:
            self.kept = None
        get_tools().free(self.buffer)

    # -- gradients --------------------------------------------------------------------------------------------------

    @property
    def wanted(self) -> bool:
        """Whether some gradient is wanted now: users say so on the sharded parameters."""
        for member in self.members:
            if member.shard.requires_grad:
                return True
        return False

    @property
    def accumulating(self) -> bool:
        """Whether the gradient buffer has memory, and so holds gradients that weren't reduced."""
        return self.gradients is not None and get_tools().is_allocated(self.gradients)

    def open_gradients(self) -> None:
        """Zeros for gradients to land on; what has landed since the last reduction is kept."""
        tools = get_tools()
        if self.gradients is None:
            self._make_gradients()
            tools.zero(self.gradients)
        elif not tools.is_allocated(self.gradients):
            tools.allocate(self.gradients)
            tools.zero(self.gradients)

    def offer_landings(self) -> None:
        """Let the engine accumulate in the buffer itself."""
        if self.lends_landings:
            for member in self.members:
                if member.leaf.requires_grad:
                    member.leaf.grad = member.landing

    @property
    def lends_landings(self) -> bool:
        """Whether the engine can accumulate in the buffer itself: gradients arrive in the buffer's element type."""
        return bool(self.reduce_dtype == self.compute_dtype)

    def land(self, member: Member) -> None:
        """Take what the engine has accumulated on a leaf, where it couldn't accumulate in place."""
        gradient = member.leaf.grad
        if gradient is not member.landing and gradient is not None:
            if self.lends_landings:  # what has landed is in it: to record its graph, the engine has added out of place
                get_tools().copy(member.landing, gradient)
            else:
                get_tools().add(member.landing, gradient)
            member.leaf.grad = None

    def close_gradients(self) -> None:
        """No more gradients land."""
        for member in self.members:
            if member.leaf is not None:
                member.leaf.grad = None

    def drop_gradients(self) -> None:
        """Forget what has landed."""
        if self.accumulating:
            get_tools().free(self.gradients)

    def start_reduce(self) -> tuple[Tensor, Work | None]:
        """Begin the reduce-scatter of what has landed; gives this rank's chunk of sums and the handle."""
        tools = get_tools()
        output = tools.flat(self.plan.chunk, self.reduce_dtype, self.near)
        work = get_platform().collectives.reduce_scatter(
            output, tools.twin(self.gradients), "sum", self.data.reduce_group, async_op=True
        )
        return output, work

    def deliver(self, reduced: Tensor) -> None:
        """Give the shards their parts of a reduced chunk, added to what they have."""
        tools = get_tools()
        if self.offload is not None:
            reduced, far = self._new_chunk(self.chunk), reduced
            tools.copy(reduced, far)
        elif self.reduce_dtype != self.dtype:
            reduced = get_platform().tensors.cast(reduced, self.dtype)
        base = self.data.shard_index * self.plan.chunk
        for member in self.members:
            shard = member.shard
            if shard.requires_grad:
                length = member.stop - member.start
                piece = tools.view(reduced, member.offset + member.start - base if length else 0, (length,))
                if shard.grad is None:
                    shard.grad = piece
                else:
                    tools.add(shard.grad, piece)

    # -- copies -----------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a file has of it: no buffers, no works on their way; `refresh` makes the chunk anew."""
        state = dict(self.__dict__)
        for name in ("buffer", "gradients", "kept", "_gathering", "_raw"):
            state[name] = None
        return state


def local_of(value: Any) -> Tensor:
    """The local tensor of a DTensor, or the tensor itself."""
    return getattr(value, "_local", value)
