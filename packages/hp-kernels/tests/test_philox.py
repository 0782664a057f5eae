"""The native Philox is hp_core's portable one, bit for bit: any part of the global tensor, any element type, any number of threads.

The portable one, which has tests against the paper's known answers, is the definition.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_core.platform.torch.tensors import TorchTensorTools
from hp_core.random.philox import UNIFORM_BITS, global_indices, normal_from_words, philox_words, uniform_from_words
from hp_kernels import KernelArgumentError, fill_random
from hp_kernels.loading import require_native
from hp_kernels.memory import array
from hp_kernels.philox import philox_fill

OPS = TorchTensorTools("cpu")
DTYPES = [getattr(torch, name) for name in UNIFORM_BITS]
Box = list[tuple[int, int]]
PIECE = 1 << 15


def portable(index: torch.Tensor, seed: int, offset: int, kind: str, dtype: torch.dtype) -> torch.Tensor:
    words = philox_words(index, seed, offset)
    if kind == "keep":
        return uniform_from_words(words, "float32", OPS).float() >= 0.3
    if kind == "uniform":
        return uniform_from_words(words, str(dtype).removeprefix("torch."), OPS).to(dtype)
    numbers = normal_from_words(words, OPS)
    return numbers.float().to(dtype) if dtype.itemsize == 2 else numbers.to(dtype)


def native_and_portable(
    shape: tuple[int, ...], box: Box, kind: str, dtype: torch.dtype, seed: int, offset: int
) -> tuple[torch.Tensor, torch.Tensor]:
    index = global_indices(box, shape, lambda low, high: torch.arange(low, high))
    filled = torch.empty(index.shape, dtype=dtype)
    fill_random(filled, kind, shape, box, seed, offset, 0.3)
    return filled, portable(index, seed, offset, kind, dtype)


@st.composite
def parts(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=5)))
    cuts = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return shape, [(low, high) for low, high in cuts]


@settings(deadline=None, max_examples=60)
@given(parts(), st.sampled_from(DTYPES), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_any_part_of_any_tensor(part: tuple[tuple[int, ...], Box], dtype: torch.dtype, seed: int, offset: int) -> None:
    for kind in ("uniform", "normal"):
        filled, expected = native_and_portable(*part, kind, dtype, seed, offset)
        assert torch.equal(filled, expected)
    filled, expected = native_and_portable(*part, "keep", torch.bool, seed, offset)
    assert torch.equal(filled, expected)


@pytest.mark.parametrize(
    ("shape", "box"),
    [
        ((1 << 31, 1 << 30, 3), [(1 << 30, (1 << 30) + 2), ((1 << 30) - 300, 1 << 30), (1, 3)]),
        ((1 << 33,), [((1 << 32) - 500, (1 << 32) + 500)]),
        ((4, 1, 5000), [(1, 3), (0, 1), (0, 5000)]),
    ],
    ids=["indices near the end of int64", "across a word's end", "rows longer than a block"],
)
def test_large_indices(shape: tuple[int, ...], box: Box) -> None:
    for kind in ("uniform", "normal"):
        filled, expected = native_and_portable(shape, box, kind, torch.float32, 5, 1)
        assert torch.equal(filled, expected)


def test_ten_million_numbers() -> None:
    total = 10_000_000
    require_native().set_thread_count(3)
    filled = {kind: torch.empty(total) for kind in ("uniform", "normal")}
    for kind, numbers in filled.items():
        fill_random(numbers, kind, (total,), [(0, total)], seed=2026, offset=7)
    for start in range(0, total, PIECE):
        words = philox_words(torch.arange(start, min(start + PIECE, total)), 2026, 7)
        stop = start + PIECE
        assert torch.equal(filled["uniform"][start:stop], uniform_from_words(words, "float32", OPS).float())
        assert torch.equal(filled["normal"][start:stop], normal_from_words(words, OPS).float())


@pytest.mark.parametrize("threads", [1, 2, 5, 16])
def test_any_number_of_threads(threads: int) -> None:
    numbers = torch.empty(300, 1001)
    fill_random(numbers, "normal", (400, 1001), [(50, 350), (0, 1001)], seed=3, offset=4)
    require_native().set_thread_count(threads)
    again = torch.empty_like(numbers)
    fill_random(again, "normal", (400, 1001), [(50, 350), (0, 1001)], seed=3, offset=4)
    assert torch.equal(numbers, again)


def counter_of(words: list[int], key: list[int]) -> tuple[int, int]:
    """Index and offset whose words these are: the ten rounds backwards, which Philox, a bijection, allows."""
    w0, w1, w2, w3 = words
    keys = [[(key[0] + i * 0x9E3779B9) % 2**32, (key[1] + i * 0xBB67AE85) % 2**32] for i in range(10)]
    for key0, key1 in reversed(keys):
        before0, before2 = w3 * pow(0xD2511F53, -1, 2**32) % 2**32, w1 * pow(0xCD9E8D57, -1, 2**32) % 2**32
        product0, product1 = before0 * 0xD2511F53, before2 * 0xCD9E8D57
        w0, w1, w2, w3 = before0, w0 ^ (product1 >> 32) ^ key0, before2, w2 ^ (product0 >> 32) ^ key1
    return w1 << 32 | w0, w3 << 32 | w2


@pytest.mark.parametrize("second", [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
@pytest.mark.parametrize("first", [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF])
def test_extreme_words(first: int, second: int) -> None:
    """The ends of the logarithm (n = 1 and 2^53) and of the cosine, which no seed meets by chance."""
    end = 0xFFFFFFFF if first >> 31 else 0
    for third in range(first, first + 64):  # until the counter is an index that a tensor may have
        index, offset = counter_of([first, end, third % 2**32, second], [11, 13])
        if index < 2**63 - 1:
            break
    for kind in ("uniform", "normal"):
        filled, expected = native_and_portable(
            (2**63 - 1,), [(index, index + 1)], kind, torch.float64, 13 << 32 | 11, offset
        )
        assert torch.equal(filled, expected)
        if kind == "uniform":
            top = (first << 32 | end) >> 11
            assert filled.item() == top * 2.0**-53


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool])
def test_the_twin_gives_the_same_bits(dtype: torch.dtype, portable_kernels: object) -> None:
    for kind in ("keep",) if dtype == torch.bool else ("uniform", "normal"):
        twins, expected = native_and_portable(
            (1 << 20, 70, 3), [(99, 101), (3, 60), (0, 3)], kind, dtype, 2**64 - 9, 2**63
        )
        assert torch.equal(twins, expected)


def test_opcheck() -> None:
    arguments = (torch.empty(3, 4), "normal", [8, 4], [2, 0], [5, 4], 1, 2, 0.0)
    torch.library.opcheck(torch.ops.hp_kernels.philox_fill, arguments)


BAD = {
    "a box beyond the shape": {"box": [(0, 3), (2, 6)]},
    "a box of fewer dims": {"box": [(0, 3)]},
    "another number of elements": {"out": torch.empty(3, 4)},
    "memory that isn't dense": {"out": torch.empty(5, 3).t()},
    "integers": {"out": torch.empty(3, 5, dtype=torch.int64)},
    "a probability above 1": {"out": torch.empty(3, 5, dtype=torch.bool), "kind": "keep", "p": 1.5},
    "no probability": {"out": torch.empty(3, 5, dtype=torch.bool), "kind": "keep", "p": float("nan")},
    "an unknown kind": {"kind": "poisson"},
    "a shape of more than 2^63 elements": {"shape": (3, 1 << 62), "box": [(0, 3), (0, 5)]},
}


@pytest.mark.parametrize("kernels", ["native", "portable"])
@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str, kernels: str, request: pytest.FixtureRequest) -> None:
    if kernels == "portable":
        request.getfixturevalue("portable_kernels")
    call = {"out": torch.empty(3, 5), "kind": "uniform", "shape": (3, 5), "box": [(0, 3), (0, 5)], "p": 0.5} | BAD[name]
    with pytest.raises(KernelArgumentError):
        fill_random(call["out"], call["kind"], call["shape"], call["box"], 0, 0, call["p"])


def test_memory_is_checked_at_the_boundary_too() -> None:
    numbers = torch.empty(15)
    address = numbers.data_ptr()
    for name, out in {
        "needs 60 bytes": array(address, 59, "float32", (15,)),
        "null": array(0, 60, "float32", (15,)),
        "isn't a multiple": array(address + 2, 60, "float32", (15,)),
        "past the end": array(2**64 - 56, 60, "float32", (15,)),
        "negative size": array(address, 60, "float32", (-3, -5)),
        "more than 64 bits": array(address, 60, "float32", (1 << 40, 1 << 40)),
    }.items():
        with pytest.raises(KernelArgumentError, match=name):
            philox_fill("uniform", out, (3, 5), [(0, 3), (0, 5)], 0, 0)
    with pytest.raises(KernelArgumentError, match="no part of dim 1"):
        philox_fill("uniform", array(address, 60, "float32", (15,)), (3, 5), [(0, 3), (1, 6)], 0, 0)
    for wrong in [
        (address, 60, 99, (15,)),
        (address, 60, 0),
        ("x", 60, 0, (15,)),
        (address, 60, 0, ("a",)),
        (-1, 60, 0, (15,)),
    ]:
        with pytest.raises(KernelArgumentError):
            philox_fill("uniform", wrong, (3, 5), [(0, 3), (0, 5)], 0, 0)  # type: ignore[arg-type]
