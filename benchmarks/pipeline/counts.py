"""What can be counted exactly: messages, bytes, copies and calls of Python; and that both train alike."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.core.sampling import count_calls
from benchmarks.pipeline.contenders import OURS, SHARED, TORCH, Size, contender
from benchmarks.pipeline.speed import RANKS, SIZE
from benchmarks.report import Section, at_most, table
from hp_core.testing import run_ranks
from hp_pipeline import build_order, overlap_communication

__all__ = ["section"]

COPIES = ("copy_", "cat", "clone", "_to_copy", "stack", "constant_pad_nd")
TINY = Size(width=8, rows=3)
Found = dict[str, dict[str, Any]]


def section(_: int) -> Section:
    """Measure, and tell of it."""
    rows, aims = [], []
    for ranks in RANKS:
        found = run_ranks(ranks, measure, timeout=600.0)
        for order in SHARED:
            scheduled = overlap_communication(build_order(order, ranks, SIZE.micro_batches))
            steps = max(map(len, scheduled.steps))
            difference = max(of_rank[order]["difference"] for of_rank in found)
            calls = {}
            for name in (OURS, TORCH):
                of_all = [of_rank[order][name] for of_rank in found]
                calls[name] = max(one["python"] for one in of_all)
                rows.append(
                    (
                        f"{ranks}",
                        order,
                        name,
                        str(sum(one["messages"] for one in of_all)),
                        *(f"{sum(one[what] for one in of_all) / 1e6:.2f}" for what in ("sent", "copied")),
                        str(calls[name]),
                        f"{calls[name] / steps:.0f}",
                        f"{difference:.1e}" if name == OURS else "",
                    )
                )
            aims.append(
                at_most(f"Python calls of a step, {order}, {ranks} ranks, over torch", calls[OURS] / calls[TORCH], 1.0)
            )
    lines = [
        "Of a step in the steady state. Messages: sends of all ranks. Sent: megabytes in them. Copied: megabytes written by "
        "copying ops, of all ranks. Calls: of functions written in Python, the modules' own included, on the rank with the most; "
        "and for each entry of that rank's schedule. Difference: of a gradient from torch's, at most, over the largest gradient, "
        "in float64 on a small model.",
        "",
        *table(
            ("ranks", "schedule", "", "messages", "sent", "copied", "Python calls", "per entry", "difference"),
            rows,
            left=3,
        ),
    ]
    return Section("Counts", tuple(lines), tuple(aims))


class _Traffic(TorchDispatchMode):
    """Counts sends, and the bytes that sends and copying ops move."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = self.sent = self.copied = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if function.namespace == "c10d" and name == "send":
            self.messages += 1
            self.sent += sum(tensor.nbytes for tensor in args[0])
        elif name in COPIES:
            self.copied += (args[0] if name == "copy_" else result).nbytes
        return result


def measure(size: Size = SIZE) -> Found:
    """On a rank: each contender by itself, for each schedule."""
    torch.set_num_threads(1)
    found: Found = {}
    for order in SHARED:
        found[order] = {"difference": _difference(order)}
        for name in (OURS, TORCH):
            one = contender(name, order, size)
            one.step()
            one.step()
            with _Traffic() as traffic:
                one.step()
            calls = count_calls(one.step, warm=0)
            found[order][name] = {
                "messages": traffic.messages,
                "sent": traffic.sent,
                "copied": traffic.copied,
                "python": calls.python,
                "native": calls.native,
            }
    return found


def _difference(order: str) -> float:
    """Largest difference of a gradient from torch's, over the largest gradient."""
    contenders = [contender(name, order, TINY, torch.float64) for name in (OURS, TORCH)]
    for one in contenders:
        one.step()
    ours, theirs = (one.gradients() for one in contenders)
    assert ours.keys() == theirs.keys()
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    return max(float((gradient - theirs[key]).abs().max()) for key, gradient in ours.items()) / largest
