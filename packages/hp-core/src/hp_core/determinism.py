"""`deterministic`: the call by which a program asks for equal results in equal runs.

What it sets, and when that is too late, is in `hp_core.platform.determinism`.
"""

from __future__ import annotations

from hp_core.errors import PlatformError
from hp_core.platform import get_platform
from hp_core.platform.determinism import LEVELS, VARIABLE, Determinism, apply_level, level_asked

__all__ = ["deterministic"]


def deterministic(level: int = 1) -> Determinism:
    """Make equal runs give equal bits: on the same software, the same hardware and the same number of ranks.

    Call it first of all, before `init_process_group()` and before anything runs on a device; or start the program with
    `HYPER_PARALLEL_DETERMINISTIC=1`, which asks for the same without a change to it. It costs speed. Seeds are yours to set
    (`manual_seed`).

    ==== ==========================================================================================
    0    as the framework comes; takes back what was set
    1    deterministic algorithms where there are any; an op that has none warns (PyTorch)
    2    such an op is an error; fresh memory is filled, so that reading it is seen (PyTorch)
    3    as 2; HCCL's reductions also keep the order of their addends (Atlas A2, equal nodes; slower)
    ==== ==========================================================================================

    Args:
        level: 0 to 3.

    Returns:
        What was set, to be printed; usable in a `with`, which restores it (not with MindSpore).

    Raises:
        PlatformError: an unknown level; an environment variable says otherwise; or what would have to be set is read by
            something that has started already. Nothing has been changed then.
    """
    if level not in LEVELS:
        known = "\n".join(f"  {number}: {meaning}" for number, meaning in LEVELS.items())
        raise PlatformError(f"deterministic({level!r}): there is no such level; the levels are\n{known}")
    level = int(level)
    platform = get_platform()
    asked = level_asked()
    if asked is not None and asked != level:
        raise PlatformError(
            f"deterministic({level}) contradicts {VARIABLE}={asked} in the environment; change one of them "
            f"(unset {VARIABLE}, or deterministic({asked}))."
        )
    return apply_level(level, platform)
