"""The golden record: what each call communicates in each combination of layouts, as text that a diff can show.

One file per family of rules. A table holds the cells of all calls that cost the same: rows by the layout of the first
operand, a letter for what a combination costs. A difference to the record is a regression, or is recorded on purpose.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hp_core.errors import HyperParallelError
from hp_core.mesh import DeviceMesh
from hp_core.platform import get_platform
from hp_core.platform.protocol import OpSample
from hp_core.testing.validator.combinations import MESHES, Combination, combinations
from hp_core.testing.validator.runs import Findings, family, is_cost

__all__ = ["Difference", "Golden", "default_folder"]

Key = tuple[str, str, str, str]
"""Mesh, op, call, operands."""
Cells = tuple["str | None", ...]
"""What each combination costs; None where it was never tried."""

_HEADER = """\
# What calls of ops communicate, forward | backward: collectives by kind, and the bytes that all ranks together send.
# Written by `python -m hp_core.rules.validate --update`; `tests/rules/test_validator.py` compares.
# A table is for all calls that cost the same, in so many combinations of layouts, numbered as
# `hp_core.testing.validator.combinations` does. One letter for each: in rows, one per layout of the first operand; or, where
# only a few are recorded, behind its number. ag all-gather, ar all-reduce, rs reduce-scatter, aa all-to-all.
"""
_LETTERS = string.ascii_letters + "".join(
    chr(code) for first, last in ((0x3B1, 0x3C9), (0x410, 0x44F), (0x4E00, 0x4F00)) for code in range(first, last + 1)
)
_NOT_TRIED = "."
_SHORT = {"all_gather": "ag", "all_reduce": "ar", "reduce_scatter": "rs", "all_to_all": "aa"}
_COST = re.compile(r"[^|:]*\|[^|:]*")
_LONG = {short: kind for kind, short in _SHORT.items()}
_SPARSE = 3
"""Tables of which less than one in so many cells is recorded are written cell by cell."""


@dataclass(frozen=True)
class Difference:
    """One combination that costs another than it is recorded to.

    Attributes:
        mesh: name of the mesh.
        sample: the call.
        where: the layouts of its operands.
        was: what is recorded.
        now: what it costs.
    """

    mesh: str
    sample: OpSample
    where: str
    was: str
    now: str

    def __str__(self) -> str:
        sample = self.sample
        call = f"{sample.op}: {sample.call} of {sample.operands} on {self.mesh}"
        return f"{call} laid out {self.where}: was {self.was}, is {self.now}"


def default_folder() -> Path | None:
    """Where the record of a source tree is; None for an installed package, which has none."""
    folder = Path(__file__).resolve().parents[4] / get_platform().op_samples().record
    return folder if folder.parent.is_dir() else None


class Golden:
    """The record in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._cells: dict[Key, Cells] = {}
        for path in sorted(folder.glob("*.txt")):
            self._cells.update(_read(path))

    def differences(self, findings: Iterable[Findings]) -> list[Difference]:
        """What costs another than is recorded, or isn't recorded."""
        found = []
        for finding in findings:
            sample, mesh = finding.task.sample, finding.task.mesh
            recorded = self._cells.get(_key(finding))
            if recorded is None or len(recorded) != finding.count:
                was = "not recorded" if recorded is None else f"recorded for {len(recorded)} combinations"
                found.append(Difference(mesh, sample, "anything", was, f"run in {finding.count} combinations"))
                continue
            chosen = finding.task.chosen
            wrong = [(n, finding.cells[n]) for n in chosen if n in finding.cells and recorded[n] != finding.cells[n]]
            if wrong:
                every = _combinations(mesh, sample.operands)
                for number, cell in wrong:
                    where = ", ".join(layout.compact_str for layout in every[number])
                    found.append(Difference(mesh, sample, where, recorded[number] or "not recorded", cell))
        return found

    def stale(self, samples: Iterable[OpSample]) -> list[Key]:
        """What is recorded of calls that are no samples any more."""
        known = {(sample.op, sample.call, sample.operands) for sample in samples}
        return sorted(key for key in self._cells if key[1:] not in known)

    def update(self, findings: Iterable[Findings], samples: Iterable[OpSample]) -> None:
        """Record what was found, forget what is stale, and write the files.

        What isn't chosen for the record (see `Task`) is left out, whatever was tried.
        """
        for finding in findings:
            if not finding.cells:  # the ranks failed
                continue
            chosen = frozenset(finding.task.chosen)
            self._cells[_key(finding)] = tuple(
                finding.cells[number] if number in chosen else None for number in range(finding.count)
            )
        for key in self.stale(samples):
            del self._cells[key]
        files: dict[str, dict[Key, Cells]] = {}
        for key, cells in self._cells.items():
            files.setdefault(family(key[1]), {})[key] = cells
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.glob("*.txt"):
            if path.stem not in files:
                path.unlink()
        for name, tables in files.items():
            (self._folder / f"{name}.txt").write_text(_text(tables), encoding="utf-8")


def _key(finding: Findings) -> Key:
    sample = finding.task.sample
    return finding.task.mesh, sample.op, sample.call, sample.operands


def _combinations(mesh: str, operands: str) -> Sequence[Combination]:
    return combinations(DeviceMesh(*MESHES[mesh]), get_platform().op_samples().values(operands, 0))


# -- the text ---------------------------------------------------------------------------------------------------------


def _text(tables: Mapping[Key, Cells]) -> str:
    """The calls of one file, those with equal tables together."""
    joined: dict[tuple[str, tuple[tuple[str, int], ...], Cells], list[str]] = {}
    for key in sorted(tables):
        mesh, op, call, operands = key
        joined.setdefault((mesh, _rows(mesh, operands), tables[key]), []).append(f"call {op}: {call} @ {operands}")
    blocks = [_HEADER]
    for (mesh, rows, cells), calls in joined.items():
        letters: dict[str, str] = {}
        for cell in cells:
            if cell is not None and cell not in letters:
                letters[cell] = _LETTERS[len(letters)]
        lines = [
            f"table {mesh} {len(cells)}",
            *calls,
            *(f"= {letter} {_short(cell)}" for cell, letter in letters.items()),
        ]
        known = [(number, letters[cell]) for number, cell in enumerate(cells) if cell is not None]
        if len(known) * _SPARSE < len(cells):
            lines.append(" ".join(["cell", *(f"{number}{letter}" for number, letter in known)]))
        else:
            row = "".join(_NOT_TRIED if cell is None else letters[cell] for cell in cells)
            start = 0
            for label, length in rows:
                lines.append(f"row {row[start : start + length]} {label}".rstrip())
                start += length
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def _short(cell: str) -> str:
    """A cell as it stands in the file."""
    if not is_cost(cell):
        return cell
    return re.sub("[a-z_]+", lambda word: _SHORT.get(word[0], word[0]), cell).replace(" | ", "|").replace("B", "")


def _long(text: str) -> str:
    """The cell that stands in the file so."""
    if not _COST.fullmatch(text):
        return text
    text = re.sub("[a-z]+", lambda word: _LONG.get(word[0], word[0]), text)
    return " | ".join(side if side == "-" else side + "B" for side in text.split("|"))


def _rows(mesh: str, operands: str) -> tuple[tuple[str, int], ...]:
    """Label and length of each row: combinations in a run with one layout of the first operand, if there are others."""
    every = _combinations(mesh, operands)
    if len(operands.split()) == 1:
        return (("", len(every)),)
    rows: list[tuple[str, int]] = []
    for combination in every:
        label = combination[0].compact_str
        if rows and rows[-1][0] == label:
            rows[-1] = (label, rows[-1][1] + 1)
        else:
            rows.append((label, 1))
    return tuple(rows)


def _read(path: Path) -> dict[Key, Cells]:
    """The record in one file.

    Raises:
        HyperParallelError: the text isn't one that `_text` writes.
    """
    found: dict[Key, Cells] = {}
    for block in path.read_text(encoding="utf-8").split("\n\n"):
        mesh, size, row = "", 0, ""
        keys: list[Key] = []
        costs: dict[str, str | None] = {_NOT_TRIED: None}
        for line in block.splitlines():
            word, _, rest = line.partition(" ")
            if word == "table":
                mesh, _, count = rest.partition(" ")
                size = int(count)
                row = _NOT_TRIED * size
            elif word == "call":
                op, _, call = rest.partition(": ")
                call, _, operands = call.rpartition(" @ ")
                keys.append((mesh, op, call, operands))
            elif word == "=":
                costs[rest[0]] = _long(rest[2:])
            elif word == "row":
                letters = rest.partition(" ")[0]
                row = row[len(letters) :] + letters  # the rows together are all of it
            elif word == "cell":
                for entry in rest.split():
                    number = int(entry[:-1])
                    row = row[:number] + entry[-1] + row[number + 1 :]
            elif word != "#":
                raise HyperParallelError(f"{path}: {line!r} is no line of a golden record; rewrite it with --update.")
        if len(row) != size or not set(row) <= set(costs):
            raise HyperParallelError(f"{path}: a table of {keys[:1]} is broken; rewrite it with --update.")
        cells = tuple(costs[letter] for letter in row)
        found.update(dict.fromkeys(keys, cells))
    return found
