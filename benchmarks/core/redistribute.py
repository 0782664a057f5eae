"""A redistribution that is planned already, beside the bare collective that it needs and beside torch's DTensor.

The bare collective is torch.distributed's, once into memory that exists and once, as a DTensor needs it, into new memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_tensor

from benchmarks.core.overhead import OURS, RANKS, TORCH, local, wrappers
from benchmarks.core.sampling import Samples, take_turns
from benchmarks.report import Section, at_most, table
from hp_core import Partial, Placement, Replicate, Shard
from hp_core.testing import run_ranks

__all__ = ["section"]

SIZE = 64
CALLS = 20
REUSED, FRESH = "bare, output reused", "bare, new output"
PLACEMENTS: dict[str, Placement] = {"R": Replicate(), "P": Partial(), "S0": Shard(0), "S1": Shard(1)}
TORCH_PLACEMENTS = {
    "R": torch_tensor.Replicate(),
    "P": torch_tensor.Partial(),
    "S0": torch_tensor.Shard(0),
    "S1": torch_tensor.Shard(1),
}
TRANSITIONS = (("S0", "R"), ("R", "S0"), ("P", "R"), ("P", "S0"), ("S0", "S1"))
Call = Callable[[], object]


def section(rounds: int) -> Section:
    """Measure, and tell of it."""
    rows, aims = [], []
    measured = zip(*run_ranks(RANKS, measure, rounds, timeout=600.0), strict=True)
    for (src, dst), ranks in zip(TRANSITIONS, measured, strict=True):
        samples = Samples.slowest(ranks)
        for name in samples.rounds:
            cells = [samples.both_ratios(name, base) if base in samples.rounds else "" for base in (REUSED, FRESH)]
            rows.append((f"{src} -> {dst}", name, f"{1e6 * samples.median(name):.1f}", *cells))
        if (src, dst) == ("S0", "R"):
            for base in (REUSED, FRESH):
                aims.append(at_most(f"cached redistribute S0 -> R over {base}", samples.paired_ratio(OURS, base), 1.15))
    lines = [
        f"[{SIZE}, {SIZE}] float32 over {RANKS} ranks (gloo), nothing wants a gradient; the slower rank of each round. Ratios: of "
        "medians / median over rounds. R -> S0 is a local copy; the bare all-to-all includes packing and unpacking.",
        "",
        *table(("transition", "code", "us", f"x {REUSED}", f"x {FRESH}"), rows, left=2),
    ]
    return Section("Cached redistribute", tuple(lines), tuple(aims))


def measure(rounds: int) -> list[Samples]:
    """On a rank: for each transition check that all give the same, then time them."""
    results = []
    for src, dst in TRANSITIONS:
        contenders = _contenders(src, dst)
        expected = contenders[FRESH]()
        for name, call in contenders.items():
            if not torch.equal(local(call()), expected):
                raise AssertionError(f"{src} -> {dst} by {name} differs from the bare collective")
        results.append(take_turns(contenders, rounds, CALLS, meet=dist.barrier))
    return results


def _contenders(src: str, dst: str) -> dict[str, Callable[[], Any]]:
    shape = {"S0": (SIZE // RANKS, SIZE), "S1": (SIZE, SIZE // RANKS)}.get(src, (SIZE, SIZE))
    # small whole numbers, so that sums are exact in any order; replicas are equal on all ranks
    seed = torch.Generator().manual_seed(0 if src == "R" else dist.get_rank())
    source = torch.randint(-8, 8, shape, generator=seed).float()
    wraps = wrappers()
    ours, theirs = wraps[OURS](source, src), wraps[TORCH](source, src)
    mesh, target = ours.device_mesh, [PLACEMENTS[dst]]
    native, native_target = theirs.device_mesh, [TORCH_PLACEMENTS[dst]]

    def by_torch() -> Any:
        result = theirs.redistribute(native, native_target)
        # torch hands out a collective that may still run
        return result._local_tensor.wait() if hasattr(result._local_tensor, "wait") else result

    return {
        **_bare(src, dst, source),
        OURS: lambda: ours.redistribute(mesh, target),
        TORCH: by_torch,
    }


def _bare(src: str, dst: str, source: torch.Tensor) -> dict[str, Call]:
    """The collective alone, into memory that exists (where that makes sense) and into new memory."""
    rank = dist.get_rank()
    rows, columns = SIZE // RANKS, SIZE // RANKS
    if (src, dst) == ("S0", "R"):

        def gather(output: torch.Tensor) -> torch.Tensor:
            dist.all_gather_into_tensor(output, source)
            return output

        return _two(gather, (SIZE, SIZE))
    if (src, dst) == ("R", "S0"):
        own = slice(rank * rows, (rank + 1) * rows)
        return _two(lambda output: output.copy_(source[own]), (rows, SIZE))
    if (src, dst) == ("P", "R"):

        def reduce(output: torch.Tensor) -> torch.Tensor:
            output.copy_(source)
            dist.all_reduce(output)
            return output

        return _two(reduce, (SIZE, SIZE))
    if (src, dst) == ("P", "S0"):

        def reduce_scatter(output: torch.Tensor) -> torch.Tensor:
            dist.reduce_scatter_tensor(output, source)
            return output

        return _two(reduce_scatter, (rows, SIZE))

    def exchange(output: torch.Tensor) -> torch.Tensor:
        packed = source.view(rows, RANKS, columns).transpose(0, 1).contiguous()
        dist.all_to_all_single(output, packed)
        return output.view(SIZE, columns)

    return _two(exchange, (RANKS, rows, columns))


def _two(collective: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...]) -> dict[str, Call]:
    existing = torch.empty(shape)
    return {REUSED: lambda: collective(existing), FRESH: lambda: collective(torch.empty(shape))}
