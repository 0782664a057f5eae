"""Which framework a process works with is decided by what the environment says, without importing anything to look."""

from __future__ import annotations

import pytest

from hp_core.errors import PlatformError
from hp_core.platform.select import choose

BOTH = {"torch", "mindspore"}


@pytest.mark.parametrize(
    ("wanted", "imported", "installed", "expected"),
    [
        ("mindspore", {"torch"}, BOTH, "mindspore"),
        (None, {"mindspore"}, BOTH, "mindspore"),
        (None, {"torch"}, BOTH, "torch"),
        (None, set(), {"mindspore"}, "mindspore"),
        (None, set(), {"torch"}, "torch"),
        (None, set(), BOTH, "torch"),
        (None, BOTH, BOTH, "torch"),
    ],
)
def test_order_of_preference(wanted, imported, installed, expected):
    assert choose(wanted, imported, installed) == expected


@pytest.mark.parametrize(
    ("wanted", "installed", "message"),
    [
        (None, set(), "pip install torch"),
        ("jax", BOTH, "HYPER_PARALLEL_PLATFORM='jax'.*torch, mindspore"),
        ("mindspore", {"torch"}, "mindspore is not installed: pip install mindspore"),
    ],
)
def test_refusals_name_the_remedy(wanted, installed, message):
    with pytest.raises(PlatformError, match=message):
        choose(wanted, set(), installed)
