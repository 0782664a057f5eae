"""A warning, once, when calls of one kind keep missing a cache: something differs in every call that needn't.

Caches of plans are keyed by value, so a training loop stops missing after its first steps. One that doesn't pays the
planning again and again, which nothing else would show.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any

__all__ = ["MissStorm"]

_logger = logging.getLogger("hp_core")


class MissStorm:
    """Counts the misses of one cache by kind of call.

    Args:
        what: what the cache holds, as in "op plans".
        remedy: what a user can do, one sentence.
        threshold: misses of one kind that make a storm.
    """

    def __init__(self, what: str, remedy: str, threshold: int = 256) -> None:
        self._what = what
        self._remedy = remedy
        self._threshold = threshold
        self._counts: dict[Hashable, int] = {}
        self._last: dict[Hashable, Any] = {}
        self._warned = False

    def missed(self, kind: Hashable, name: str, key: Any) -> None:
        """Count a miss.

        Args:
            kind: what the calls have in common, such as the op.
            name: how to call the kind in the warning.
            key: the key that missed; it is compared with the kind's last one to tell what differs.
        """
        if self._warned:
            return
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count >= self._threshold:
            self._warned = True
            _logger.warning(
                "%s has missed the cache of %s %d times: its calls differ, last by %s. %s",
                name,
                self._what,
                count,
                difference(self._last[kind], key),
                self._remedy,
            )
            self._last.clear()
        else:
            self._last[kind] = key

    def clear(self) -> None:
        """Start counting anew; the next storm warns again."""
        self._counts.clear()
        self._last.clear()
        self._warned = False


def difference(before: Any, after: Any) -> str:
    """The first part in which two keys differ, for people."""
    if isinstance(before, tuple) and isinstance(after, tuple) and len(before) == len(after):
        for left, right in zip(before, after, strict=True):
            if left != right:
                return difference(left, right)
    return f"{before!r} before, {after!r} now"
