"""Permutation of tokens by expert beside its twins of torch's ops, and beside a plain copy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.core.sampling import take_turns
from benchmarks.kernels.lse_merge import copy_of, of_design, reuse_memory
from benchmarks.report import Section, table
from hp_kernels import moe_permute, moe_unpermute
from hp_kernels.platform.torch.permute import combine_backward_twin, combine_twin, dispatch_twin, sort_twin

__all__ = ["section"]

TOKENS, DIM, EXPERTS = 4096, 2048, 32
CASES = ((torch.float32, 2), (torch.bfloat16, 2), (torch.bfloat16, 6))


def section(repeats: int) -> Section:
    """Measure, and tell of it."""
    reuse_memory()
    rows, aims = [], []
    for dtype, top_k in CASES:
        name = f"{str(dtype).removeprefix('torch.')}, top {top_k}"
        for what, moved, native, twin in cases(dtype, top_k):
            samples = take_turns({"native": native, "twin": twin, "copy": copy_of(moved)}, repeats, 1)
            faster, share = samples.paired_ratio("twin", "native"), 100 * samples.paired_ratio("copy", "native")
            times = (f"{1e3 * samples.median(each):.2f}" for each in ("native", "twin", "copy"))
            rows.append((what, name, *times, f"{faster:.1f}x", f"{share:.0f} %"))
            aims += of_design(f"{what}, {name}", faster, share)
    lines = [
        f"{TOKENS} tokens of {DIM}, {EXPERTS} experts, milliseconds. permute sorts and copies; its gradient is a sum without "
        "weights; unpermute is the weighted sum; its gradient writes the rows' gradients and multiplies all rows for the weights'.",
        "",
        *table(("", "", "native", "twin", "copy", "twin / native", "of copy speed"), rows, left=2),
    ]
    return Section("Permutation of tokens by expert", tuple(lines), tuple(aims))


def cases(dtype: torch.dtype, top_k: int) -> list[tuple[str, int, Callable[[], object], Callable[[], object]]]:
    """What is measured: name, bytes read and written, the native call, the twin's."""
    tokens = torch.randn(TOKENS, DIM).to(dtype)
    experts = torch.rand(TOKENS, EXPERTS).topk(top_k, -1).indices
    permuted, rows, _, _ = moe_permute(tokens, experts, EXPERTS)
    weights = torch.rand(TOKENS, top_k)
    size = tokens.nbytes

    def twin_permute() -> torch.Tensor:
        return dispatch_twin(tokens, sort_twin(experts, EXPERTS)[0])

    return [
        ("permute", (1 + top_k) * size, lambda: moe_permute(tokens, experts, EXPERTS), twin_permute),
        (
            "permute, backward",
            (1 + top_k) * size,
            lambda: moe_unpermute(permuted, rows),
            lambda: combine_twin(permuted, rows, None),
        ),
        (
            "unpermute",
            (1 + top_k) * size,
            lambda: moe_unpermute(permuted, rows, weights),
            lambda: combine_twin(permuted, rows, weights),
        ),
        (
            "unpermute, backward",
            (1 + 2 * top_k) * size,
            lambda: torch.ops.hp_kernels.moe_combine_backward(tokens, permuted, rows, weights),
            lambda: combine_backward_twin(tokens, permuted, rows, weights),
        ),
    ]
