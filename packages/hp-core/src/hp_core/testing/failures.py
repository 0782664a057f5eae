"""The errors that report failed ranks, and the text that makes them readable.

A report goes rank by rank: what it raised, where it hung or how it died, then what it printed. Ranks that failed with
the same words are shown once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hp_core.errors import HyperParallelError
from hp_core.testing.messages import Died, Outcome, Raised, Returned

__all__ = ["Printed", "RankFailure", "RankTimeout", "describe_failure"]


class Printed(NamedTuple):
    """The end of what one rank wrote during the call."""

    stdout: str
    stderr: str


class RankFailure(HyperParallelError, AssertionError):
    """A function called by `run_ranks` raised, died or was left waiting on some rank.

    The message holds every failing rank's traceback, stack or exit code, and what it printed. `__cause__` is the first
    exception that a rank reported, where it can be pickled.

    Attributes:
        outcomes: how each rank ended, in the order of ranks.
        exceptions: the exception of each rank that raised a picklable one.
    """

    def __init__(
        self, message: str, outcomes: tuple[Outcome, ...] = (), exceptions: Mapping[int, BaseException] | None = None
    ) -> None:
        super().__init__(message)
        self.outcomes = outcomes
        self.exceptions: dict[int, BaseException] = dict(exceptions or {})


class RankTimeout(RankFailure):
    """A function called by `run_ranks` didn't end in time; the message holds the Python stacks of the ranks."""


def describe_failure(
    what: str, outcomes: Mapping[int, Outcome], printed: Mapping[int, Printed], seconds: float, first: int | None
) -> str:
    """Write the report of a failed call.

    Args:
        what: name of the function that was called.
        outcomes: how each rank ended, by rank.
        printed: what each rank wrote, by rank.
        seconds: how long the call ran.
        first: the rank that failed first, or None if no rank failed before the time ran out.

    Returns:
        A headline, then one section per group of ranks that ended with the same words.
    """
    failed = [rank for rank, outcome in outcomes.items() if not isinstance(outcome, Returned)]
    headline = f"{what}: {len(failed)} of {len(outcomes)} ranks failed after {seconds:.1f} s"
    if first is not None:
        headline += f"; rank {first} was first: {_in_brief(outcomes[first])}"
    elif failed:
        headline += f"; {_ranks(failed)} hadn't ended when the time ran out"
    sections: dict[str, list[int]] = {}
    for rank, outcome in sorted(outcomes.items()):
        sections.setdefault(_section(outcome, printed.get(rank, Printed("", ""))), []).append(rank)
    parts = [f"--- {_ranks(ranks)} {text}" for text, ranks in sections.items()]
    return "\n".join([headline, *parts])


def _in_brief(outcome: Outcome) -> str:
    if isinstance(outcome, Raised):
        text = outcome.message.strip().split("\n", 1)[0]
        return f"{outcome.type_names[0].rpartition('.')[2]}: {text}" if text else outcome.type_names[0]
    return outcome.how if isinstance(outcome, Died) else "it didn't end"


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _section(outcome: Outcome, printed: Printed) -> str:
    if isinstance(outcome, Returned):
        return "returned"
    if isinstance(outcome, Raised):
        text = f"raised {outcome.type_names[0]}\n{outcome.traceback.rstrip()}"
    elif isinstance(outcome, Died):
        text = f"died: {outcome.how}"
    else:
        why = "not ended in time" if outcome.timed_out else "still waiting after a peer had failed"
        text = f"{why}:\n{outcome.stack.rstrip()}"
    for name, content in (("stdout", printed.stdout), ("stderr", printed.stderr)):
        if content.strip():
            text += f"\n[{name}]\n{content.rstrip()}"
    return text
