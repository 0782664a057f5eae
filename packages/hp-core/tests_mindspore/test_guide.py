"""The guide's page on MindSpore: its `py` blocks run on two ranks, as one script."""

from __future__ import annotations

import re
from pathlib import Path

from hp_core.testing import run_ranks

PAGE = Path(__file__).parents[3] / "docs" / "guide" / "pytorch-and-mindspore.md"


def _run_script(source: str) -> None:
    exec(compile(source, "page", "exec"), {"__name__": "__main__"})


def test_blocks_run() -> None:
    blocks = re.findall(r"^```py\n(.*?)^```", PAGE.read_text("utf-8"), flags=re.M | re.S)
    assert blocks
    run_ranks(2, _run_script, "\n".join(blocks))
