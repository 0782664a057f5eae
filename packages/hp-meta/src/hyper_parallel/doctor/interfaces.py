"""The patterns by which HCCL and NCCL choose network interfaces: `eth,enp`, `=eth0`, `^docker`, `^=lo`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Pattern", "chosen"]


@dataclass(frozen=True)
class Pattern:
    """A choice of interfaces.

    Attributes:
        names: names, or how names begin.
        exact: whole names, after `=`.
        excluded: all but these, after `^`.
    """

    names: tuple[str, ...]
    exact: bool = False
    excluded: bool = False

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Read the value of HCCL_SOCKET_IFNAME or NCCL_SOCKET_IFNAME."""
        rest = text.removeprefix("^")
        names = rest.removeprefix("=")
        parts = tuple(part.strip() for part in names.split(",") if part.strip())
        return cls(parts, exact=names != rest, excluded=rest != text)


def chosen(pattern: Pattern, interfaces: Iterable[str]) -> list[str]:
    """The interfaces that a pattern leaves, those of the machine's own loop last."""

    def fits(name: str) -> bool:
        hit = name in pattern.names if pattern.exact else name.startswith(pattern.names)
        return hit != pattern.excluded

    return sorted(filter(fits, interfaces), key=lambda name: (name == "lo", name))
