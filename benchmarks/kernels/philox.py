"""Random numbers by global element index: the native kernel beside hp_core's portable Philox and a plain write of the result."""

from __future__ import annotations

import torch

from benchmarks.core.sampling import take_turns
from benchmarks.report import Aim, Section, at_least, table
from hp_core.platform.torch.tensors import TorchTensorTools
from hp_core.random.philox import normal_from_words, philox_words, uniform_from_words
from hp_kernels import fill_random

__all__ = ["section"]

NUMBERS = 1 << 20
CASES = (
    ("uniform", torch.float32),
    ("normal", torch.float32),
    ("uniform", torch.bfloat16),
    ("normal", torch.bfloat16),
    ("keep", torch.bool),
)
_PIECE = 1 << 15
_OPS = TorchTensorTools("cpu")


def section(repeats: int) -> Section:
    """Measure, and tell of it."""
    rows: list[tuple[str, ...]] = []
    aims: list[Aim] = []
    for kind, dtype in CASES:
        name = f"{kind}, {str(dtype).removeprefix('torch.')}"
        out, twins, source = (torch.empty(NUMBERS, dtype=dtype) for _ in range(3))
        source.zero_()
        calls = {
            "native": lambda out=out, kind=kind: fill_random(out, kind, (NUMBERS,), [(0, NUMBERS)], 1, 2, 0.3),
            "twin": lambda out=twins, kind=kind: portable(out, kind),
            "torch": lambda out=twins, kind=kind: framework(out, kind),
            "copy": lambda out=twins, source=source: out.copy_(source),
        }
        samples = take_turns(calls, repeats, 1)
        faster = samples.paired_ratio("twin", "native")
        times = (f"{1e9 * samples.median(each) / NUMBERS:.2f}" for each in calls)
        rows.append((name, *times, f"{faster:.1f}x"))
        aims.append(at_least(f"Philox, {name}: twin / native", faster, 5.0))
    lines = [
        f"{NUMBERS} numbers, nanoseconds each. *twin* is hp_core's portable Philox, in the pieces in which hp_core fills tensors; "
        "*torch* is torch's own generator (Mersenne Twister), whose numbers depend on the layout; *copy* writes a tensor of the "
        "same size.",
        "",
        *table(("", "native", "twin", "torch", "copy", "twin / native"), rows),
    ]
    return Section("Philox", tuple(lines), tuple(aims))


def portable(out: torch.Tensor, kind: str) -> None:
    """What hp_core does without native kernels."""
    name = "float32" if kind == "keep" else str(out.dtype).removeprefix("torch.")
    for start in range(0, len(out), _PIECE):
        words = philox_words(torch.arange(start, min(start + _PIECE, len(out))), 1, 2)
        if kind == "normal":
            numbers = normal_from_words(words, _OPS)
            out[start : start + _PIECE] = numbers.float() if out.dtype.itemsize == 2 else numbers
        else:
            uniform = uniform_from_words(words, name, _OPS)
            out[start : start + _PIECE] = uniform >= 0.3 if kind == "keep" else uniform


def framework(out: torch.Tensor, kind: str) -> None:
    """The framework's own numbers of the same kind."""
    if kind == "normal":
        out.normal_()
    elif kind == "uniform":
        out.uniform_()
    else:
        out.bernoulli_(0.7)
