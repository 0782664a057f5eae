"""Before anything runs, all ranks of a pipeline compare notes, in one collective; if they contradict, all raise the same error.

Each rank then knows where each stage is, and what its forward is called with.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from hp_core.errors import PlanError
from hp_core.platform import get_platform
from hp_core.platform.protocol import Group
from hp_pipeline.platform import get_tools

__all__ = ["Note", "StageNote", "check_notes", "exchange_notes"]

_ROOM = 8192
"""Bytes of a note that travel in the first collective; longer ones need a second."""


@dataclass(frozen=True)
class StageNote:
    """What a rank says of one of its stages.

    Attributes:
        index: its number.
        stage_num: how many it says there are.
        names: names of the parameters of its forward; "**" if it takes any.
        dynamic: whether its shapes may change.
        shared: of its shared parameters name, shape and element type.
    """

    index: int
    stage_num: int
    names: tuple[str, ...]
    dynamic: bool
    shared: tuple[tuple[str, tuple[int, ...], str], ...] = ()


@dataclass(frozen=True)
class Note:
    """What a rank says of itself.

    Attributes:
        rank: its global rank.
        stages: its stages.
        schedule: name and digest of its schedule.
        micro_batches: how many it counts.
        options: by name, what else must be the same everywhere.
        problem: what is wrong with what this rank was given; "" if nothing is.
    """

    rank: int
    stages: tuple[StageNote, ...]
    schedule: str
    micro_batches: int | None
    options: tuple[tuple[str, Hashable], ...]
    problem: str = ""


def exchange_notes(note: Note, group: Group) -> list[Note]:
    """Every rank's note, in the order of the group."""
    if group.size == 1:
        return [note]
    platform, tools = get_platform(), get_tools()
    device = platform.processes.device_type
    if group.devices and device not in group.devices:
        device = min(group.devices)
    written = pickle.dumps(note)

    def gathered(room: int, own: bytes) -> list[bytes]:
        source = tools.numbers(list(own.ljust(room, b"\0")), "uint8", device)
        output = tools.empty((group.size * room,), "uint8", device)
        platform.collectives.all_gather(output, source, group)
        whole = bytes(tools.values(output))
        return [whole[at : at + room] for at in range(0, len(whole), room)]

    found = gathered(_ROOM, len(written).to_bytes(8, "little") + written[: _ROOM - 8])
    lengths = [int.from_bytes(one[:8], "little") for one in found]
    if max(lengths) <= _ROOM - 8:
        return [pickle.loads(one[8 : 8 + length]) for one, length in zip(found, lengths, strict=True)]
    found = gathered(max(lengths), written)
    return [pickle.loads(one[:length]) for one, length in zip(found, lengths, strict=True)]


def check_notes(notes: list[Note]) -> None:
    """Refuse contradictions.

    Raises:
        PlanError: some; it names who said what, and is the same on all ranks.
    """
    if all(note.stages for note in notes):  # first what may be the reason for the rest
        _check_stages(notes)
        _all_alike(notes, "numbers of micro-batches", lambda note: note.micro_batches)
    problems = [f"rank {note.rank}: {note.problem}" for note in notes if note.problem]
    if problems:
        raise PlanError("the pipeline can't be built. " + " ".join(problems))
    _all_alike(notes, "schedules", lambda note: note.schedule)
    for number, (name, _) in enumerate(notes[0].options):
        _all_alike(notes, name, lambda note, number=number: note.options[number][1])  # type: ignore[misc]
    for name in sorted({name for note in notes for stage in note.stages for name, _, _ in stage.shared}):
        copies = {
            stage.index: (shape, dtype)
            for note in notes
            for stage in note.stages
            for other, shape, dtype in stage.shared
            if other == name
        }
        if len(set(copies.values())) > 1:
            told = "; ".join(f"stage {index}: {dtype} {shape}" for index, (shape, dtype) in sorted(copies.items()))
            raise PlanError(
                f"the copies of the shared parameter {name!r} differ: {told}. Copies have one shape and type."
            )


def _check_stages(notes: list[Note]) -> None:
    """Each stage is on one rank."""
    _all_alike(notes, "numbers of stages (stage_num)", lambda note: sorted({stage.stage_num for stage in note.stages}))
    stage_num = notes[0].stages[0].stage_num
    told = "; ".join(f"rank {note.rank}: {[stage.index for stage in note.stages]}" for note in notes)
    owners: dict[int, list[int]] = {}
    for note in notes:
        for stage in note.stages:
            owners.setdefault(stage.index, []).append(note.rank)
    wrong = []
    if any(stage.stage_num != stage_num for note in notes for stage in note.stages):
        raise PlanError(f"stages of one rank differ in stage_num. Stages by rank: {told}; pass the same everywhere.")
    missing = [index for index in range(stage_num) if index not in owners]
    if missing:
        wrong.append(f"stages {missing} are on no rank, so that what is sent to them would never arrive")
    wrong += [f"stage {index} is on ranks {ranks}" for index, ranks in sorted(owners.items()) if len(ranks) > 1]
    outside = sorted(index for index in owners if not 0 <= index < stage_num)
    if outside:
        wrong.append(f"indices {outside} are outside 0..{stage_num - 1}")
    if wrong:
        raise PlanError(
            f"stage_index must be each of 0..{stage_num - 1} once: {'; '.join(wrong)}. Stages by rank: {told}."
        )


def _all_alike(notes: list[Note], what: str, of: Callable[[Note], object]) -> None:
    said: dict[str, list[int]] = {}
    for note in notes:
        said.setdefault(str(of(note)), []).append(note.rank)
    if len(said) > 1:
        told = "; ".join(f"ranks {ranks} say {value}" for value, ranks in said.items())
        raise PlanError(f"the ranks of the pipeline were given different {what}: {told}. Pass the same everywhere.")
