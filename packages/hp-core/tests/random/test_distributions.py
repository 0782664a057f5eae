"""Distributions as functions of Philox words: the right ones, in a format that doesn't change and any framework repeats."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hp_core.errors import ShardingRuleError
from hp_core.random.distributions import cauchy, exponential, geometric, integers, log_normal, portable_exp
from hp_core.random.philox import Words, philox_words

COUNT = 100_000


class TorchOps:
    def to_float64(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.float64)

    def sqrt(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.sqrt()


class NumpyOps:
    def to_float64(self, tensor: np.ndarray) -> np.ndarray:
        return np.asarray(tensor).astype(np.float64)

    def sqrt(self, tensor: np.ndarray) -> np.ndarray:
        return np.asarray(np.sqrt(tensor))


DRAWS: dict[str, Callable[[Words, Any], Any]] = {
    "exponential": lambda words, ops: exponential(words, ops, 2.0),
    "cauchy": lambda words, ops: cauchy(words, ops, 1.0, 3.0),
    "geometric": lambda words, ops: geometric(words, ops, 0.3),
    "log_normal": lambda words, ops: log_normal(words, ops, 0.5, 0.75),
}
CUMULATIVE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exponential": lambda x: 1 - torch.exp(-2.0 * x),
    "cauchy": lambda x: torch.atan((x - 1.0) / 3.0) / math.pi + 0.5,
    "log_normal": lambda x: 0.5 * (1 + torch.erf((x.log() - 0.5) / (0.75 * math.sqrt(2)))),
}
# Of elements 0, 1, 2 with seed 2026 and offset 1.
FORMAT: dict[str, list[str]] = {
    "exponential": ["0x1.65aa0c2e8bcd1p-3", "0x1.0f3c20d982fddp-4", "0x1.0c2eb163b5de7p+0"],
    "cauchy": ["0x1.a0aebffa929cep+1", "0x1.09bfa5703335ap+3", "-0x1.97afd31e74c8fp+2"],
    "geometric": ["0x1.0000000000000p+0", "0x1.0000000000000p+0", "0x1.8000000000000p+2"],
    "log_normal": ["0x1.ddd9659fd77abp-1", "0x1.02e72eec5c0f2p+1", "0x1.08d27bd257447p+0"],
}


def values(name: str, count: int = COUNT) -> torch.Tensor:
    result: torch.Tensor = DRAWS[name](philox_words(torch.arange(count), 5, 3), TorchOps())
    return result


@pytest.mark.parametrize("name", CUMULATIVE)
def test_the_distribution_is_the_one_named(name: str) -> None:
    """Kolmogorov and Smirnov's distance, at a level of about 1e-6."""
    below = CUMULATIVE[name](values(name).sort().values)
    assert (below - (torch.arange(COUNT) + 0.5) / COUNT).abs().max() < 2.7 / math.sqrt(COUNT)


def test_geometric_numbers_count_trials() -> None:
    found = values("geometric").long().bincount(minlength=8)[:8] / COUNT
    expected = [0.0] + [0.3 * 0.7**k for k in range(7)]
    assert found.tolist() == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("name", DRAWS)
def test_another_framework_gives_the_same_bits(name: str) -> None:
    ours = DRAWS[name](philox_words(torch.arange(5000), 9, 1), TorchOps())
    theirs = DRAWS[name](philox_words(np.arange(5000), 9, 1), NumpyOps())
    assert np.array_equal(ours.numpy(), theirs)


@pytest.mark.parametrize("name", DRAWS)
def test_the_format_does_not_change(name: str) -> None:
    words = philox_words(torch.arange(3), 2026, 1)
    assert [value.hex() for value in DRAWS[name](words, TorchOps()).tolist()] == FORMAT[name]


def test_the_portable_exponential_is_the_exponential() -> None:
    x = torch.linspace(-745.0, 709.0, 50_001, dtype=torch.float64)
    torch.testing.assert_close(portable_exp(x, TorchOps()), x.exp(), rtol=4e-16 * 2, atol=5e-324)
    ends = torch.tensor([0.0, 1000.0, -1000.0], dtype=torch.float64)
    assert portable_exp(ends, TorchOps()).tolist() == [1.0, math.inf, 0.0]


def test_exponential_numbers_are_never_zero() -> None:
    words = tuple(torch.tensor([2**32 - 1]) for _ in range(4))
    assert exponential(words, TorchOps(), 1.0).item() == pytest.approx(2.0**-53)  # type: ignore[arg-type]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 4), (-(2**62), 2**62), (0, 2**63 - 1), (0, 2**63)])
def test_integers_fill_their_interval(low: int, high: int) -> None:
    drawn = integers(philox_words(torch.arange(20_000), 1, 1), low, high)
    assert drawn.min().item() >= low
    assert drawn.max().item() < high
    share = (drawn.double() - low) / (high - low)
    if high - low > 1:
        assert abs(share.mean() - (0.5 if high - low > 100 else 3 / 7)) < 0.02
    else:
        assert not drawn.any()


def test_all_of_int64_and_nothing() -> None:
    words = philox_words(torch.arange(1000), 1, 1)
    drawn = integers(words, -(2**63), 2**63)
    assert drawn.tolist() == [
        value - 2**64 if value >= 2**63 else value
        for value in ((a << 32) + b for a, b in zip(words[0].tolist(), words[1].tolist(), strict=True))
    ]
    for low, high in ((3, 3), (4, 3), (-1, 2**63)):
        with pytest.raises(ShardingRuleError, match="must hold"):
            integers(words, low, high)


def test_a_probability_of_one_is_refused() -> None:
    for p in (0.0, 1.0):
        with pytest.raises(ShardingRuleError, match="between 0 and 1"):
            geometric(philox_words(torch.arange(2), 0, 0), TorchOps(), p)
