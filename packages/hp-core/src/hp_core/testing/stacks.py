"""The Python stacks of a rank, as faulthandler writes them, made readable.

What belongs to the launcher is left out, and so are the addresses of threads: ranks that hang at the same place then
read the same, and are reported once.
"""

from __future__ import annotations

import re

__all__ = ["readable_stacks"]

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):\n", re.MULTILINE)
_LAUNCHER = re.compile(r"testing[/\\]worker\.py\", line \d+ in (_read|_call|_prepare|main)\b")


def readable_stacks(dump: str) -> str:
    """Cut a dump of all threads down to what the called function does.

    Args:
        dump: what `faulthandler.dump_traceback` wrote.

    Returns:
        One paragraph per thread, the most recent call first, the main thread first; the dump itself if it has another
        form.
    """
    threads: list[str] = []
    for block in _THREAD.split(dump)[1:]:
        frames: list[str] = []
        main = False
        for line in block.strip("\n").split("\n"):
            if found := _LAUNCHER.search(line):
                main = found.group(1) != "_read"
                break
            frames.append(line)
        else:
            threads.append("\n".join(["another thread (most recent call first):", *frames]))
        if main:
            threads.insert(0, "\n".join(["main thread (most recent call first):", *frames]))
    return "\n".join(threads) or dump
