"""What the launcher and its ranks say to each other, and how the call of a rank ended.

Requests travel from the pool to a worker, replies back; both are pickled over a private pipe between a process and its
own child. The four outcomes are what the pool knows of a rank at the end of a call.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "Call",
    "Died",
    "Outcome",
    "Prepare",
    "Raised",
    "Reply",
    "Request",
    "Returned",
    "Stop",
    "Stuck",
    "qualified_name",
]


@dataclass(frozen=True)
class Prepare:
    """Become `rank` of `world_size`: leave the process group of earlier calls and, given an init method, join one."""

    rank: int
    world_size: int
    init_method: str | None


@dataclass(frozen=True)
class Call:
    """Call the pickled `(fn, args, kwargs)`, with the caller's import path and working directory."""

    payload: bytes
    import_path: tuple[str, ...]
    folder: str


@dataclass(frozen=True)
class Stop:
    """Leave the process group and end."""


@dataclass(frozen=True)
class Returned:
    """The call returned; `group_alive` says whether the rank still has its process group."""

    payload: bytes
    group_alive: bool


@dataclass(frozen=True)
class Raised:
    """The call raised.

    Attributes:
        type_names: qualified names of the exception's classes, its own first, in method resolution order.
        message: its text.
        traceback: the formatted traceback, chained exceptions included, as seen on the rank.
        payload: the pickled exception, or None where it can't be pickled.
    """

    type_names: tuple[str, ...]
    message: str
    traceback: str
    payload: bytes | None


@dataclass(frozen=True)
class Died:
    """The process ended without an answer; `how` is its exit code or signal in words."""

    how: str


@dataclass(frozen=True)
class Stuck:
    """The call hadn't ended when the pool gave up; `stack` holds every Python thread of the rank at that time.

    Attributes:
        stack: the stacks, as faulthandler prints them.
        timed_out: True if the call's own time ran out, False if a peer had failed and this rank still waited.
    """

    stack: str
    timed_out: bool


Request = Prepare | Call | Stop
Reply = Returned | Raised
Outcome = Returned | Raised | Died | Stuck


def qualified_name(cls: type) -> str:
    """Name a class as tracebacks do, the same in the parent and on the ranks."""
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
