"""Fixtures of the kernels' tests: with the native kernels, which must be there, and with their twins alone."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# These are tests of the Python ops; what an island of this machine does, its own tests say.
os.environ["HP_KERNELS_TORCH"] = "off"

from hp_kernels.loading import native, reload


@pytest.fixture(autouse=True)
def _native_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test passes because `_native` wasn't built."""
    monkeypatch.setenv("HP_KERNELS", "on")
    reload()
    yield
    monkeypatch.undo()
    reload()
    module = native()
    if module is not None:
        module.set_thread_count(0)


@pytest.fixture
def portable_kernels(_native_kernels: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The twins instead of the native kernels."""
    monkeypatch.setenv("HP_KERNELS", "off")
    reload()
    yield
    reload()
