"""What can be counted exactly: collectives, bytes copied around them, calls of Python; and that the training is right."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.core.sampling import count_calls
from benchmarks.fsdp.contenders import DENSE, NAMES, OURS, TORCH, contender
from benchmarks.fsdp.speed import BATCH, LAYERS, RANKS, WIDTH
from benchmarks.report import Aim, Section, at_most, table
from hp_core.testing import record_collectives, run_ranks

__all__ = ["section"]

COPIES = (
    "copy_",
    "_foreach_copy_",
    "split_with_sizes_copy",
    "cat",
    "clone",
    "_chunk_cat",
    "_to_copy",
    "constant_pad_nd",
)
STEPS = 10


def section(_: int) -> Section:
    """Measure, and tell of it."""
    rows, aims, collectives = [], [], []
    for ranks in RANKS:
        found = run_ranks(ranks, measure, timeout=600.0)[0]
        for name in NAMES:
            one = found[name]
            rows.append(
                (
                    f"{ranks}",
                    name,
                    f"{one['copied'] / 1e6:.1f}",
                    f"{one['python'] / LAYERS:.0f}",
                    f"{one['native'] / LAYERS:.0f}",
                    f"{one['error']:.1e}",
                )
            )
        ours = found[OURS]
        collectives.append((f"{ranks}", str(ours["all_gather"]), str(ours["reduce_scatter"]), ours["summary"]))
        aims += [
            at_most(f"bytes copied around collectives, {ranks} ranks", ours["copied"] / 1e6, 0.0, " MB"),
            Aim(
                f"all-gathers, {ranks} ranks",
                f"{2 * LAYERS - 1}",
                str(ours["all_gather"]),
                ours["all_gather"] == 2 * LAYERS - 1,
            ),
            Aim(
                f"reduce-scatters, {ranks} ranks",
                f"{LAYERS}",
                str(ours["reduce_scatter"]),
                ours["reduce_scatter"] == LAYERS,
            ),
            at_most(f"Python calls per unit and step, {ranks} ranks", ours["python"] / LAYERS, 300, ""),
        ]
    lines = [
        "Copied: megabytes written by copying ops in a forward and backward, without each gather's own chunk, which the "
        "collective itself puts in its place. Calls: of functions written in Python, and of native ones from Python, per block in "
        "a forward and backward. "
        f"Error: largest difference of a parameter after {STEPS} steps from the dense run, in float64.",
        "",
        *table(("ranks", "", "copied", "Python calls", "native calls", "error"), rows, left=2),
        "",
        "Collectives of hp-fsdp in a step:",
        "",
        *table(("ranks", "all-gathers", "reduce-scatters", "record"), collectives, left=4),
    ]
    return Section("Counts", tuple(lines), tuple(aims))


class _Copies(TorchDispatchMode):
    """Counts the bytes that copying ops write."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in COPIES:
            written = args[0] if function.overloadpacket.__name__.endswith("copy_") else result
            if function.overloadpacket.__name__ == "split_with_sizes_copy":
                written = (kwargs or {}).get("out", result)
            if function.overloadpacket.__name__ == "_chunk_cat":
                written = (kwargs or {}).get("out", result)
            for tensor in written if isinstance(written, (list, tuple)) else [written]:
                self.nbytes += tensor.nbytes
        return result


def measure(width: int = WIDTH, layers: int = LAYERS) -> dict[str, dict[str, Any]]:
    """On a rank: each contender by itself."""
    torch.set_num_threads(1)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    results: dict[str, dict[str, Any]] = {}
    for name in NAMES:
        one = contender(name, width, layers)
        x = torch.randn(BATCH, width)
        one.step(x)
        one.step(x)
        with record_collectives() as log:
            one.differentiate(x)
        one.update()
        gathers = [record for record in log if record.kind == "all_gather"]
        with _Copies() as copies:
            one.differentiate(x)
        one.update()
        own = sum(record.nbytes // (record.group_size - 1) for record in gathers) if name != TORCH else 0
        calls = count_calls(lambda one=one, x=x: one.differentiate(x), warm=1)  # type: ignore[misc]
        results[name] = {
            "all_gather": len(gathers),
            "reduce_scatter": sum(record.kind == "reduce_scatter" for record in log),
            "summary": log.summary().replace("\n", "; "),
            "copied": copies.nbytes - own,
            "python": calls.python,
            "native": calls.native,
            "error": _error(name, ranks, rank),
        }
    return results


def _error(name: str, ranks: int, rank: int) -> float:
    """Largest difference of a parameter after some steps from the dense run of all ranks' rows."""
    width, layers = 32, 3
    sharded, dense = (contender(one, width, layers, torch.float64) for one in (name, DENSE))
    for step in range(STEPS):
        rows = torch.randn(ranks * 4, width, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        sharded.step(rows[4 * rank : 4 * rank + 4])
        dense.step(rows)
    pairs = zip(sharded.model.parameters(), dense.model.parameters(), strict=True)
    return max(float((one.detach().full_tensor() - other.detach()).abs().max()) for one, other in pairs)  # type: ignore[attr-defined]
