"""What a pipeline does, as data: one step of a schedule, and how it is written as text.

A step says what happens to one micro-batch in one stage. Everything else (orders, passes, the validator, the simulator, the
runtime) is made of these.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from hp_core.errors import PlanError

__all__ = ["COMMUNICATION", "COMPUTE", "MetaStep", "MetaStepType", "parse_step", "plain_step", "plain_steps"]


class MetaStepType(Enum):
    """What a step does. The value is how it is written."""

    __hash__ = object.__hash__  # members are single objects, and large schedules look them up a million times

    F = "F"
    """The forward of a stage on a micro-batch."""
    B = "B"
    """Its whole backward: gradients of inputs and of weights."""
    I = "I"  # noqa: E741
    """The backward as far as the gradients of its inputs."""
    W = "W"
    """The rest of the backward: the gradients of its weights."""
    SEND_F = "SEND_F"
    """Send the outputs of a stage to the stage `peer` (the next one, if not said)."""
    RECV_F = "RECV_F"
    """Receive the inputs of a stage from the stage `peer` (the one before, if not said)."""
    SEND_B = "SEND_B"
    """Send the gradients of a stage's inputs to the stage `peer` (the one before, if not said)."""
    RECV_B = "RECV_B"
    """Receive the gradients of a stage's outputs from the stage `peer` (the next one, if not said)."""
    UNSHARD = "UNSHARD"
    """Gather the parameters of a sharded stage; it has no micro-batch."""
    RESHARD = "RESHARD"
    """Free them again; no micro-batch."""
    REDUCE_GRAD = "REDUCE_GRAD"
    """Reduce the gradients of a stage over its data-parallel ranks; no micro-batch."""
    SWAP_OUT = "SWAP_OUT"
    """Begin to move the activations of a micro-batch to the host."""
    SWAP_IN = "SWAP_IN"
    """Begin to bring them back."""
    OVERLAP_B_F = "OVERLAP_B_F"
    """A backward and a forward at the same time: `parts`."""


_T = MetaStepType
COMPUTE = frozenset({_T.F, _T.B, _T.I, _T.W})
"""Steps that compute."""
_OF_STAGE = frozenset({_T.UNSHARD, _T.RESHARD, _T.REDUCE_GRAD})
COMMUNICATION = frozenset({_T.SEND_F, _T.RECV_F, _T.SEND_B, _T.RECV_B})
"""Steps that send or receive; they have a peer."""
_TEXT = re.compile(r"([A-Z]+(?:_[A-Z]+)*)(\d+)(?:\.(\d+))?(?:@(\d+))?")


class _Fields(NamedTuple):
    type: MetaStepType
    stage: int
    micro_batch: int | None
    peer: int | None
    parts: tuple[MetaStep, MetaStep] | None


class MetaStep(_Fields):
    """One step of a rank's schedule: an immutable value, and a tuple, since large schedules hold half a million of them.

    Attributes:
        type: what it does.
        stage: the stage it concerns, one of the rank's own.
        micro_batch: which micro-batch; None for steps of a stage as a whole.
        peer: for sends and receives the stage at the other end, if it isn't the neighbour that the type implies (a skip
            connection).
        parts: for `OVERLAP_B_F`: the backward (`B` or `I`) and the forward, in this order. `stage` and `micro_batch` are then
            those of the backward.

    Raises:
        PlanError: the type needs something that isn't given, or can't have what is.
    """

    __slots__ = ()

    def __new__(
        cls,
        type: MetaStepType,
        stage: int,
        micro_batch: int | None = None,
        peer: int | None = None,
        parts: tuple[MetaStep, MetaStep] | None = None,
    ) -> MetaStep:
        """Check it, and make it."""
        wrong = None
        if (micro_batch is None) != (type in _OF_STAGE):
            wrong = "has no micro-batch" if type in _OF_STAGE else "needs a micro-batch"
        elif peer is not None and type not in COMMUNICATION:
            wrong = "has no peer"
        elif (parts is None) != (type is not _T.OVERLAP_B_F):
            wrong = "needs a backward and a forward" if type is _T.OVERLAP_B_F else "has no parts"
        elif parts is not None and (parts[0].type not in (_T.B, _T.I) or parts[1].type is not _T.F):
            wrong = "needs a backward and a forward, in this order"
        if wrong:
            raise PlanError(f"step {type.value} of stage {stage}, micro-batch {micro_batch}: it {wrong}.")
        return tuple.__new__(cls, (type, stage, micro_batch, peer, parts))

    @staticmethod
    def overlapped(backward: MetaStep, forward: MetaStep) -> MetaStep:
        """A backward and a forward at the same time."""
        return MetaStep(_T.OVERLAP_B_F, backward.stage, backward.micro_batch, parts=(backward, forward))

    @property
    def computes(self) -> tuple[MetaStep, ...]:
        """The computations in it: itself, its parts, or none."""
        return self.parts or ((self,) if self.type in COMPUTE else ())

    @property
    def peer_stage(self) -> int:
        """For sends and receives: the stage at the other end."""
        if self.peer is not None:
            return self.peer
        return self.stage + (1 if self.type in (_T.SEND_F, _T.RECV_B) else -1)

    def __str__(self) -> str:
        kind, stage, batch, peer, parts = self
        if parts is not None:
            return f"{kind.value}({parts[0]},{parts[1]})"
        if peer is None:
            return f"{kind.value}{stage}" if batch is None else f"{kind.value}{stage}.{batch}"
        return f"{kind.value}{stage}.{batch}@{peer}"


def plain_step(kind: MetaStepType, stage: int, micro_batch: int, peer: int | None = None) -> MetaStep:
    """A step that is known to be right: not an OVERLAP_B_F, and one that has a micro-batch. Checks nothing."""
    return tuple.__new__(MetaStep, (kind, stage, micro_batch, peer, None))


def plain_steps(kind: MetaStepType, places: Iterable[tuple[int, int]]) -> list[MetaStep]:
    """A step of one type for each (stage, micro-batch); like `plain_step`, it checks nothing."""
    new = tuple.__new__
    return [new(MetaStep, (kind, stage, batch, None, None)) for stage, batch in places]


def parse_step(text: str) -> MetaStep:
    """The step that `str(step)` wrote: `F0.2`, `SEND_F0.2`, `RECV_F2.1@0`, `UNSHARD1`, `OVERLAP_B_F(B1.0,F0.3)`.

    Raises:
        PlanError: it is none.
    """
    text = text.strip()
    if text.startswith(f"{_T.OVERLAP_B_F.value}(") and text.endswith(")"):
        backward, comma, forward = text[len(_T.OVERLAP_B_F.value) + 1 : -1].partition(",")
        if comma:
            return MetaStep.overlapped(parse_step(backward), parse_step(forward))
    found = _TEXT.fullmatch(text)
    if found is None or found[1] not in _T.__members__:
        raise PlanError(
            f"{text!r} is no step; write for example F0.2 (stage 0, micro-batch 2), SEND_F0.2, RECV_F2.1@0, UNSHARD1."
        )
    batch, peer = (None if number is None else int(number) for number in (found[3], found[4]))
    return MetaStep(MetaStepType[found[1]], int(found[2]), batch, peer)
