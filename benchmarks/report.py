"""What all benchmarks share: the command that measures tables, and the dated Markdown page with versions, tables and aims.

A page may end with remarks written by hand (why an aim is missed, say); writing it again keeps everything below the mark.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click

from hp_core.testing import close_ranks

__all__ = ["BY_HAND", "Aim", "Section", "at_least", "at_most", "command", "page", "table", "write_page"]

BY_HAND = "<!-- Everything below this line is written by hand, and kept when the page is written again. -->"


@dataclass(frozen=True)
class Aim:
    """One number that the design asks for.

    Attributes:
        name: what is measured.
        goal: what is asked for, as text.
        measured: what came out, as text.
        met: whether that is enough.
        missed_by: by how much it isn't, as text.
    """

    name: str
    goal: str
    measured: str
    met: bool
    missed_by: str = ""

    @property
    def verdict(self) -> str:
        """Whether it is met, and if not by how much it is missed."""
        return "met" if self.met else f"**missed** by {self.missed_by}"


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Attributes:
        title: heading.
        lines: Markdown lines.
        aims: what the design asks of it.
    """

    title: str
    lines: tuple[str, ...]
    aims: tuple[Aim, ...] = ()


def at_most(name: str, value: float, limit: float, unit: str = "x") -> Aim:
    """An aim that is met up to a limit."""
    met = value <= limit
    over = "" if met else f"{100 * (value / limit - 1):.0f} %"
    return Aim(name, f"<= {limit:g}{unit}", f"{value:.2f}{unit}", met, over)


def at_least(name: str, value: float, limit: float, unit: str = "x") -> Aim:
    """An aim that is met from a limit on."""
    met = value >= limit
    under = "" if met else f"{100 * (1 - value / limit):.0f} %"
    return Aim(name, f">= {limit:g}{unit}", f"{value:.2f}{unit}", met, under)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    """A Markdown table; the first `left` columns are text, the others numbers."""
    rule = ["---" if column < left else "---:" for column in range(len(head))]
    return [f"| {' | '.join(head)} |", f"|{'|'.join(rule)}|", *(f"| {' | '.join(row)} |" for row in rows)]


def command(
    title: str,
    folder: Path,
    tables: Mapping[str, Callable[[int], Section]],
    distributions: Sequence[str],
    settings: Callable[[int], str],
    *,
    help: str | None,
    repeats: int,
) -> click.Command:
    """The command of a benchmark: it measures tables, prints the page, and writes it.

    Args:
        title: of the page; the date follows.
        folder: of the benchmark; pages go to `results/` in it.
        tables: in the order of the page; each takes the number of rounds.
        distributions: whose versions are told.
        settings: what was measured, told from the number of rounds.
        help: what the command says of itself.
        repeats: the number of rounds, if none is said.
    """

    @click.command(help=help)
    @click.option(
        "--repeats", default=repeats, show_default=True, type=click.IntRange(1), help="Rounds of each timed table."
    )
    @click.option(
        "--only", "chosen", multiple=True, type=click.Choice(list(tables)), help="Only this table; may be repeated."
    )
    @click.option(
        "--output",
        type=click.Path(dir_okay=False, path_type=Path),
        help="The page to write; default results/DATE.md for a full run, and none with --only.",
    )
    def main(repeats: int, chosen: tuple[str, ...], output: Path | None) -> None:
        date = datetime.date.today().isoformat()
        sections = []
        for name in chosen or tables:
            click.echo(f"measuring {name} ...", err=True)
            sections.append(tables[name](repeats))
        close_ranks()
        only = "".join(f" --only {name}" for name in chosen)
        call = f"`python benchmarks/{folder.name}/run.py --repeats {repeats}{only}` (`nox -s bench -- {folder.name}`)"
        text = page(f"{title}, {date}", call, distributions, sections, {"Settings": settings(repeats)})
        if output is None and not chosen:
            output = folder / "results" / f"{date}.md"
        if output is not None:
            write_page(output, text)
        click.echo(text)

    return main


def page(
    title: str,
    command: str,
    distributions: Sequence[str],
    sections: Sequence[Section],
    settings: Mapping[str, str] | None = None,
) -> str:
    """A whole page: what ran where, the aims, then the sections."""
    versions = ", ".join(f"{name} {_version(name)}" for name in distributions)
    lines = [
        f"# {title}",
        "",
        f"Command: {command}",
        "",
        f"{versions}; Python {platform.python_version()}, {platform.system()} {platform.machine()}, {_cpu()}.",
        "",
    ]
    for name, value in (settings or {}).items():
        lines += [f"{name}: {value}", ""]
    aims = [aim for section in sections for aim in section.aims]
    if aims:
        rows = [(aim.name, aim.goal, aim.measured, aim.verdict) for aim in aims]
        lines += ["## Aims", "", *table(("what", "aim", "measured", "verdict"), rows, left=4), ""]
    for section in sections:
        lines += [f"## {section.title}", "", *section.lines, ""]
    return "\n".join(lines)


def write_page(path: Path, text: str) -> None:
    """Write a page, keeping what an earlier one of the same name has below the mark."""
    remarks = ""
    if path.exists():
        _, mark, rest = path.read_text("utf-8").partition(BY_HAND)
        remarks = rest if mark else ""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n{BY_HAND}\n{remarks.lstrip() and remarks}", "utf-8")


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "(from its source folder)"


def _cpu() -> str:
    """Model of the processor, as the system tells it."""
    info = Path("/proc/cpuinfo")
    names = (
        [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0] if names else platform.processor() or "unknown processor"
