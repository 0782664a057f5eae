"""The loops for every instruction set that this processor has: the same bits from all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from hp_kernels import KernelArgumentError, cast_into, fill_random, lse_merge, moe_permute, moe_unpermute
from hp_kernels.loading import require_native

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SHORT = (torch.bfloat16, torch.float16)
SPECIAL = (torch.nan, -torch.nan, torch.inf, -torch.inf, -0.0, 1e-40, -1e-40, 6e-8, 65519.9, 65520.0, 3.4e38)


@pytest.fixture(autouse=True)
def _the_best_afterwards() -> Iterator[None]:
    yield
    native = require_native()
    native.set_instruction_set(native.instruction_sets()[-1])


def numbers(*shape: int, dtype: torch.dtype = torch.float32, special: bool = True) -> torch.Tensor:
    """Normal numbers, among them those that conversions treat in a way of their own."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)
    if special:
        some = values.view(-1)[:: max(1, values.numel() // 40)]
        some.copy_(torch.tensor(SPECIAL, dtype=torch.float64).repeat(9)[: some.numel()])
    return values.to(dtype)


def random_numbers() -> Iterator[torch.Tensor]:
    for dtype in DTYPES:
        for kind in ("uniform", "normal"):
            out = torch.empty(1003, dtype=dtype)
            fill_random(out, kind, (1 << 33,), [(1 << 32, (1 << 32) + 1003)], 3, 5)
            yield out
    kept = torch.empty(1003, dtype=torch.bool)
    fill_random(kept, "keep", (2000,), [(7, 1010)], 3, 5, p=0.3)
    yield kept


def casts() -> Iterator[torch.Tensor]:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    sources = [numbers(4099, dtype=dtype) for dtype in DTYPES] + [every.view(dtype) for dtype in SHORT]
    for source in sources:
        for dtype in DTYPES:
            target = torch.empty(source.shape, dtype=dtype)
            cast_into([target], [source])
            yield target


def merges() -> Iterator[torch.Tensor]:
    pairs = [(dtype, dtype) for dtype in DTYPES] + [(torch.float32, dtype) for dtype in SHORT]
    for first, second in pairs:
        for dim in (1, 31, 33, 128):
            lse = numbers(2, 1, 3, 5, dtype=torch.float64 if first == torch.float64 else torch.float32, special=False)
            lse[0, 0, 0, :2] = lse[1, 0, 0, 1:3] = -torch.inf
            other = numbers(1, 3, 5, dim, dtype=second).flip(3).contiguous()
            partials = [numbers(1, 3, 5, dim, dtype=first), lse[0], other, lse[1]]
            gradients = numbers(1, 3, 5, dim, dtype=first, special=False), lse[0].clamp(-1, 1)
            yield from lse_merge(*partials, lse_layout="bsh")
            yield from torch.ops.hp_kernels.lse_merge_backward(*gradients, *partials, False)


def permutations() -> Iterator[torch.Tensor]:
    for dtype in DTYPES:
        for top_k, dim in ((1, 1), (2, 37), (3, 64), (6, 130), (7, 2051)):
            tokens = numbers(6, dim, dtype=dtype)
            experts = torch.rand(6, 9, generator=torch.Generator().manual_seed(top_k)).topk(top_k, -1).indices
            permuted, rows, _, _ = moe_permute(tokens, experts, 9)
            weights = numbers(6, top_k, dtype=torch.float64 if dtype == torch.float64 else torch.float32, special=False)
            yield permuted
            yield moe_unpermute(permuted, rows)
            yield moe_unpermute(permuted, rows, weights)
            yield from torch.ops.hp_kernels.moe_combine_backward(tokens, permuted, rows, weights)
    # Enough for rows that are written past the caches.
    tokens = numbers(600, 4096, dtype=torch.bfloat16)
    permuted, rows, _, _ = moe_permute(tokens, torch.arange(1200).view(600, 2) % 7, 7)
    yield permuted
    yield from torch.ops.hp_kernels.moe_combine_backward(tokens, permuted, rows, torch.full((600, 2), 0.3))


@pytest.mark.parametrize("kernel", [random_numbers, casts, merges, permutations])
def test_every_instruction_set_gives_the_same_bits(kernel: Callable[[], Iterator[torch.Tensor]]) -> None:
    native = require_native()
    *others, best = native.instruction_sets()
    native.set_instruction_set(best)
    expected = [as_bits(result) for result in kernel()]
    assert expected
    for other in others:
        native.set_instruction_set(other)
        for index, (result, by_best) in enumerate(zip(kernel(), expected, strict=True)):
            assert torch.equal(as_bits(result), by_best), f"{kernel.__name__}, result {index}: {other} and {best}"


def as_bits(result: torch.Tensor) -> torch.Tensor:
    """Its bits, with one NaN for all: which of two operands' payloads a sum takes on, nothing says."""
    if not result.is_floating_point():
        return result.clone()
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[result.itemsize]
    return torch.where(result.isnan(), torch.nan, result).to(result.dtype).view(integer)


def test_only_what_the_processor_has_can_be_chosen() -> None:
    native = require_native()
    assert native.build["processor"] == native.instruction_sets()[-1]
    for wrong in ("avx1024", ""):
        with pytest.raises(KernelArgumentError, match="this processor, or this build, has no"):
            native.set_instruction_set(wrong)
