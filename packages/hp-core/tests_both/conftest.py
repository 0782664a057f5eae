"""Runs every test of this folder on each installed framework: its ranks are a pool of their own, started with its name.

Where HYPER_PARALLEL_PLATFORM names one, only that is run: the environment with MindSpore has torch, too, which has a session
of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from hp_core.testing import close_ranks

from .frameworks import INSTALLED, MindSporeFramework, TorchFramework

VARIABLE = "HYPER_PARALLEL_PLATFORM"


CHOSEN = [framework for framework in INSTALLED if os.environ.get(VARIABLE) in (None, framework.name)]


@pytest.fixture(scope="session", params=CHOSEN, ids=lambda framework: framework.name)
def framework(request: pytest.FixtureRequest) -> Iterator[TorchFramework | MindSporeFramework]:
    """One framework after the other, for all tests of the session."""
    close_ranks()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(VARIABLE, request.param.name)
        # MindSpore tells of every op that it places; only errors matter here.
        environment.setenv("GLOG_v", "3")
        yield request.param
    close_ranks()
