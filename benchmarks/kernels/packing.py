"""Packing of many tensors into a flat one, and casts: the native kernel beside torch's own ops and a plain copy."""

from __future__ import annotations

import torch

from benchmarks.core.sampling import take_turns
from benchmarks.report import Section, table
from hp_kernels import pack, pack_into

__all__ = ["section"]

# number of tensors, elements of each
CASES = ((200, 64), (64, 1 << 14), (8, 1 << 19))


def section(repeats: int) -> Section:
    """Measure, and tell of it."""
    rows = []
    for count, numel in CASES:
        tensors = [torch.randn(numel) for _ in range(count)]
        offsets = [index * numel for index in range(count)]
        for dtype in (torch.float32, torch.bfloat16):
            flat = torch.empty(count * numel, dtype=dtype)
            views = [flat[offset : offset + numel] for offset in offsets]
            source = torch.zeros(flat.nbytes + count * numel * 4, dtype=torch.uint8)[
                : (flat.nbytes + count * numel * 4) // 2
            ]
            target = torch.empty_like(source)
            calls = {
                "pack_into": lambda tensors=tensors, flat=flat, offsets=offsets: pack_into(flat, tensors, offsets),
                "foreach": lambda tensors=tensors, views=views: torch._foreach_copy_(views, tensors),
                "pack": lambda tensors=tensors, dtype=dtype: pack(tensors, dtype),
                "cat": lambda tensors=tensors, dtype=dtype: torch.cat([one.to(dtype) for one in tensors]),
                "copy": lambda source=source, target=target: target.copy_(source),
            }
            samples = take_turns(calls, repeats, 1)
            name = f"{count} of {numel} into {str(dtype).removeprefix('torch.')}"
            times = (f"{1e6 * samples.median(each):.0f}" for each in calls)
            ratios = (samples.paired_ratio("foreach", "pack_into"), samples.paired_ratio("cat", "pack"))
            rows.append((name, *times, *(f"{ratio:.2f}x" for ratio in ratios)))
    lines = [
        "float32 tensors, microseconds. *foreach* is `torch._foreach_copy_` into views of the flat tensor that exist already, "
        "*cat* a cast of each tensor and `torch.cat`; *copy* reads and writes as many bytes as packing must.",
        "",
        *table(("", "pack_into", "foreach", "pack", "cat", "copy", "foreach / pack_into", "cat / pack"), rows),
    ]
    return Section("Packing", tuple(lines))
