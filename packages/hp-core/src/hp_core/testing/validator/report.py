"""What the validator tells a person: progress, what differs, and a table by family. Uses `rich` where it is installed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hp_core.testing.validator.golden import Difference
from hp_core.testing.validator.runs import Findings, Validation, family

__all__ = ["faults_text", "print_report", "progress_bar"]

_SHOWN = 3
"""Combinations shown of one fault or difference."""


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int, int], None]]:
    """A function that is told how many tasks are done, and of how many."""
    try:
        from rich.progress import Progress
    except ImportError:
        yield lambda done, of: print(f"{done} of {of} calls", file=sys.stderr, flush=True)
        return
    with Progress(transient=True) as progress:
        bar = progress.add_task("calls", total=total)
        yield lambda done, _: progress.update(bar, completed=done)


def print_report(validation: Validation, differences: Sequence[Difference], unsampled: Sequence[str]) -> None:
    """Print what was found, and a table of families."""
    if validation.faults:
        print("Differs from dense:\n" + faults_text(validation))
    if differences:
        print("Differs from the golden record (rewrite it with --update if this is meant):\n" + _lines(
            [(f"{d.sample.op}: {d.sample.call} of {d.sample.operands} on {d.mesh}", f"was {d.was}, is {d.now}", d.where)
             for d in differences]
        ))  # fmt: skip
    if unsampled:
        print("Rules without a sample: " + ", ".join(unsampled))
    _print_table(_rows(validation.findings))
    print(f"{len(validation.findings)} calls in {validation.seconds:.0f} s")


def faults_text(validation: Validation) -> str:
    """All faults, each kind with the first few layouts in which it shows."""
    return _lines(
        [
            (
                f"{found.task.sample.op}: {found.task.sample.call} of {found.task.sample.operands} on {found.task.mesh}",
                what,
                where,
            )
            for found in validation.findings
            for where, what in found.faults
        ]
    )


def _lines(entries: Sequence[tuple[str, str, str]]) -> str:
    """Entries of call, what, and where, those that differ only in where together."""
    joined: dict[tuple[str, str], list[str]] = {}
    for call, what, where in entries:
        joined.setdefault((call, what), []).append(where)
    lines = []
    for (call, what), places in joined.items():
        lines.append(f"  {call}: {what}")
        lines += [f"    laid out {where}" for where in places[:_SHOWN] if where]
        if len(places) > _SHOWN:
            lines.append(f"    and {len(places) - _SHOWN} more")
    return "\n".join(lines)


_COLUMNS = ("family", "mesh", "ops", "calls", "layouts", "refused", "silent", "faults")


def _rows(findings: Sequence[Findings]) -> list[tuple[str, ...]]:
    """Numbers by family and mesh: ops, calls, combinations of layouts, those refused, those without communication."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    ops: dict[tuple[str, str], set[str]] = {}
    for found in findings:
        key = (family(found.task.sample.op), found.task.mesh)
        count = counts.setdefault(key, Counter())
        ops.setdefault(key, set()).add(found.task.sample.op)
        count["calls"] += 1
        count["layouts"] += len(found.cells)
        count["refused"] += found.refused
        count["silent"] += sum(cell == "- | -" for cell in found.cells.values())
        count["faults"] += len(found.faults)
    rows = []
    for key, count in sorted(counts.items()):
        rows.append((*key, str(len(ops[key])), *(str(count[name]) for name in _COLUMNS[3:])))
    total: Counter[str] = sum(counts.values(), Counter())
    rows.append(("all", "", str(len(set().union(*ops.values()))), *(str(total[name]) for name in _COLUMNS[3:])))
    return rows


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
        for row in (_COLUMNS, *rows):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    table = Table()
    for index, name in enumerate(_COLUMNS):
        table.add_column(name, justify="left" if index < 2 else "right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
