"""Runs a probe in a process of its own, with a time limit: a crash, a signal and a hang are results like any other.

A probe (`probes/`) writes its facts as lines of JSON, one as soon as it is known, so what it learnt before it died is
kept, and the last line says what it was doing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Facts", "Outcome", "Request", "Running", "run_probe", "run_probes"]

Facts = Mapping[str, Any]
# What a probe is told, and its environment variables.
Request = tuple[Facts, Mapping[str, str]]

_PROGRAM = Path(__file__).with_name("probes") / "start.py"
_KEPT = 12  # lines of a dead probe's output that are shown


@dataclass(frozen=True)
class Outcome:
    """What a probe found, and how it ended.

    Attributes:
        facts: what it wrote, by name.
        end: empty if it ended well; else how it ended, as the end of a sentence: `was killed by SIGSEGV`,
            `hung: no answer within 60 s`, `raised ImportError: ...`, `exited with status 3`.
        during: what it was doing then.
        output: the last lines that it printed.
    """

    facts: Facts = field(default_factory=dict)
    end: str = ""
    during: str = ""
    output: tuple[str, ...] = ()

    @property
    def cause(self) -> str:
        """How it ended, and of a chain of errors the first one that was raised: `raised ImportError: libhccl.so: ...`."""
        verb, chained, _ = self.end.partition("raised ")
        return f"{verb}{chained}{self.end.rpartition(' <- ')[2]}" if " <- " in self.end else self.end

    @property
    def story(self) -> str:
        """How it ended and where, for a finding's text."""
        return f"{self.cause} (during: {self.during})" if self.during else self.cause


class Running:
    """A probe at work in a process of its own, which leads a session: what it starts ends with it.

    Args:
        name: module of `probes/`.
        request: what the probe is told, as JSON.
        environment: its environment variables.
    """

    def __init__(self, name: str, request: Facts, environment: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="doctor-")
        self._answer = Path(self._folder.name) / "answer"
        self._output = (Path(self._folder.name) / "output").open("w+b")
        self._process = subprocess.Popen(
            [sys.executable, str(_PROGRAM), name, str(self._answer), json.dumps(request)],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            env=dict(environment),
            start_new_session=True,
        )

    def wait(self, timeout: float) -> bool:
        """Wait some seconds for its end; False if it is still at work then."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it is at work."""
        return self._process.poll()

    def finish(self, late: str) -> Outcome:
        """What it found; if it is still at work it is killed, and `late` says how it ended."""
        status = self._process.poll()
        # Groups of processes are Linux's; elsewhere the probe alone is ended, and the finding says that it isn't Linux.
        with suppress(ProcessLookupError, PermissionError, AttributeError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._output.seek(0)
        printed = self._output.read().decode(errors="replace").splitlines()
        self._output.close()
        facts, during, error, finished = _read(self._answer)
        self._folder.cleanup()
        end = ""
        if status is None:
            end = late
        elif status < 0:
            end = f"was killed by {_signal_name(-status)}"
        elif error:
            end = f"raised {error}"
        elif status or not finished:
            # A library that calls exit(0) on import has not answered either.
            end = f"ended the interpreter with exit status {status}"
        lines = tuple(line for line in printed if line.strip())[-_KEPT:]
        return Outcome(facts, end, during if end else "", lines if end else ())


def run_probes(requests: Mapping[str, Request], timeout: float) -> dict[str, Outcome]:
    """Run probes at the same time, each to its end or for `timeout` seconds, and gather what they found.

    Returns:
        Their facts and how they ended; nothing that a probe does raises here. Whatever ends this function, an interrupt
        from the keyboard included, ends the probes.
    """
    running: dict[str, Running] = {}
    try:
        for name, (request, environment) in requests.items():
            running[name] = Running(name, request, environment)
        deadline = time.monotonic() + timeout
        for probe in running.values():
            probe.wait(max(0.0, deadline - time.monotonic()))
    finally:
        outcomes = {name: probe.finish(f"hung: no answer within {timeout:g} s") for name, probe in running.items()}
    return outcomes


def run_probe(name: str, request: Facts, environment: Mapping[str, str], timeout: float) -> Outcome:
    """Run one probe, as `run_probes`."""
    return run_probes({name: (request, environment)}, timeout)[name]


def _read(answer: Path) -> tuple[dict[str, Any], str, str, bool]:
    """Facts, the last step, the error's text and whether the end was reached, from the lines of an answer."""
    facts: dict[str, Any] = {}
    during = error = ""
    finished = False
    if answer.exists():
        for line in answer.read_text("utf-8", errors="replace").splitlines():
            try:
                kind, name, value = json.loads(line)
            except ValueError:  # killed in the middle of a line
                continue
            if kind == "fact":
                facts[name] = value
            elif kind == "step":
                during = name
            elif kind == "error":
                error = value
            elif kind == "end":
                finished = True
    return facts, during, error, finished


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
