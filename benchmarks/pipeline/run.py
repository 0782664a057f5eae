"""hp-pipeline measured beside torch.distributed.pipelining: time, what can be counted, predicted bubbles, building.

Both take turns within one run, on ranks of one thread each over gloo. A full run writes a dated page to `results/`; what is
written by hand at its end stays when the page is written again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# In place of this file's folder, whose modules are only meant as parts of the package `benchmarks.pipeline`.
sys.path[0] = str(ROOT)

from benchmarks.pipeline import building, counts, predicted, speed  # noqa: E402
from benchmarks.report import Section, command  # noqa: E402

TABLES: dict[str, Callable[[int], Section]] = {
    "speed": speed.section,
    "counts": counts.section,
    "predicted": predicted.section,
    "building": building.section,
}

main = command(
    "hp-pipeline beside torch.distributed.pipelining",
    Path(__file__).parent,
    TABLES,
    ("hp-pipeline", "hp-core", "torch"),
    lambda rounds: (
        f"{rounds} rounds; {' and '.join(map(str, speed.RANKS))} ranks on one machine over gloo, one thread, float32."
    ),
    help=__doc__,
    repeats=8,
)

if __name__ == "__main__":
    main()
