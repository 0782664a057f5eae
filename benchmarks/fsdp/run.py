"""hp-fsdp measured beside torch's FSDP2: time, memory, and what can be counted.

All contenders take turns within one run, on ranks of one thread each over gloo. A full run writes a dated page to `results/`;
what is written by hand at its end stays when the page is written again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# In place of this file's folder, whose modules are only meant as parts of the package `benchmarks.fsdp`.
sys.path[0] = str(ROOT)

from benchmarks.fsdp import counts, memory, speed  # noqa: E402
from benchmarks.report import Section, command  # noqa: E402

DISTRIBUTIONS = ("hp-fsdp", "hp-core", "torch")

TABLES: dict[str, Callable[[int], Section]] = {
    "speed": speed.section,
    "memory": memory.section,
    "counts": counts.section,
}

main = command(
    "hp-fsdp beside torch's FSDP2",
    Path(__file__).parent,
    TABLES,
    DISTRIBUTIONS,
    lambda rounds: (
        f"{rounds} rounds; {' and '.join(map(str, speed.RANKS))} ranks on one machine over gloo, one thread, float32."
    ),
    help=__doc__,
    repeats=25,
)

if __name__ == "__main__":
    main()
