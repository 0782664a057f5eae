"""`check_ops(ranks, cases)`: functions of tensors, in many combinations of layouts, against dense.

The oracle is the validator's (`hp_core.testing.validator`), so a case here means what a sample there means; these are for what
is no sample: compositions, odd sizes, errors on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hp_core.platform.protocol import OpSample
from hp_core.testing.validator.runs import check_samples

Case = tuple[str, Callable[..., Any], str]
"""What it is, the function of tensors, and its operands (see `OpSample`), alternatives separated by ";"."""

MESHES = {2: "2", 4: "2x2"}
MOST_COMBINATIONS = {2: 64, 4: 8}


@pytest.fixture(scope="session")
def check_ops() -> Callable[..., None]:
    """Compare each case with the dense run on 2 or 4 ranks, in at most so many combinations of layouts each."""

    def check(ranks: int, cases: Sequence[Case], most: int | None = None) -> None:
        __tracebackhide__ = True
        samples = [
            OpSample("", name, function, " ".join(operands.split()))
            for name, function, alternatives in cases
            for operands in alternatives.split(";")
        ]
        faults = check_samples(samples, MESHES[ranks], most or MOST_COMBINATIONS[ranks])
        assert not faults, "differs from dense:\n" + "\n".join(faults)

    return check
