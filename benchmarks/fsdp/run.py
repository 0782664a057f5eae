"""hp-fsdp measured beside torch's FSDP2: time, memory, and what can be counted.

All contenders take turns within one run, on ranks of one thread each over gloo. A full run writes a dated page to `results/`;
what is written by hand at its end stays when the page is written again.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[2]
# In place of this file's folder, whose modules are only meant as parts of the package `benchmarks.fsdp`.
sys.path[0] = str(ROOT)

from benchmarks.fsdp import counts, memory, speed  # noqa: E402
from benchmarks.report import Section, page, write_page  # noqa: E402
from hp_core.testing import close_ranks  # noqa: E402

RESULTS = Path(__file__).parent / "results"
DISTRIBUTIONS = ("hp-fsdp", "hp-core", "torch")

TABLES: dict[str, Callable[[int], Section]] = {
    "speed": speed.section,
    "memory": memory.section,
    "counts": counts.section,
}


@click.command(help=__doc__)
@click.option("--repeats", default=25, show_default=True, type=click.IntRange(1), help="Rounds of each timed table.")
@click.option(
    "--only", "chosen", multiple=True, type=click.Choice(list(TABLES)), help="Only this table; may be repeated."
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The page to write; default results/DATE.md for a full run, and none with --only.",
)
def main(repeats: int, chosen: tuple[str, ...], output: Path | None) -> None:
    """Measure, print the page, write it."""
    date = datetime.date.today().isoformat()
    sections = []
    for name in chosen or TABLES:
        click.echo(f"measuring {name} ...", err=True)
        sections.append(TABLES[name](repeats))
    close_ranks()
    only = "".join(f" --only {name}" for name in chosen)
    settings = {
        "Settings": f"{repeats} rounds; {' and '.join(map(str, speed.RANKS))} ranks on one machine over gloo, one thread, float32."
    }
    command = f"`python benchmarks/fsdp/run.py --repeats {repeats}{only}` (`nox -s bench -- fsdp`)"
    text = page(f"hp-fsdp beside torch's FSDP2, {date}", command, DISTRIBUTIONS, sections, settings)
    if output is None and not chosen:
        output = RESULTS / f"{date}.md"
    if output is not None:
        write_page(output, text)
    click.echo(text)


if __name__ == "__main__":
    main()
