"""How long `import hp_core` and `import hyper_parallel` take, and that they load no framework.

Each sample is a fresh interpreter; the packages and an empty program take turns, so that a busy moment of the machine
hits all of them alike. Writes a dated page with the medians to `results/`.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
EMPTY = "pass"
HEAVY = ("torch", "torch_npu", "mindspore", "numpy")
# Import statement -> distribution, and the limit the design sets, in milliseconds.
IMPORTS = {"import hp_core": ("hp-core", 50.0), "import hyper_parallel": ("hyper-parallel", 60.0)}


def main() -> int:
    """Measure, write the page, print it; the exit status is 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20, help="fresh interpreters per program")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="names the page")
    arguments = parser.parse_args()

    samples = measure([EMPTY, *IMPORTS], arguments.repeats)
    page, kept = report(samples, arguments.date)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{arguments.date}.md").write_text(page, "utf-8")
    print(page)
    return 0 if kept else 1


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


def loaded_frameworks(statement: str) -> str:
    """Names of the heavy modules that an import brings in."""
    program = f"import sys; {statement}; print(', '.join(name for name in {HEAVY} if name in sys.modules) or 'none')"
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.strip()


def report(samples: dict[str, list[float]], date: str) -> tuple[str, bool]:
    """The page, and whether every limit is kept."""
    empty = statistics.median(samples[EMPTY])
    rows, kept = [], True
    for statement, (_, limit) in IMPORTS.items():
        times = samples[statement]
        # The cost of the import is what the interpreter takes longer than an empty one of the same round.
        extra = statistics.median(took - base for took, base in zip(times, samples[EMPTY], strict=True))
        frameworks = loaded_frameworks(statement)
        kept &= extra < limit and frameworks == "none"
        cells = [
            f"`{statement}`",
            f"{statistics.median(times):.1f}",
            f"{min(times):.1f}",
            f"{extra:.1f}",
            f"< {limit:.0f}",
        ]
        rows.append(f"| {' | '.join([*cells, frameworks])} |")
    versions = ", ".join(f"{name} {version(name)}" for name, _ in IMPORTS.values())
    lines = [
        f"# Import times, {date}",
        "",
        f"Command: `python benchmarks/imports/run.py --repeats {len(samples[EMPTY])}` (`nox -s bench -- imports`)",
        "",
        f"{versions}; Python {platform.python_version()}, {platform.system()} {platform.machine()}.",
        "",
        f"Milliseconds; {len(samples[EMPTY])} fresh interpreters of each, in turns; an empty one takes {empty:.1f}. "
        "*Import* is the median difference from the empty interpreter of the same round.",
        "",
        "| program | median | least | import | limit | frameworks loaded |",
        "|---|---:|---:|---:|---:|---|",
        *rows,
        "",
    ]
    return "\n".join(lines), kept


if __name__ == "__main__":
    sys.exit(main())
