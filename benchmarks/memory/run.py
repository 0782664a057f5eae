"""What each remedy against running out of memory is worth: bytes of tensors alive when most are, by what they are.

Counted, not sampled: the numbers are the same in every run. A full run writes a dated page to `results/`; the guide's page
"Running out of memory" shows its table.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# In place of this file's folder, whose modules are only meant as parts of the package `benchmarks.memory`.
sys.path[0] = str(ROOT)

from benchmarks.memory.remedies import LAYERS, REMEDIES, ROWS, WIDTH, measure  # noqa: E402
from benchmarks.report import Section, command, table  # noqa: E402
from hp_core.testing import run_ranks  # noqa: E402

MEGABYTE = 1e6
COLUMNS = ("parameters", "gradients", "optimizer states", "gathered parameters", "gradient buffers")


def section(_: int) -> Section:
    """Measure all remedies; of several ranks the one that needs most is told."""
    rows = []
    for remedy in REMEDIES:
        found = run_ranks(remedy.ranks, measure, remedy, timeout=300.0)
        rank, most = max(enumerate(found), key=lambda item: item[1]["all"])
        known = [most.get(column, 0) for column in COLUMNS]
        rest = most["all"] - sum(known) - most.get("batch", 0)
        sizes = [f"{size / MEGABYTE:.1f}" for size in (most["all"], *known, rest)]
        rows.append((remedy.name, f"{remedy.ranks}", f"{rank}", *sizes))
    head = ("", "ranks", "fullest", "all", *COLUMNS, "activations and temporaries")
    lines = [
        f"{LAYERS} blocks of width {WIDTH}, {ROWS} rows on each rank (of a pipeline: in all), AdamW, float32; megabytes on the "
        "rank that needs most.",
        "",
        *table(head, rows),
    ]
    return Section("Most bytes alive in a step", tuple(lines))


main = command(
    "Remedies against running out of memory",
    Path(__file__).parent,
    {"remedies": section},
    ("hp-core", "hp-fsdp", "hp-pipeline", "torch"),
    lambda _: "ranks on one machine over gloo, one thread.",
    help=__doc__,
    repeats=1,
)

if __name__ == "__main__":
    main()
