"""A schedule: for each rank of a pipeline the steps that it takes, in order. An immutable value that prints and reads back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hp_core.errors import PlanError
from hp_pipeline.steps import MetaStep, MetaStepType, parse_step

__all__ = ["Columns", "Schedule", "columns_of", "looped_placement", "v_placement"]

Columns = tuple[
    tuple[MetaStepType, ...],
    tuple[int, ...],
    tuple["int | None", ...],
    tuple["int | None", ...],
    tuple["tuple[MetaStep, MetaStep] | None", ...],
]
"""Steps turned on their side: types, stages, micro-batches, peers, parts."""


@dataclass(frozen=True)
class Schedule:
    """What every rank of a pipeline does.

    Attributes:
        name: of the order that it was made from.
        micro_batches: how many there are, >= 1.
        placement: for each stage the rank (position along the pipeline axis) that runs it.
        steps: for each rank its steps, in order.
    """

    name: str
    micro_batches: int
    placement: tuple[int, ...]
    steps: tuple[tuple[MetaStep, ...], ...]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.steps)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank runs, ascending: its chunks."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def with_steps(self, steps: Iterable[Iterable[MetaStep]]) -> Schedule:
        """The same schedule with other steps: what a pass gives."""
        return replace(self, steps=tuple(tuple(of_rank) for of_rank in steps))

    def to_text(self) -> str:
        """As text: a head, then a line for each rank."""
        head = f"schedule {self.name} micro_batches={self.micro_batches} placement={','.join(map(str, self.placement))}"
        return (
            "\n".join(
                [head, *(f"{rank}: {' '.join(map(str, steps))}".rstrip() for rank, steps in enumerate(self.steps))]
            )
            + "\n"
        )

    @staticmethod
    def from_text(text: str) -> Schedule:
        """The schedule that `to_text` wrote; blank lines and lines that begin with # are passed over.

        Raises:
            PlanError: a line can't be read.
        """
        lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
        words = lines[0].split() if lines else []
        if len(words) != 4 or words[0] != "schedule":
            raise PlanError("the text of a schedule begins with: schedule NAME micro_batches=M placement=0,1,...")
        try:
            micro_batches = int(words[2].removeprefix("micro_batches="))
            placement = tuple(int(rank) for rank in words[3].removeprefix("placement=").split(","))
        except ValueError as error:
            raise PlanError(f"the head of a schedule can't be read: {lines[0]!r} ({error})") from error
        steps: list[tuple[MetaStep, ...]] = []
        for number, line in enumerate(lines[1:]):
            rank, colon, rest = line.partition(":")
            if not colon or rank.strip() != str(number):
                raise PlanError(
                    f"line {line[:40]!r} should begin with '{number}:'; there is one line for each rank, in order."
                )
            steps.append(tuple(parse_step(word) for word in rest.split()))
        return Schedule(words[1], micro_batches, placement, tuple(steps))

    def __str__(self) -> str:
        return self.to_text()


def columns_of(steps: Sequence[MetaStep]) -> Columns:
    """The fields of steps, each as one tuple: a loop over these looks nothing up."""
    return tuple(zip(*steps, strict=True)) if steps else ((), (), (), (), ())  # type: ignore[return-value]


def looped_placement(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stages dealt out to ranks round and round: rank s % P runs stage s."""
    return tuple(stage % ranks for stage in range(ranks * chunks))


def v_placement(ranks: int) -> tuple[int, ...]:
    """Two stages per rank, down and up again: the first and the last stage are on rank 0."""
    return (*range(ranks), *reversed(range(ranks)))


def as_steps(words: Sequence[str]) -> tuple[MetaStep, ...]:
    """Steps from their texts."""
    return tuple(map(parse_step, words))
