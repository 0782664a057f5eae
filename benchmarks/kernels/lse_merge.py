"""The merge of two attention partials beside its twin of torch's ops, and beside a plain copy of as many bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from benchmarks.core.sampling import take_turns
from benchmarks.report import Aim, Section, at_least, table
from hp_kernels import lse_merge, lse_merge_
from hp_kernels.platform.torch.lse_merging import merge_backward_twin, merge_twin

__all__ = ["copy_of", "of_design", "reuse_memory", "section"]

BATCH, SEQ, HEADS, DIM = 1, 2048, 16, 128
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def section(repeats: int) -> Section:
    """Measure, and tell of it."""
    reuse_memory()
    rows, aims = [], []
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        for what, moved, native, twin in cases(dtype):
            copied = copy_of(moved)
            samples = take_turns({"native": native, "twin": twin, "copy": copied}, repeats, 1)
            faster, share = samples.paired_ratio("twin", "native"), 100 * samples.paired_ratio("copy", "native")
            times = (f"{1e3 * samples.median(each):.2f}" for each in ("native", "twin", "copy"))
            rows.append((what, name, *times, f"{faster:.1f}x", f"{share:.0f} %"))
            if what in ("forward", "backward"):
                aims += of_design(f"lse merge, {what}, {name}", faster, share)
    lines = [
        f"Partials [{BATCH}, {SEQ}, {HEADS}, {DIM}] with lse [{BATCH}, {HEADS}, {SEQ}], milliseconds. The copy reads and writes as "
        "many bytes as the kernel must: two partials in and one out, or the gradient and two partials in and two gradients out. "
        "All contenders make new tensors, in memory that the C library keeps.",
        "",
        *table(("", "dtype", "native", "twin", "copy", "twin / native", "of copy speed"), rows, left=2),
    ]
    return Section("Merge of two attention partials", tuple(lines), tuple(aims))


def cases(
    dtype: torch.dtype,
) -> list[tuple[str, int, Callable[[], object], Callable[[], object]]]:
    """What is measured: name, bytes read and written, the native call, the twin's."""
    out_a, out_b, grad = (torch.randn(BATCH, SEQ, HEADS, DIM).to(dtype) for _ in range(3))
    lse_a, lse_b, grad_lse = (torch.randn(BATCH, HEADS, SEQ) for _ in range(3))
    partials = (out_a, lse_a, out_b, lse_b)
    size = out_a.nbytes

    def twin_in_place() -> None:
        out, lse = merge_twin(*partials, True)
        out_a.copy_(out)
        lse_a.copy_(lse)

    return [
        ("forward", 3 * size, lambda: lse_merge(*partials), lambda: merge_twin(*partials, True)),
        ("in place", 3 * size, lambda: lse_merge_(*partials), twin_in_place),
        (
            "backward",
            5 * size,
            lambda: torch.ops.hp_kernels.lse_merge_backward(grad, grad_lse, *partials, True),
            lambda: merge_backward_twin(grad, grad_lse, *partials, True),
        ),
    ]


def reuse_memory() -> None:
    """Have the C library keep freed memory: else each large result is of new pages, and zeroing them takes longer than the rest."""
    libc = ctypes.CDLL(None)
    mmap_threshold, trim_threshold = -3, -1  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h
    libc.mallopt(mmap_threshold, 1 << 30)
    libc.mallopt(trim_threshold, (1 << 31) - 1)


def copy_of(moved: int) -> Callable[[], object]:
    """A plain copy that reads and writes so many bytes together, into new memory as the kernels do."""
    source = torch.ones(moved // 2, dtype=torch.uint8)
    return source.clone


def of_design(name: str, faster: float, share: float) -> tuple[Aim, Aim]:
    """The two aims of each of these kernels."""
    return at_least(f"{name}: twin / native", faster, 2.0), at_least(f"{name}: of copy speed", share, 60.0, " %")
