"""How long `import hp_core` and `import hyper_parallel` take, and that they load no framework.

Each sample is a fresh interpreter; the packages and an empty program take turns, so that a busy moment of the machine
hits all of them alike. Writes a dated page with the medians to `results/`.
"""

from __future__ import annotations

import datetime
import statistics
import subprocess
import sys
import time
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.report import Aim, Section, page, table, write_page  # noqa: E402

RESULTS = Path(__file__).parent / "results"
EMPTY = "pass"
HEAVY = ("torch", "torch_npu", "mindspore", "numpy")
# Import statement -> distribution, and the limit the design sets, in milliseconds.
IMPORTS = {"import hp_core": ("hp-core", 50.0), "import hyper_parallel": ("hyper-parallel", 60.0)}


@click.command(help=__doc__)
@click.option("--repeats", default=20, show_default=True, help="Fresh interpreters per program.")
@click.option("--date", default=lambda: datetime.date.today().isoformat(), help="Names the page; default today.")
def main(repeats: int, date: str) -> None:
    """Measure, write the page, print it; the exit status is 1 when a limit is missed."""
    measured = section(repeats)
    command = f"`python benchmarks/imports/run.py --repeats {repeats}` (`nox -s bench -- imports`)"
    text = page(f"Import times, {date}", command, [distribution for distribution, _ in IMPORTS.values()], [measured])
    write_page(RESULTS / f"{date}.md", text)
    click.echo(text)
    if not all(aim.met for aim in measured.aims):
        sys.exit(1)


def section(repeats: int) -> Section:
    """Measure, and tell of it."""
    samples = measure([EMPTY, *IMPORTS], repeats)
    rows, aims = [], []
    for statement, (_, limit) in IMPORTS.items():
        times = samples[statement]
        # The cost of the import is what the interpreter takes longer than an empty one of the same round.
        extra = statistics.median(took - base for took, base in zip(times, samples[EMPTY], strict=True))
        loaded = ", ".join(loaded_frameworks(statement)) or "none"
        rows.append((f"`{statement}`", f"{statistics.median(times):.1f}", f"{min(times):.1f}", f"{extra:.1f}", loaded))
        over = f"{extra - limit:.1f} ms" if extra >= limit else f"loading {loaded}"
        measured = f"{extra:.1f} ms, {loaded}"
        aims.append(
            Aim(f"`{statement}`", f"< {limit:.0f} ms, no framework", measured, extra < limit and loaded == "none", over)
        )
    lines = [
        f"Milliseconds; {repeats} fresh interpreters of each, in turns; an empty one takes "
        f"{statistics.median(samples[EMPTY]):.1f}. *Import* is the median difference from the empty interpreter of the same round.",
        "",
        *table(("program", "median", "least", "import", "frameworks loaded"), rows),
    ]
    return Section("Imports", tuple(lines), tuple(aims))


def measure(programs: list[str], repeats: int) -> dict[str, list[float]]:
    """Wall times of whole interpreters, in milliseconds; an unmeasured round first fills the caches."""
    samples: dict[str, list[float]] = {program: [] for program in programs}
    for round_ in range(repeats + 1):
        for program in programs:
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", program], check=True)
            if round_ > 0:
                samples[program].append(1e3 * (time.perf_counter() - start))
    return samples


def loaded_frameworks(statement: str) -> list[str]:
    """Names of the heavy modules that an import brings in."""
    program = f"import sys; {statement}; print(*(name for name in {HEAVY} if name in sys.modules))"
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()


if __name__ == "__main__":
    main()
