"""The tables of facts in `data/`: versions of CANN, variables of HCCL, systems that wheels are built for.

They are JSON, so that they can be brought up to date without reading code; each says where its numbers come from.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

__all__ = ["table"]


@cache
def table(name: str) -> dict[str, Any]:
    """One table, by the name of its file without the ending."""
    text = resources.files("hyper_parallel.doctor").joinpath("data").joinpath(f"{name}.json").read_text("utf-8")
    return dict(json.loads(text))
