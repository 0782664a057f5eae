"""The validator of sharding rules: every op in every combination of layouts, against the dense op and a record of costs.

`oracle.py` compares one call with dense on a rank, `runs.py` does it for many calls on many ranks, `golden.py` keeps what
each combination communicates; `python -m hp_core.rules.validate` is the tool.
"""

from __future__ import annotations

from hp_core.testing.validator.golden import Golden
from hp_core.testing.validator.runs import Findings, Validation, validate

__all__ = ["Findings", "Golden", "Validation", "validate"]
