"""A unit: the parameters that one `fully_shard` call took, gathered and reduced together.

A unit is a small state machine. Its parameters are SHARDED, GATHERING (on their way), or WHOLE; modules see the sharded
ones except while they compute. When and in which order units move is not decided here but by their root.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from hp_core.errors import PlanError
from hp_core.platform import get_platform
from hp_core.platform.protocol import Tensor, Work
from hp_core.process_group import get_rank
from hp_fsdp.data_mesh import DataMesh
from hp_fsdp.member import Member
from hp_fsdp.platform import get_tools
from hp_fsdp.policy import UnitOptions
from hp_fsdp.registry import remember
from hp_fsdp.replicated import ReplicatedSegment
from hp_fsdp.segment import Segment

if TYPE_CHECKING:
    from hp_fsdp.root import Root

__all__ = ["State", "Switches", "Unit"]


class State(Enum):
    """Where a unit's parameters are."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    WHOLE = "whole"


@dataclass
class Switches:
    """What users set on a unit between steps.

    Attributes:
        reshard_after_forward: whether the forward frees the gathered parameters, to be gathered again in the backward.
        keep_among: if not 0, that many neighbouring ranks keep them together after the forward.
        reshard_after_backward: whether the backward does.
        sync: whether the backward reduces gradients; else they stay on this rank and add up.
        all_reduce: for HSDP, whether reductions go on to the other replicas.
        reduce_op: "avg" or "sum".
        factor: by what reduced gradients are multiplied besides.
        last_backward: whether the end of the backward waits for reductions on their way.
        forward_prefetch: units gathered when this one's forward begins; None: the next in order.
        backward_prefetch: units gathered when this one's backward begins; None: the next in order.
    """

    reshard_after_forward: bool = True
    keep_among: int = 0
    reshard_after_backward: bool = True
    sync: bool = True
    all_reduce: bool = True
    reduce_op: str = "avg"
    factor: float = 1.0
    last_backward: bool = True
    forward_prefetch: list[Unit] | None = None
    backward_prefetch: list[Unit] | None = None


@dataclass(frozen=True)
class Mark:
    """By which it is noticed that a user has zeroed gradients.

    Attributes:
        shard: a shard of the unit.
        gradient: its gradient when the mark was set.
        version: how often that had been written to.
        made: whether it is zeros made for the mark.
    """

    shard: Tensor
    gradient: Tensor
    version: int
    made: bool


class Unit:
    """The parameters of one `fully_shard` call.

    Attributes:
        modules: the modules that were named in the call.
        name: for messages: the class of the first of them, and its path once a root is known.
        segments: the flat buffers, by element type and trainability.
        switches: what users set.
        root: the driver, once the first forward has begun.
    """

    def __init__(
        self,
        modules: list[Any],
        found: list[tuple[Member, Any]],
        data: DataMesh,
        options: UnitOptions,
        switches: Switches,
    ) -> None:
        self.modules = modules
        self.name = type(modules[0]).__name__
        self.data = data
        self.policy = options.precision
        self.overlap = options.overlap
        self.switches = switches
        self.root: Root | None = None
        self.state = State.SHARDED
        self.active = 0  # how many of its modules compute now
        self.by_hand = False  # unshard() was called: stays whole until reshard()
        self.segments = []
        for group in _by_buffer(found):
            kind = ReplicatedSegment if group[0][0].replicated else Segment
            segment = kind([member for member, _ in group], data, options)
            segment.shard([original for _, original in group])
            self.segments.append(segment)
        self._adopt_members()
        self.shared = False  # whether a module outside of `modules` holds a parameter of it, too
        self.arrived = 0
        self.expected = 0
        self.mark: Mark | None = None
        self.partial: dict[Segment, Tensor] = {}  # HSDP: chunks reduced over the shards, not yet over the replicas
        self._hooked = False
        self._opened = False  # whether the backward that runs now found the gradient buffers free
        self._shows_whole = True  # so far modules hold what they had before
        self.show_sharded()

    def refresh(self) -> None:
        """Take in what users did to the parameters since the last use."""
        for segment in self.segments:
            if segment.refresh():
                self._hooked = False
                self.state = State.SHARDED
                self._clear_mark()

    # -- gathering --------------------------------------------------------------------------------------------------

    def start_gather(self) -> None:
        """Begin to gather, if nothing has."""
        if self.state is State.SHARDED:
            for segment in self.segments:
                segment.start_gather()
            self.state = State.GATHERING

    def finish_gather(self) -> None:
        """Return when the parameters are whole; starts what hasn't started."""
        if self.state is State.WHOLE:
            return
        self.start_gather()
        for segment in self.segments:
            segment.finish_gather()
        self.state = State.WHOLE

    def free(self, keep_among: int = 0) -> None:
        """Give the gathered parameters' memory back; `keep_among` ranks may keep them together."""
        if self.state is not State.SHARDED:
            for segment in self.segments:
                segment.free(keep_among)
            self.state = State.SHARDED

    def discard_whole(self) -> None:
        """The shards are about to change: what was gathered of them, by hand even, is gathered again when it is used."""
        if not self.active:
            self.show_sharded()
            self.free()
        self.forget_kept()

    def forget_kept(self) -> None:
        """Drop what a forward has kept for a backward that didn't come."""
        for segment in self.segments:
            segment.kept = None

    # -- what modules hold ------------------------------------------------------------------------------------------

    def activate(self) -> None:
        """Let modules hold the whole parameters; they must have arrived."""
        self.active += 1
        if self.active == 1:
            self.show_whole()

    def deactivate(self) -> None:
        """Let modules hold the sharded parameters again."""
        if self.active == 0:
            return
        self.active -= 1
        if self.active == 0 and not self.by_hand:
            self.show_sharded()

    def show_whole(self) -> None:
        """Let modules hold the whole parameters."""
        self._shows_whole = True
        for member in self.cut:
            wanted = member.shard.requires_grad
            if member.leaf.requires_grad != wanted:
                member.leaf.requires_grad_(wanted)
                self._hooked = False
            for module, name in member.holders:
                module._parameters[name] = member.full
        if not self._hooked:
            self._hook_leaves()

    def show_sharded(self) -> None:
        """Let modules hold the sharded parameters, if they hold the whole ones; what users have put there instead stays."""
        if not self._shows_whole:
            return
        self._shows_whole = False
        for member in self.cut:
            for module, name in member.holders:
                module._parameters[name] = member.sharded

    # -- gradients --------------------------------------------------------------------------------------------------

    @property
    def trainable(self) -> bool:
        """Whether some gradient is wanted."""
        for segment in self.segments:
            if segment.wanted:
                return True
        return False

    def will_accumulate(self) -> bool:
        """Whether the backward that runs now is certain to add to a parameter's gradient, not to find those of inputs only."""
        leaf = next((member.leaf for member in self.members if member.leaf.requires_grad), None)
        return leaf is not None and get_tools().will_accumulate(leaf)

    def open_gradients(self) -> None:
        """Make room for gradients; called when the unit's backward begins."""
        self._forget_zeroed()
        if not self._hooked:
            self._hook_leaves()
        self.arrived = 0
        self.expected = 0
        self._opened = not self.accumulating
        for segment in self.segments:
            needed = sum([member.leaf.requires_grad for member in segment.members])
            if needed:
                self.expected += needed
                segment.open_gradients()
        self._set_mark()  # before replicated parameters lend theirs to the engine
        for segment in self.segments:
            if segment.accumulating:
                segment.offer_landings()

    def _hook_leaves(self) -> None:
        tools = get_tools()
        for segment in self.segments:
            for member in segment.members:
                if member.leaf.requires_grad and not member.handles:
                    member.handles.append(tools.on_accumulated(member.leaf, self._landing_of(segment, member)))
        self._hooked = True

    def _landing_of(self, segment: Segment, member: Member) -> Any:
        def landed(_: Tensor) -> None:
            root = self.root
            backward = None if root is None else root.backward
            begun = backward is not None and self in backward.begun
            if root is None or (member.replicated and not begun):
                return  # it is used elsewhere, outside of the unit's modules
            if backward is not None and (self in backward.reduced or (begun and self.arrived == self.expected)):
                raise PlanError(
                    f"rank {get_rank()}: parameter {member.name!r} of {self.name} got another gradient after those of its unit had "
                    f"been reduced: is it used in several re-entrant checkpoints? Give checkpoint() use_reentrant=False."
                )
            if not begun:
                gradient, member.leaf.grad = member.leaf.grad, None
                root.begin_late(self)
                get_tools().add(member.landing, gradient)
            elif member.leaf.grad is not member.landing:
                segment.land(member)
            self.arrived += 1
            if self.arrived == self.expected:
                root.unit_done(self)

        return landed

    @property
    def accumulating(self) -> bool:
        """Whether it holds gradients that weren't reduced."""
        for segment in self.segments:
            if segment.accumulating:
                return True
        return False

    def close_gradients(self) -> None:
        """No more gradients land until the next backward."""
        for segment in self.segments:
            segment.close_gradients()

    def drop_untouched(self) -> None:
        """Nothing has landed in this backward: free what it had opened."""
        if self._opened:
            self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget gradients that weren't reduced."""
        for segment in self.segments:
            segment.drop_gradients()
        self.partial = {}
        self._clear_mark()

    def start_reduce(self) -> list[tuple[Segment, Tensor, Work | None]]:
        """Begin to reduce what has landed; a unit that wasn't used here gives zeros."""
        started = []
        for segment in self.segments:
            if segment.wanted:
                segment.open_gradients()
                started.append((segment, *segment.start_reduce()))
        return started

    def finish_reduce(self, segment: Segment, reduced: Tensor) -> None:
        """Give the shards their gradients."""
        factor = self.switches.factor / (self.data.size if self.switches.reduce_op == "avg" else 1)
        if factor != 1.0:
            get_tools().scale(reduced, factor)
        self._clear_mark()
        segment.deliver(reduced)

    # -- a mark by which zero_grad() is noticed ----------------------------------------------------------------------

    def _set_mark(self) -> None:
        """While gradients add up here, watch the gradient of one shard, which `zero_grad()` would take away or write to."""
        if self.mark is not None:
            return
        wanted = [member for member in self.cut or self.members if member.shard.requires_grad]
        if not wanted:
            return
        member = wanted[0]
        for other in wanted:
            if other.stop - other.start < member.stop - member.start:
                member = other
        shard, tools = member.shard, get_tools()
        made = shard.grad is None
        if made:
            shard.grad = tools.view(tools.flat(shard.numel(), member.dtype, shard), 0, shard.shape)
            tools.zero(shard.grad)
        self.mark = Mark(shard, shard.grad, get_platform().autograd.version(shard.grad), made)

    def _clear_mark(self) -> None:
        if self.mark is not None:
            mark, self.mark = self.mark, None
            if mark.made and mark.shard.grad is mark.gradient:
                mark.shard.grad = None

    @property
    def was_zeroed(self) -> bool:
        """Whether the user has zeroed gradients while some were adding up or on their way."""
        mark = self.mark
        return mark is not None and (
            mark.shard.grad is not mark.gradient or get_platform().autograd.version(mark.gradient) != mark.version
        )

    def _forget_zeroed(self) -> None:
        """Drop what has added up if the user has zeroed gradients since."""
        if self.was_zeroed:
            self.drop_gradients()

    # -- copies -----------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        twin = copy.copy(self)
        memo[id(self)] = twin
        twin.modules = [copy.deepcopy(module, memo) for module in self.modules]
        twin.segments = []
        for segment in self.segments:
            again = copy.copy(segment)
            again.members = [member.copied(memo) for member in segment.members]
            twin.segments.append(again)
        twin._adopt_members()
        twin.switches = replace(self.switches, forward_prefetch=None, backward_prefetch=None)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state |= {"root": None, "state": State.SHARDED, "active": 0, "by_hand": False, "mark": None, "partial": {}}
        state |= {"_hooked": False, "switches": replace(self.switches, forward_prefetch=None, backward_prefetch=None)}
        return state

    def _adopt_members(self) -> None:
        self.members = [member for segment in self.segments for member in segment.members]
        self.cut = [member for member in self.members if not member.replicated]
        for member in self.members:
            member.unit = self
            remember(member.sharded, member)

    def __repr__(self) -> str:
        return f"Unit({self.name}, {self.state.value}, {len(self.members)} parameters)"


def _by_buffer(found: list[tuple[Member, Any]]) -> list[list[tuple[Member, Any]]]:
    """Members of one element type that are all trained, or all frozen, and all cut, or all replicated."""
    groups: dict[Any, list[tuple[Member, Any]]] = {}
    for member, original in found:
        groups.setdefault((member.dtype, member.requires_grad, member.replicated), []).append((member, original))
    return list(groups.values())
