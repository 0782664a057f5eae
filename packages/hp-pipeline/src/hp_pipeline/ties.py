"""Parameters that are one and the same in several stages (embedding and head): gradients are added up, copies stay equal.

Nothing is communicated when all copies of a parameter are on one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hp_core.platform import get_platform
from hp_core.platform.protocol import Group, Tensor
from hp_core.process_group import group_of_ranks
from hp_pipeline.platform import get_tools
from hp_pipeline.stage import PipelineStage

__all__ = ["Tie", "tie_parameters"]


@dataclass
class Tie:
    """A shared parameter as this rank sees it.

    Attributes:
        copies: its copies on this rank, each once.
        group: the ranks that have copies; None if it is this one only.
        before: gradients from earlier runs, in a run.
    """

    copies: list[Tensor]
    group: Group | None
    before: list[Tensor | None] = field(default_factory=list)

    def start_equal(self, first: Tensor | None, source_rank: int) -> None:
        """Give all copies the values of the first one.

        Args:
            first: it, on the rank that has it.
            source_rank: that rank.
        """
        tools = get_tools()
        value = tools.sendable(tools.local(self.copies[0] if first is None else first))
        if self.group is not None:
            get_platform().collectives.broadcast(value, source_rank, self.group)
        for copy in self.copies:
            if copy is not first:
                tools.copy_into(copy, value)

    def begin(self) -> None:
        """Before a run: put aside what earlier ones have summed up."""
        self.before = [get_tools().take_gradient(copy) for copy in self.copies]

    def restore(self) -> None:
        """After a failure: as it was before."""
        for copy, gradient in zip(self.copies, self.before, strict=True):
            get_tools().set_gradient(copy, gradient)
        self.before = []

    def finish(self) -> None:
        """After a run: each copy gets the sum of what came to all."""
        tools = get_tools()
        arrived = [tools.take_gradient(copy) for copy in self.copies]
        total: Tensor | None = None
        for gradient in arrived:
            if gradient is not None:
                local = tools.local(gradient)
                total = local if total is None else tools.added(total, local)
        if self.group is not None:
            total = tools.local(self.copies[0]) * 0 if total is None else tools.sendable(total)
            get_platform().collectives.all_reduce(total, "sum", self.group)
        for copy, before in zip(self.copies, self.before, strict=True):
            if total is None:
                tools.set_gradient(copy, before)
            else:
                tools.set_gradient(copy, tools.added(total, tools.local(before)) if before is not None else total * 1)
        self.before = []


def tie_parameters(
    stages: Mapping[int, PipelineStage],
    shared: Mapping[str, Sequence[tuple[int, str]]],
    owners: Sequence[int],
    rank: int,
) -> list[Tie]:
    """The shared parameters of which this rank has copies, with equal values.

    Args:
        stages: its stages, by index.
        shared: places of the copies, by name.
        owners: for each stage its global rank.
        rank: this rank.
    """
    tools, ties = get_tools(), []
    for _, places in sorted(shared.items()):
        ranks = tuple(sorted({owners[stage] for stage, _ in places}))
        if rank not in ranks:
            continue
        copies = [tools.parameter(stages[stage].submodule, path) for stage, path in places if owners[stage] == rank]
        distinct = list({id(copy): copy for copy in copies}.values())
        tie = Tie(distinct, group_of_ranks(ranks) if len(ranks) > 1 else None)
        source = owners[places[0][0]]
        tie.start_equal(copies[0] if source == rank else None, source)
        ties.append(tie)
    return ties
