"""Which unit a parameter belongs to, asked by the parameter itself: sharded, whole, or the one it had before sharding."""

from __future__ import annotations

from typing import Any

from hp_fsdp.member import Member
from hp_fsdp.platform import get_tools

__all__ = ["forget", "member_of", "remember", "remember_former", "was_replaced"]

_sharded: Any = None
_former: Any = None  # parameters as they were before, and whole ones: no optimizer may step these


def _tables() -> tuple[Any, Any]:
    global _sharded, _former
    if _sharded is None:
        _sharded, _former = get_tools().weak_table(), get_tools().weak_table()
    return _sharded, _former


def remember(parameter: Any, member: Member) -> None:
    """A sharded parameter is known from now on."""
    _tables()[0][parameter] = member


def remember_former(parameter: Any, member: Member) -> None:
    """A parameter that stands for a sharded one, but isn't it."""
    _tables()[1][parameter] = member


def forget(parameter: Any) -> None:
    """A sharded parameter has been replaced."""
    _tables()[0].pop(parameter, None)


def member_of(parameter: Any) -> Member | None:
    """The member that a sharded parameter is of, or None."""
    return _tables()[0].get(parameter)  # type: ignore[no-any-return]


def was_replaced(parameter: Any) -> Member | None:
    """The member that has taken a parameter's place, or None."""
    return _tables()[1].get(parameter)  # type: ignore[no-any-return]
