"""What a check found: a mark, one sentence, and for a problem the commands that mend it; and the report of them all.

Findings are values: judges make them from facts, `render.py` writes them as text, JSON or Markdown.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from hyper_parallel.doctor.checks import CHECKS, Check

__all__ = ["Finding", "Report", "Status", "failure", "ok", "skipped", "warning"]


class Status(Enum):
    """How a check ended, from best to worst; `SKIPPED` is no judgement: there was nothing to look at."""

    SKIPPED = "skipped"
    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        id: the check's id, a key of `CHECKS`.
        status: how it ended.
        text: what was found, in one line, the cause included.
        remedy: shell commands that mend it, in order; a line that begins with `#` explains the next one.
        details: more lines, shown with `-v`.
    """

    id: str
    status: Status
    text: str
    remedy: tuple[str, ...] = ()
    details: tuple[str, ...] = ()

    @property
    def check(self) -> Check:
        """The check that this is the result of."""
        return CHECKS[self.id]


@dataclass(frozen=True)
class Report:
    """All findings of one run of the doctor.

    Attributes:
        subject: what was looked at: `profile cpu`, `wheel hp_kernels-...whl`, `run of 4 processes`.
        reason: why this, where the doctor chose it itself.
        findings: one for each check, in their order.
        seconds: how long it took, in seconds.
    """

    subject: str
    reason: str
    findings: tuple[Finding, ...]
    seconds: float = field(default=0.0, compare=False)

    def count(self, status: Status) -> int:
        """How many checks ended like this."""
        return sum(finding.status is status for finding in self.findings)

    def exit_code(self, *, strict: bool = False) -> int:
        """0, or 1 if a check failed; with `strict` a warning counts as a failure."""
        return int(self.count(Status.FAILURE) > 0 or (strict and self.count(Status.WARNING) > 0))

    def __getitem__(self, check: str) -> Finding:
        """The finding of a check, by its id."""
        for finding in self.findings:
            if finding.id == check:
                return finding
        raise KeyError(check)


def ok(check: str, text: str, details: Iterable[str] = ()) -> Finding:
    """All is well."""
    return Finding(check, Status.OK, text, (), tuple(details))


def skipped(check: str, text: str, details: Iterable[str] = ()) -> Finding:
    """There was nothing to look at."""
    return Finding(check, Status.SKIPPED, text, (), tuple(details))


def warning(check: str, text: str, remedy: Iterable[str] = (), details: Iterable[str] = ()) -> Finding:
    """It works, or isn't needed here; yet someone should look at it."""
    return Finding(check, Status.WARNING, text, tuple(remedy), tuple(details))


def failure(
    check: str, text: str, remedy: Iterable[str], details: Iterable[str] = (), *, required: bool = True
) -> Finding:
    """It doesn't work. What the profile doesn't require (`required=False`) is only warned about."""
    return Finding(check, Status.FAILURE if required else Status.WARNING, text, tuple(remedy), tuple(details))
