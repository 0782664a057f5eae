"""A record of what was communicated: `with record_collectives() as log`.

Every collective and point-to-point call passes one door of the platform, which reports here; so tests and users count
what really ran, in order, on this rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["CollectiveLog", "CollectiveRecord", "active_logs", "record_collectives"]


@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    """One call through the door.

    Attributes:
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "scatter", "send", "recv", "barrier".
        nbytes: bytes this rank puts on the wire, by the ring formula of the collective (sends only).
        group_size: number of ranks taking part.
        dtype: element type, as the framework prints it.
        reduce_op: for reductions.
    """

    kind: str
    nbytes: int
    group_size: int
    dtype: str
    reduce_op: str | None = None


class CollectiveLog(list[CollectiveRecord]):
    """The records, in call order."""

    @property
    def counts(self) -> Counter[str]:
        """Number of calls of each kind."""
        return Counter(record.kind for record in self)

    @property
    def nbytes(self) -> int:
        """Bytes this rank put on the wire in all."""
        return sum(record.nbytes for record in self)

    def summary(self) -> str:
        """One line per kind: calls and bytes."""
        lines = []
        for kind, count in sorted(self.counts.items()):
            nbytes = sum(record.nbytes for record in self if record.kind == kind)
            lines.append(f"{kind}: {count} calls, {nbytes} bytes")
        return "\n".join(lines) or "no communication"


active_logs: list[CollectiveLog] = []
"""The logs that are open now; the door appends to each. Empty in ordinary running, which costs one truth test."""


@contextmanager
def record_collectives() -> Iterator[CollectiveLog]:
    """Record every collective and point-to-point call of this process inside the block."""
    log = CollectiveLog()
    active_logs.append(log)
    try:
        yield log
    finally:
        active_logs[:] = [other for other in active_logs if other is not log]
