"""The tables of "PyTorch and MindSpore side by side" say what the tests check now, and name no test that is gone."""

from __future__ import annotations

import pytest

import side_by_side


def test_the_page_is_current() -> None:
    text = side_by_side.PAGE.read_text("utf-8")
    assert text == side_by_side.page(text), "run: python build/side_by_side.py --update"


def test_what_the_records_hold_is_in_the_table() -> None:
    table = side_by_side.tables()
    assert "`softmax`" in table
    assert "| losses |" in table
    recorded = side_by_side.recorded_ops(side_by_side.RECORDS["MindSpore"])
    assert all(f"`{op}`" in table for ops in recorded.values() for op in ops)


def test_a_feature_whose_test_is_gone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = side_by_side.Feature("magic", "tests/test_side_by_side.py::test_magic", None)
    monkeypatch.setattr(side_by_side, "FEATURES", [gone])
    with pytest.raises(ValueError, match="test_magic, which isn't there"):
        side_by_side.tables()
