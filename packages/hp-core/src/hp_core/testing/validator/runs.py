"""Runs of the validator: many calls on pooled ranks, chunk by chunk, and what all ranks found of each.

A quick run tries a fixed choice of combinations, and the golden record is kept of these: nearly all of the first call of a
family of rules, many of the first of each rule, fewer of the others, and a few of calls that differ only in the op's name.
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from hp_core.mesh import DeviceMesh, init_device_mesh
from hp_core.platform import get_platform
from hp_core.platform.protocol import OpSample
from hp_core.rules.registry import find_rule
from hp_core.testing.failures import RankFailure
from hp_core.testing.ranks import run_ranks
from hp_core.testing.validator.combinations import MESHES, Combination, combinations, spread
from hp_core.testing.validator.oracle import FAULT, Outcome, Sent, examine, only_own_rules

__all__ = ["Findings", "Task", "Validation", "family", "plan_tasks", "validate"]

_CHUNK = 800
"""So many combinations are tried in one call of the ranks."""
_SECONDS, _SECONDS_EACH = 30.0, 0.08
"""How long a call of the ranks may take, and for each combination: many times what it takes. Ranks that disagree hang."""
_CHOICES = {
    "2": ({1: 48, 2: 324, 3: 90}, {1: 48, 2: 60, 3: 30}, {1: 12, 2: 10, 3: 8}, {1: 2, 2: 2, 3: 2}),
    "2x2": ({1: 48, 2: 160, 3: 60}, {1: 12, 2: 30, 3: 16}, {1: 6, 2: 5, 3: 4}, {1: 1, 2: 1, 3: 1}),
}
"""By mesh, how many combinations are chosen of a call with so many operands (3: three and more): of a family's first, of a
rule's first, of the first of several alike, of the rest of them. A combination on four ranks costs four times one on two.
"""


_Name = tuple[str, str, str]


@dataclass(frozen=True)
class Task:
    """One sample on one mesh.

    Attributes:
        sample: the call.
        mesh: name of the mesh.
        numbers: the combinations of layouts to try, by number; None for all.
        chosen: those that the golden record is kept of.
    """

    sample: OpSample
    mesh: str
    numbers: tuple[int, ...] | None = None
    chosen: tuple[int, ...] = ()


@dataclass
class Findings:
    """What all ranks found of one task.

    Attributes:
        task: what was run.
        cells: per number of a combination what it costs, or how it is refused, as text.
        faults: pairs of where (layouts) and what differs from dense.
        count: number of combinations there are, without those that only an exhaustive run tries.
    """

    task: Task
    cells: dict[int, str] = field(default_factory=dict)
    faults: list[tuple[str, str]] = field(default_factory=list)
    count: int = 0

    @property
    def refused(self) -> int:
        """Number of combinations that were refused."""
        return sum(is_refusal(cell) for cell in self.cells.values())


@dataclass
class Validation:
    """The result of a run."""

    findings: list[Findings]
    seconds: float = 0.0

    @property
    def faults(self) -> list[tuple[OpSample, str, str]]:
        """All faults: the sample, the layouts, what differs."""
        return [(found.task.sample, where, what) for found in self.findings for where, what in found.faults]


def is_refusal(cell: str) -> bool:
    """Whether a cell's text is that of an error."""
    return cell.startswith("refused")


def is_cost(cell: str) -> bool:
    """Whether a cell's text says what was sent."""
    return " | " in cell and not is_refusal(cell)


def family(op: str) -> str:
    """The family of rules that an op belongs to: the name of the module its rule is in."""
    rule = find_rule(None, op)
    return "none" if rule is None else rule.function.__module__.rpartition(".")[2]


def plan_tasks(samples: Sequence[OpSample], meshes: Sequence[str], *, quick: bool = False) -> list[Task]:
    """The tasks of a run.

    Args:
        samples: samples of the table.
        meshes: names of meshes, keys of `MESHES`.
        quick: try only the combinations that the golden record is kept of.
    """
    tasks = []
    for mesh in meshes:
        choice = _choice(mesh)
        for sample in samples:
            chosen = choice[sample]
            tasks.append(Task(sample, mesh, chosen if quick else None, chosen))
    return tasks


def validate(
    tasks: Sequence[Task], *, exhaustive: bool = False, progress: Callable[[int, int], None] | None = None
) -> Validation:
    """Run the tasks on ranks of this machine.

    Args:
        tasks: from `plan_tasks`.
        exhaustive: as there.
        progress: called with how many tasks are done, and of how many.
    """
    began = time.monotonic()
    findings: list[Findings] = []
    for chunk, work in _chunks(tasks, exhaustive):
        findings += _run_chunk(chunk, exhaustive, _SECONDS + _SECONDS_EACH * work)
        if progress is not None:
            progress(len(findings), len(tasks))
    return Validation(findings, time.monotonic() - began)


def check_samples(samples: Sequence[OpSample], mesh: str, most: int) -> list[str]:
    """Faults of samples that aren't in the table, in at most so many combinations each, one line for each kind.

    A refusal is a fault, too, unless an in-place op meets a pending operand.
    """
    __tracebackhide__ = True
    # a function of a test module among the arguments tells the launcher to send that module by value
    anchor = next((sample.function for sample in samples if inspect.isfunction(sample.function)), None)
    results = run_ranks(_world(mesh), _check_on_rank, anchor, list(samples), mesh, most, timeout=100.0)
    kinds: dict[tuple[str, str], str] = {}
    for result in results:
        for call, where, what in result:
            kinds.setdefault((call, what), f"{call}: {what} ({where})")
    return list(kinds.values())


# -- in the parent ----------------------------------------------------------------------------------------------------


@cache
def _choice(mesh_name: str) -> dict[OpSample, tuple[int, ...]]:
    """The combinations that are chosen of each sample of the table, many of what is the first of its kind."""
    tools = get_platform().op_samples()
    mesh = DeviceMesh(*MESHES[mesh_name])
    seen: set[Any] = set()
    choice = {}
    for sample in tools.table():
        operands = tools.values(sample.operands, 0)
        size = min(len(operands), 3)
        alike = _likeness(sample)
        kinds = [(family(sample.op), size), (alike[0], size), alike]
        rank = next((rank for rank, kind in enumerate(kinds) if kind not in seen), len(kinds))
        seen.update(kinds)
        most = _CHOICES[mesh_name][rank][size]
        most = min(most, tools.most.get(mesh_name, most))
        choice[sample] = tuple(spread(len(combinations(mesh, operands)), most))
    return choice


def _world(mesh: str) -> int:
    world = 1
    for size in MESHES[mesh][0]:
        world *= size
    return world


def _likeness(sample: OpSample) -> Any:
    """Equal for calls of ops that one rule treats alike: the same text but for the op's name, on operands of equal shapes."""
    rule = find_rule(None, sample.op)
    text = re.sub(
        rf"(?<![A-Za-z]){re.escape(sample.op)}(?![A-Za-z])", "OP", sample.call.replace(f"{sample.op}_(", "OP_(")
    )
    shapes = tuple(operand.rpartition(":")[2] for operand in sample.operands.split())
    return (None if rule is None else rule.function, text.removeprefix("torch.").removeprefix("F."), shapes)


def _chunks(tasks: Sequence[Task], exhaustive: bool, size: int = _CHUNK) -> Iterator[tuple[list[Task], int]]:
    """Runs of tasks on one mesh, of about equal work, and how many combinations each has."""
    tools = get_platform().op_samples()
    chunk: list[Task] = []
    work = 0
    for task in tasks:
        if chunk and (work >= size or task.mesh != chunk[0].mesh):
            yield chunk, work
            chunk, work = [], 0
        chunk.append(task)
        if task.numbers is not None:
            work += len(task.numbers)
        else:
            mesh = DeviceMesh(*MESHES[task.mesh])
            work += len(combinations(mesh, tools.values(task.sample.operands, 0), exhaustive))
    if chunk:
        yield chunk, work


def _run_chunk(chunk: Sequence[Task], exhaustive: bool, timeout: float) -> list[Findings]:
    """The chunk's findings; where ranks fail or hang, its tasks are run one by one, to name the call."""
    mesh = chunk[0].mesh
    # samples of the table go by name, since their functions don't travel; others by value
    table = {id(sample) for sample in get_platform().op_samples().table()}
    items = [(_name(task.sample) if id(task.sample) in table else task.sample, task.numbers) for task in chunk]
    try:
        results = run_ranks(_world(mesh), _on_rank, items, mesh, exhaustive, timeout=timeout)
    except RankFailure as failure:
        if len(chunk) == 1:
            return [Findings(chunk[0], faults=[("", f"the ranks failed: {failure}")])]
        return [
            found
            for alone, work in _chunks(chunk, exhaustive, size=1)
            for found in _run_chunk(alone, exhaustive, _SECONDS + _SECONDS_EACH * work)
        ]
    return [_merge(task, [result[place] for result in results], exhaustive) for place, task in enumerate(chunk)]


def _merge(task: Task, outcomes: Sequence[Outcome], exhaustive: bool) -> Findings:
    """What the ranks found, as one."""
    mesh = DeviceMesh(*MESHES[task.mesh])
    operands = get_platform().op_samples().values(task.sample.operands, 0)
    every = combinations(mesh, operands, exhaustive)
    numbers = range(len(every)) if task.numbers is None else task.numbers
    recorded = combinations(mesh, operands) if exhaustive else every
    number_of = {combination: number for number, combination in enumerate([*recorded, *every])}
    number_of |= {combination: number for number, combination in enumerate(recorded)}
    found = Findings(task, count=len(recorded))
    first = outcomes[0]
    if task.sample.op and task.sample.op not in first.reached:
        reached = ", ".join(sorted(first.reached)) or "none"
        found.faults.append(("", f"the call never looks up the rule of {task.sample.op}; it reaches {reached}"))
    for place, number in enumerate(numbers):
        cells = [outcome.cells[place] for outcome in outcomes]
        if len({cell if isinstance(cell, str) else "" for cell in cells}) > 1:
            what = "; ".join(f"rank {rank}: {cell}" for rank, cell in enumerate(cells))
            found.faults.append((_where(every[number]), f"ranks disagree: {what}"))
        found.cells[number_of[every[number]]] = _cell_text(cells)
    told: set[tuple[int, str]] = set()
    for rank, outcome in enumerate(outcomes):
        for place, what in outcome.faults:
            if (place, what) not in told:
                told.add((place, what))
                found.faults.append((_where(every[numbers[place]]), f"rank {rank}: {what}"))
    return found


def _name(sample: OpSample) -> _Name:
    return sample.op, sample.call, sample.operands


def _where(combination: Combination) -> str:
    return ", ".join(layout.compact_str for layout in combination)


def _cell_text(cells: Sequence[Any]) -> str:
    """Forward and backward: the most calls of any rank, by kind, and the bytes of all; or the refusal."""
    refusal = next((cell for cell in cells if isinstance(cell, str)), None)
    if refusal is not None:
        return FAULT if FAULT in cells else f"refused {refusal}"
    return " | ".join(_sent_text([cell[direction] for cell in cells]) for direction in (0, 1))


def _sent_text(sent: Sequence[Sent]) -> str:
    counts: dict[str, int] = {}
    for kinds, _ in sent:
        for kind, count in kinds:
            counts[kind] = max(counts.get(kind, 0), count)
    if not counts:
        return "-"
    kinds_text = " ".join(kind if count == 1 else f"{kind}*{count}" for kind, count in sorted(counts.items()))
    return f"{kinds_text} {sum(nbytes for _, nbytes in sent)}B"


# -- on a rank --------------------------------------------------------------------------------------------------------


def _on_rank(
    items: Sequence[tuple[_Name | OpSample, tuple[int, ...] | None]], mesh_name: str, exhaustive: bool
) -> list[Outcome]:
    shape, names = MESHES[mesh_name]
    mesh = init_device_mesh(get_platform().processes.device_type, shape, mesh_dim_names=names)
    tools = get_platform().op_samples()
    table = {_name(sample): sample for sample in tools.table()}
    outcomes = []
    with only_own_rules():
        for item, numbers in items:
            sample = table[item] if isinstance(item, tuple) else item
            every = combinations(mesh, tools.values(sample.operands, 0), exhaustive)
            outcomes.append(examine(sample, mesh, every if numbers is None else [every[i] for i in numbers]))
    return outcomes


def _check_on_rank(
    _: Callable[..., Any] | None, samples: Sequence[OpSample], mesh_name: str, most: int
) -> list[tuple[str, str, str]]:
    shape, names = MESHES[mesh_name]
    mesh = init_device_mesh(get_platform().processes.device_type, shape, mesh_dim_names=names)
    tools = get_platform().op_samples()
    faults = []
    with only_own_rules():
        for sample in samples:
            every = combinations(mesh, tools.values(sample.operands, 0), extras=False)
            chosen = [every[i] for i in spread(len(every), most)]
            outcome = examine(sample, mesh, chosen)
            found = list(outcome.faults)
            for place, cell in enumerate(outcome.cells):
                pending = any(layout.is_partial() for layout in chosen[place])
                if isinstance(cell, str) and cell != FAULT and not (pending and "can't write in place" in cell):
                    found.append((place, cell))
            for place, what in found:
                faults.append((sample.call, f"{sample.operands} laid out {_where(chosen[place])}", what))
    return faults
