"""Philox is the published generator, and a random tensor is a function of the global element index alone.

The format (blocks, uniform, normal) is pinned by known answers, and NumPy plays a second framework that must give the
same bits as torch.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hp_core.random.philox import (
    UNIFORM_BITS,
    Words,
    global_indices,
    normal_from_words,
    philox_words,
    uniform_from_words,
)

# Random123's kat_vectors for philox4x32 with 10 rounds: counter, key, answer.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
# Of elements 0, 1, 2 with seed 2026 and offset 1.
FORMAT_NORMAL = ["-0x1.847518d093e61p-1", "0x1.171b2bde391cap-2", "-0x1.3e342935f0a16p-1"]
FORMAT_UNIFORM = ["0x1.690f44183c881p-1", "0x1.c07d5d1f004d6p-1", "0x1.f801ed979d4d0p-4"]
INT64 = st.integers(-(2**63), 2**63 - 1)


class TorchOps:
    def to_float64(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.float64)

    def sqrt(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.sqrt()


class NumpyOps:
    """NumPy's square root is the processor's, rounded to nearest."""

    def to_float64(self, tensor: np.ndarray) -> np.ndarray:
        return np.asarray(tensor).astype(np.float64)

    def sqrt(self, tensor: np.ndarray) -> np.ndarray:
        return np.asarray(np.sqrt(tensor))


def by_the_paper(counter: list[int], key: list[int]) -> list[int]:
    for _ in range(10):
        product0, product1 = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (product1 >> 32) ^ counter[1] ^ key[0],
            product1 % 2**32,
            (product0 >> 32) ^ counter[3] ^ key[1],
            product0 % 2**32,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


def words_of(*values: int) -> Words:
    first, second, third, fourth = (torch.tensor([value]) for value in values)
    return first, second, third, fourth


def signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, answer: str) -> None:
    low, high, offset_low, offset_high = (int(word, 16) for word in counter.split())
    seed_low, seed_high = (int(word, 16) for word in key.split())
    index = torch.tensor([signed(high << 32 | low)])
    words = philox_words(index, seed_high << 32 | seed_low, offset_high << 32 | offset_low)
    assert [word.item() for word in words] == [int(word, 16) for word in answer.split()]


@given(st.lists(INT64, min_size=1, max_size=5), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_every_element_gets_the_papers_block(index: list[int], seed: int, offset: int) -> None:
    words = torch.stack(philox_words(torch.tensor(index), seed, offset), dim=-1).tolist()
    key = [seed % 2**32, seed >> 32]
    assert words == [by_the_paper([i % 2**32, (i >> 32) % 2**32, offset % 2**32, offset >> 32], key) for i in index]


def test_seeds_and_offsets_count_by_their_low_64_bits() -> None:
    index = torch.arange(3)
    for seed, offset in ((2**64 + 5, 7), (5 - 2**64, 7), (5, 2**64 + 7)):
        for ours, theirs in zip(philox_words(index, seed, offset), philox_words(index, 5, 7), strict=True):
            assert torch.equal(ours, theirs)


def test_the_index_is_not_changed() -> None:
    index = torch.arange(5)
    philox_words(index, 1, 2)
    assert index.tolist() == [0, 1, 2, 3, 4]


@st.composite
def boxes(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int]]]:
    shape = draw(st.lists(st.integers(0, 6), max_size=4))
    bounds = []
    for size in shape:
        start = draw(st.integers(0, size))
        bounds.append((start, draw(st.integers(start, size))))
    return shape, bounds


@given(boxes(), INT64, st.integers(0, 10))
def test_a_shard_has_the_values_of_the_whole(
    box: tuple[list[int], list[tuple[int, int]]], seed: int, offset: int
) -> None:
    shape, bounds = box
    crop = tuple(slice(start, stop) for start, stop in bounds)

    def draw(held: list[tuple[int, int]]) -> list[torch.Tensor]:
        words = philox_words(global_indices(held, shape, torch.arange), seed, offset)
        return [*words, normal_from_words(words, TorchOps()), uniform_from_words(words, "float32", TorchOps())]

    for whole, shard in zip(draw([(0, size) for size in shape]), draw(bounds), strict=True):
        assert shard.shape == tuple(stop - start for start, stop in bounds)
        assert torch.equal(whole[crop], shard)


def test_global_indices_are_row_major() -> None:
    assert global_indices([(1, 3), (0, 2), (3, 5)], (4, 2, 5), torch.arange).tolist() == [
        [[13, 14], [18, 19]],
        [[23, 24], [28, 29]],
    ]
    assert global_indices([], (), torch.arange).tolist() == 0
    assert global_indices([(2, 2)], (4,), torch.arange).tolist() == []
    with pytest.raises(ValueError, match="zip"):
        global_indices([(0, 1), (0, 1)], (4,), torch.arange)


def test_an_index_beyond_32_bits_is_a_counter_of_its_own() -> None:
    low, high = philox_words(torch.tensor([5, 5 + 2**32]), 0, 0)[0].tolist()
    assert low != high


@pytest.mark.parametrize("dtype", UNIFORM_BITS)
def test_uniform_numbers_are_exact_in_their_dtype_and_below_one(dtype: str) -> None:
    target = getattr(torch, dtype)
    values = uniform_from_words(philox_words(torch.arange(10_000), 1, 0), dtype, TorchOps())
    assert torch.equal(values.to(target).to(torch.float64), values)
    largest = uniform_from_words(words_of(2**32 - 1, 2**32 - 1, 0, 0), dtype, TorchOps()).to(target)
    assert largest.item() == 1 - 2.0 ** -UNIFORM_BITS[dtype]
    assert uniform_from_words(words_of(0, 0, 2**32 - 1, 2**32 - 1), dtype, TorchOps()).item() == 0


def test_a_shorter_uniform_number_is_the_longer_one_cut() -> None:
    words = philox_words(torch.arange(1000), 3, 0)
    long, short = (uniform_from_words(words, dtype, TorchOps()) for dtype in ("float64", "float32"))
    assert torch.equal((long * 2**24).floor(), short * 2**24)


def test_normal_numbers_are_box_muller() -> None:
    words = philox_words(torch.arange(20_000), 11, 4)
    first, second, third, fourth = (np.array(word.tolist(), dtype=np.uint64) for word in words)
    u = ((first << np.uint64(21) | second >> np.uint64(11)).astype(np.longdouble) + 1) / 2**53
    v = (third << np.uint64(21) | fourth >> np.uint64(11)).astype(np.longdouble) / 2**53
    expected = np.sqrt(-2 * np.log(u)) * np.cos(2 * np.longdouble("3.14159265358979323846264338327950288") * v)
    error = np.abs(normal_from_words(words, TorchOps()).numpy() - expected)
    print(f"largest error against long double: {error.max():.1e}")
    assert error.max() < 4e-15


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((2**32 - 1, 2**32 - 1, 0, 0), 0.0),  # u = 1
        ((0, 0, 0, 0), math.sqrt(2 * 53 * math.log(2))),  # the smallest u
        ((0, 0, 2**31, 0), -math.sqrt(2 * 53 * math.log(2))),  # v = 1/2
        ((2**31 - 1, 2**32 - 1, 0, 0), math.sqrt(2 * math.log(2))),  # u = 1/2
    ],
)
def test_normal_numbers_at_the_ends(words: tuple[int, int, int, int], expected: float) -> None:
    assert normal_from_words(words_of(*words), TorchOps()).item() == pytest.approx(expected, rel=1e-15)


def test_another_framework_gives_the_same_bits() -> None:
    ours, theirs = philox_words(torch.arange(5000), 9, 1), philox_words(np.arange(5000), 9, 1)
    for word, other in zip(ours, theirs, strict=True):
        assert np.array_equal(word.numpy(), other)
    assert np.array_equal(normal_from_words(ours, TorchOps()).numpy(), normal_from_words(theirs, NumpyOps()))
    for dtype in UNIFORM_BITS:
        one, other = uniform_from_words(ours, dtype, TorchOps()), uniform_from_words(theirs, dtype, NumpyOps())
        assert np.array_equal(one.numpy(), other)


def test_a_square_root_off_by_one_unit_gives_the_same_bits() -> None:
    class OffByOne(TorchOps):
        def __init__(self, direction: float) -> None:
            self.direction = torch.tensor(direction, dtype=torch.float64)

        def sqrt(self, tensor: torch.Tensor) -> torch.Tensor:
            return torch.where(
                tensor == 0, 0, torch.nextafter(torch.from_numpy(np.sqrt(tensor.numpy())), self.direction)
            )

    words = philox_words(torch.arange(100_000), 6, 0)
    expected = normal_from_words(tuple(word.numpy() for word in words), NumpyOps())
    for direction in (0.0, math.inf):
        assert np.array_equal(normal_from_words(words, OffByOne(direction)).numpy(), expected)


def test_the_format_does_not_change() -> None:
    words = philox_words(torch.arange(3), 2026, 1)
    assert [value.hex() for value in normal_from_words(words, TorchOps()).tolist()] == FORMAT_NORMAL
    assert [value.hex() for value in uniform_from_words(words, "float64", TorchOps()).tolist()] == FORMAT_UNIFORM


@pytest.mark.parametrize(("seed", "offset"), [(0, 0), (1, 0), (0, 1), (2**63, 2**40)])
def test_moments(seed: int, offset: int) -> None:
    count = 200_000
    words = philox_words(torch.arange(count), seed, offset)
    uniform, normal = uniform_from_words(words, "float64", TorchOps()), normal_from_words(words, TorchOps())
    # Five standard errors each; the numbers are fixed, so this can't fail by chance twice.
    bound = 5 / math.sqrt(count)
    assert abs(uniform.mean() - 1 / 2) < bound * math.sqrt(1 / 12)
    assert abs(uniform.square().mean() - 1 / 3) < bound * math.sqrt(4 / 45)
    assert abs(normal.mean()) < bound
    assert abs(normal.square().mean() - 1) < bound * math.sqrt(2)
    assert abs(normal.pow(3).mean()) < bound * math.sqrt(15)
    assert abs(normal.pow(4).mean() - 3) < bound * math.sqrt(96)
    # Kolmogorov-Smirnov against the normal distribution, at a level of about 1e-6.
    below = 0.5 * (1 + torch.erf(normal.sort().values / math.sqrt(2)))
    assert (below - (torch.arange(count) + 0.5) / count).abs().max() < 2.7 / math.sqrt(count)


def test_neighbours_seeds_and_offsets_are_uncorrelated() -> None:
    count = 100_000

    def normal(seed: int, offset: int) -> torch.Tensor:
        values: torch.Tensor = normal_from_words(philox_words(torch.arange(count), seed, offset), TorchOps())
        return values

    base = normal(0, 0)
    for other in (base.roll(1), normal(1, 0), normal(0, 1)):
        assert abs((base * other).mean()) < 5 / math.sqrt(count)
