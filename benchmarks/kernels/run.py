"""The native kernels measured beside their twins and beside plain copies of as many bytes.

All contenders take turns within one run, in one process, with torch and the kernels on as many threads as OMP_NUM_THREADS says.
A full run writes a dated page to `results/`; what is written by hand at its end stays when the page is written again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# In place of this file's folder, whose modules are only meant as parts of the package `benchmarks.kernels`.
sys.path[0] = str(ROOT)
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.kernels import footprint, lse_merge, packing, permute, philox  # noqa: E402
from benchmarks.report import Section, command  # noqa: E402

DISTRIBUTIONS = ("hp-kernels", "hp-core", "torch")

TABLES: dict[str, Callable[[int], Section]] = {
    "philox": philox.section,
    "lse_merge": lse_merge.section,
    "permute": permute.section,
    "packing": packing.section,
    "footprint": footprint.section,
}


def settings(rounds: int) -> str:
    """What was measured, and by which build."""
    from hp_kernels import build_info

    info = build_info()
    torch_island = info["left_out"].get("torch", "")
    how = f"without the torch island ({torch_island})" if torch_island else "with the torch island"
    return (
        f"{rounds} rounds; {info.get('threads', 0)} thread(s); _native by {info.get('compiler', 'nobody')} for "
        f"{info.get('processor', 'no processor')}, {how}."
    )


main = command(
    "The native kernels beside their twins",
    Path(__file__).parent,
    TABLES,
    DISTRIBUTIONS,
    settings,
    help=__doc__,
    repeats=25,
)

if __name__ == "__main__":
    main()
