"""hp-core measured beside its peers: op overhead, redistribution, transitions, a tensor-parallel MLP, imports.

All contenders take turns within one run, on two ranks of one thread each. A full run writes a dated page to `results/`;
what is written by hand at its end (why an aim is missed) stays when the page is written again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# In place of this file's folder, whose modules are only meant as parts of the package `benchmarks.core`.
sys.path[0] = str(ROOT)

from benchmarks.core import mlp, operators, overhead, redistribute, transitions  # noqa: E402
from benchmarks.imports import run as imports  # noqa: E402
from benchmarks.report import Section, command  # noqa: E402

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

main = command(
    "hp-core beside its peers",
    Path(__file__).parent,
    TABLES,
    DISTRIBUTIONS,
    lambda rounds: f"{rounds} rounds; {overhead.RANKS} ranks on one machine over gloo, one thread each, float32.",
    help=__doc__,
    repeats=80,
)

if __name__ == "__main__":
    main()
