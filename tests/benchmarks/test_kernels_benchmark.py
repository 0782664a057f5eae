"""The benchmark of the kernels: every table of it runs, on small tensors, and what it compares gives the same result."""

from __future__ import annotations

import pytest
import torch
from benchmarks.kernels import footprint, lse_merge, packing, permute, philox

from hp_kernels import fill_random


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(philox, "NUMBERS", 1000)
    monkeypatch.setattr(packing, "CASES", ((3, 10),))
    monkeypatch.setattr(lse_merge, "SEQ", 8)
    monkeypatch.setattr(permute, "TOKENS", 16)
    monkeypatch.setattr(permute, "DIM", 8)


@pytest.mark.parametrize("table", [philox, packing, lse_merge, permute, footprint], ids=lambda table: table.__name__)
def test_tables(table: object) -> None:
    section = table.section(1)  # type: ignore[attr-defined]
    assert section.lines
    assert all(aim.measured for aim in section.aims)


@pytest.mark.parametrize(("kind", "dtype"), philox.CASES)
def test_the_contenders_draw_the_same(kind: str, dtype: torch.dtype) -> None:
    native, twin = torch.empty(1000, dtype=dtype), torch.empty(1000, dtype=dtype)
    fill_random(native, kind, (1000,), [(0, 1000)], 1, 2, 0.3)
    philox.portable(twin, kind)
    assert torch.equal(native, twin)
