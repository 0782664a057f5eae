"""The doctor: says what keeps HyperParallel from running on this machine, and which command mends it.

It imports only the standard library, so that it works where nothing else does; whatever might crash or hang runs in a
process of its own. `hyper-parallel doctor` and `python -m hyper_parallel.doctor` are its command line.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hyper_parallel.doctor.checks import CHECKS, Check
    from hyper_parallel.doctor.collectives import run_collectives
    from hyper_parallel.doctor.examine import diagnose
    from hyper_parallel.doctor.finding import Finding, Report, Status
    from hyper_parallel.doctor.wheel_file import examine_wheel

__all__ = ["CHECKS", "Check", "Finding", "Report", "Status", "diagnose", "examine_wheel", "run_collectives"]

# Every probe imports this package, in a process of its own: what it doesn't use it doesn't load.
_MODULES = {
    "CHECKS": "checks",
    "Check": "checks",
    "Finding": "finding",
    "Report": "finding",
    "Status": "finding",
    "diagnose": "examine",
    "examine_wheel": "wheel_file",
    "run_collectives": "collectives",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
