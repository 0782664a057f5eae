"""hp-core measured beside its peers: op overhead, redistribution, transitions, a tensor-parallel MLP, imports.

All contenders take turns within one run, on two ranks of one thread each. A full run writes a dated page to `results/`;
what is written by hand at its end (why an aim is missed) stays when the page is written again.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[2]
# In place of this file's folder, whose modules are only meant as parts of the package `benchmarks.core`.
sys.path[0] = str(ROOT)

from benchmarks.core import mlp, operators, overhead, redistribute, transitions  # noqa: E402
from benchmarks.imports import run as imports  # noqa: E402
from benchmarks.report import Section, page, write_page  # noqa: E402
from hp_core.testing import close_ranks  # noqa: E402

RESULTS = Path(__file__).parent / "results"
DISTRIBUTIONS = ("hp-core", "hyper-parallel", "torch")
IMPORT_REPEATS = 20

# In the order of the page; each takes the number of rounds.
TABLES: dict[str, Callable[[int], Section]] = {
    "overhead": overhead.section,
    "operators": operators.section,
    "redistribute": redistribute.section,
    "transitions": lambda _: transitions.section(),
    "mlp": mlp.section,
    "imports": lambda rounds: imports.section(min(rounds, IMPORT_REPEATS)),
}


@click.command(help=__doc__)
@click.option("--repeats", default=80, show_default=True, type=click.IntRange(1), help="Rounds of each timed table.")
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
        "Settings": f"{repeats} rounds; {overhead.RANKS} ranks on one machine over gloo, one thread each, float32."
    }
    command = f"`python benchmarks/core/run.py --repeats {repeats}{only}` (`nox -s bench -- core`)"
    text = page(f"hp-core beside its peers, {date}", command, DISTRIBUTIONS, sections, settings)
    if output is None and not chosen:
        output = RESULTS / f"{date}.md"
    if output is not None:
        write_page(output, text)
    click.echo(text)


if __name__ == "__main__":
    main()
