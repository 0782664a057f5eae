"""Most bytes alive in a step, by what they are; and what the processes really took, transport included."""

from __future__ import annotations

import resource
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.fsdp.contenders import NAMES, OURS, TORCH, contender
from benchmarks.fsdp.speed import BATCH, LAYERS, RANKS, WIDTH
from benchmarks.report import Section, at_most, table
from hp_core.platform.torch.storages import StorageTracker
from hp_core.testing import close_ranks, run_ranks

__all__ = ["section"]

LABELS = ("shards", "optimizer", "gradients of shards", "gathered", "gradient buffers", "activations and temporaries")
MEGABYTE = 1e6


def section(_: int) -> Section:
    """Measure, and tell of it."""
    rows, resident, aims = [], [], []
    for ranks in RANKS:
        peaks = {}
        for name in NAMES:
            close_ranks()  # what a process took it never gives back: a fresh one for each
            found = run_ranks(ranks, measure, name, timeout=600.0)[0]
            peaks[name] = found
            rows.append(
                (
                    f"{ranks}",
                    name,
                    f"{found['peak'] / MEGABYTE:.1f}",
                    *(f"{found['at_peak'].get(label, 0) / MEGABYTE:.1f}" for label in LABELS),
                )
            )
            resident.append((f"{ranks}", name, f"{found['resident'] / MEGABYTE:.0f}"))
        aims.append(
            at_most(
                f"most live bytes in a step, {ranks} ranks, over FSDP2", peaks[OURS]["peak"] / peaks[TORCH]["peak"], 0.9
            )
        )
        aims.append(
            at_most(
                f"growth of the process' memory, {ranks} ranks, over FSDP2",
                peaks[OURS]["resident"] / peaks[TORCH]["resident"],
                0.9,
            )
        )
    close_ranks()
    lines = [
        "Most bytes of tensors alive at a time on rank 0 in a step with AdamW, in megabytes, counted by a storage tracker (buffers "
        "inside of the transport don't show). Of FSDP2 it knows shards and states by name; gathered parameters and gradients are "
        "among its temporaries.",
        "",
        *table(("ranks", "", "most", *LABELS), rows, left=2),
        "",
        "By how much the process' resident memory grew from before the model was made, at most, in megabytes: this has the "
        "buffers of the transport in it, too.",
        "",
        *table(("ranks", "", "growth"), resident, left=2),
    ]
    return Section("Memory", tuple(lines), tuple(aims))


def measure(name: str, width: int = WIDTH, layers: int = LAYERS) -> dict[str, Any]:
    """On a fresh rank: three steps for the resident memory, then one under the tracker."""
    torch.set_num_threads(1)
    before = _resident()
    one = contender(name, width, layers)
    x = torch.randn(BATCH, width)
    for _ in range(3):
        dist.barrier()
        one.step(x)
    grown = _resident() - before
    states = [value for state in one.optimizer.state.values() for value in state.values()]
    tracker = StorageTracker(
        {
            "shards": [_local(parameter) for parameter in one.model.parameters()],
            "optimizer": [_local(value) for value in states if isinstance(value, torch.Tensor)],
        }
    )
    if name != TORCH:
        from hp_fsdp.hsdp_module import units_below

        segments = [segment for unit in units_below(one.model) for segment in unit.segments]
        tracker.label("gathered", [segment.buffer for segment in segments])
        tracker.label("gradient buffers", [segment.gradients for segment in segments])
    with tracker:
        one.step(x)
    return {"peak": tracker.peak, "at_peak": tracker.at_peak, "resident": grown}


def _local(tensor: Any) -> torch.Tensor:
    return getattr(tensor, "_local", None) if hasattr(tensor, "_local") else getattr(tensor, "_local_tensor", tensor)  # type: ignore[return-value]


def _resident() -> int:
    """Most bytes that the process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
