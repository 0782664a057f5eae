"""What helps to see what a parallel program does: `describe`, `fingerprint`, recorders and caches; provided by hp-core."""

from __future__ import annotations

from hyper_parallel.exports import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
