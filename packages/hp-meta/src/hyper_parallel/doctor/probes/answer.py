"""How a probe tells what it found: one line of JSON for each fact, written as soon as it is known.

`probe.py` reads these lines; what stands there survives the death of the process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

__all__ = ["Answer"]


class Answer:
    """Writes the facts of one probe.

    Args:
        file: opened with a buffer of one line.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def fact(self, name: str, value: object) -> None:
        """State a fact; the value must be one that JSON has."""
        self._write("fact", name, value)

    def step(self, name: str) -> None:
        """Say what comes next, in case it doesn't end."""
        self._write("step", name, None)

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Do what may raise: the error becomes the fact `NAME.error`, and the probe goes on."""
        self.step(name)
        try:
            yield
        except Exception as error:
            self.fact(f"{name}.error", describe(error))

    def error(self, error: BaseException) -> None:
        """State what ended the probe."""
        self._write("error", "", describe(error))

    def end(self) -> None:
        """State that the probe came to its end."""
        self._write("end", "", None)

    def _write(self, kind: str, name: str, value: object) -> None:
        self._file.write(json.dumps([kind, name, value]) + "\n")


def describe(error: BaseException) -> str:
    """An error in one line, with the one that caused it: `RuntimeError: ... <- ImportError: libhccl.so: ...`."""
    parts = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        parts.append(f"{type(current).__name__}: {' '.join(str(current).split())}")
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return " <- ".join(parts)
