"""Parameters of a unit that every rank keeps whole: only their gradients are communicated, by one all-reduce."""

from __future__ import annotations

from typing import Any

from hp_core.platform import get_platform
from hp_core.platform.protocol import Tensor, Work
from hp_core.process_group import group_of_ranks
from hp_fsdp.platform import get_tools
from hp_fsdp.registry import forget, remember
from hp_fsdp.segment import Segment, local_of

__all__ = ["ReplicatedSegment"]


class ReplicatedSegment(Segment):
    """A segment without shards: modules hold the parameters that they had, all the time.

    Gradients land in a flat buffer as those of other segments do, apart from what the parameters have already, and are
    added to that once they are reduced.
    """

    def shard(self, originals: Any) -> None:
        """Nothing is cut."""
        for member, original in zip(self.members, originals, strict=True):
            member.sharded = member.full = original
            member.shard = member.leaf = local_of(original)
        self.chunk = self.near = self.members[0].shard
        self._before: dict[int, Tensor] = {}
        self._open = False

    def refresh(self) -> bool:
        """Take whatever the modules hold now."""
        changed = False
        for member in self.members:
            module, name = member.holders[0]
            held = module._parameters[name]
            if held is not member.sharded or member.leaf is not local_of(held):
                forget(member.sharded)
                remember(held, member)
                member.sharded = member.full = held
                member.shard = member.leaf = local_of(held)
                member.handles = []
                changed = True
        if changed:
            self.chunk = self.near = self.members[0].shard
            self._set_dtype(get_platform().tensors.dtype(self.chunk))
            self.gradients = None
        return changed

    def start_gather(self) -> None:
        """They are whole."""

    def free(self, keep_among: int = 0) -> None:
        """They stay whole."""

    def offer_landings(self) -> None:
        """Put aside what a parameter has; new gradients land in the buffer."""
        self._open = True
        for member in self.members:
            if member.leaf.requires_grad and member.leaf.grad is not member.landing:
                if member.leaf.grad is not None:
                    self._before[id(member)] = member.leaf.grad
                member.leaf.grad = member.landing if self.lends_landings else None

    @property
    def lends_landings(self) -> bool:
        """Whether the engine can accumulate in the buffer itself."""
        return bool(self.reduce_dtype == self.dtype)

    def close_gradients(self) -> None:
        """Give parameters back what they had."""
        if self._open:
            self._open = False
            for member in self.members:
                member.leaf.grad = self._before.pop(id(member), None)

    def start_reduce(self) -> tuple[Tensor, Work | None]:
        """Begin the all-reduce, over replicas of an HSDP mesh as well."""
        total = get_platform().tensors.clone(get_tools().twin(self.gradients))
        group = group_of_ranks(tuple(sorted(self.data.mesh.rank_list)), "reductions")
        return total, get_platform().collectives.all_reduce(total, "sum", group, async_op=True)

    def deliver(self, reduced: Tensor) -> None:
        """Give the parameters their gradients, added to what they have."""
        tools = get_tools()
        if self.reduce_dtype != self.dtype:
            reduced = get_platform().tensors.cast(reduced, self.dtype)
        for member in self.members:
            if member.leaf.requires_grad:
                piece = tools.view(reduced, member.offset, member.local_shape)
                if member.leaf.grad is None:
                    member.leaf.grad = piece
                else:
                    tools.add(member.leaf.grad, piece)
