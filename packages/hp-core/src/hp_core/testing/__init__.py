"""Run functions on many ranks, for tests and experiments on one machine.

`run_ranks(n, fn)` calls `fn` on n processes that are started once and kept; `record_collectives` counts what they send.
Needs the extra `hp-core[testing]` (cloudpickle).
"""

from __future__ import annotations

from hp_core.platform.recorder import record_collectives
from hp_core.testing.failures import RankFailure, RankTimeout
from hp_core.testing.ranks import assert_same_error, close_ranks, run_ranks

__all__ = ["RankFailure", "RankTimeout", "assert_same_error", "close_ranks", "record_collectives", "run_ranks"]
