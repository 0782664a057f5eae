"""How every table measures: contenders take turns within one run, and ratios are taken within a round.

A shared machine is slow in bursts. Since each round holds a turn of every contender, a burst hits all of them, and the
median over rounds of their ratio is steadier than the ratio of their medians; tables show both.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

__all__ = ["Calls", "Samples", "count_calls", "take_turns"]


@dataclass(frozen=True)
class Samples:
    """Seconds per call, for each contender by round."""

    rounds: dict[str, list[float]]

    def median(self, name: str) -> float:
        """Median over the rounds, in seconds."""
        return median(self.rounds[name])

    def ratio(self, name: str, base: str) -> float:
        """Ratio of the medians."""
        return self.median(name) / self.median(base)

    def paired_ratio(self, name: str, base: str) -> float:
        """Median over the rounds of the ratio within a round."""
        return median(one / other for one, other in zip(self.rounds[name], self.rounds[base], strict=True))

    def both_ratios(self, name: str, base: str) -> str:
        """The two ratios as a table cell."""
        return f"{self.ratio(name, base):.2f} / {self.paired_ratio(name, base):.2f}"

    @staticmethod
    def pooled(ranks: Sequence[Samples]) -> Samples:
        """All rounds of all ranks: for work without communication."""
        return Samples({name: [took for rank in ranks for took in rank.rounds[name]] for name in ranks[0].rounds})

    @staticmethod
    def slowest(ranks: Sequence[Samples]) -> Samples:
        """Round by round the slowest rank: for work that ends with everybody."""
        return Samples(
            {
                name: [max(turn) for turn in zip(*(rank.rounds[name] for rank in ranks), strict=True)]
                for name in ranks[0].rounds
            }
        )


def take_turns(
    contenders: Mapping[str, Callable[[], object]],
    rounds: int,
    calls: int,
    meet: Callable[[], object] | None = None,
) -> Samples:
    """Time all contenders, in turns.

    Args:
        contenders: what to call, by name; equal names in equal order on all ranks.
        rounds: number of rounds; an unmeasured one first fills all caches.
        calls: calls of a contender within its turn.
        meet: called before every turn, untimed: a barrier, if the contenders communicate.

    Returns:
        Seconds per call.
    """
    names = list(contenders)
    samples: dict[str, list[float]] = {name: [] for name in names}
    clock = time.perf_counter
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()  # what exists already needn't be looked at between the rounds
    gc.disable()
    try:
        for round_ in range(rounds + 1):
            gc.collect()
            # nobody always comes first, or always after the same neighbour
            shift = round_ % len(names)
            order = names[shift:] + names[:shift]
            for name in order if round_ % 2 else reversed(order):
                call = contenders[name]
                if meet is not None:
                    meet()
                start = clock()
                for _ in range(calls):
                    call()
                took = clock() - start
                if round_:
                    samples[name].append(took / calls)
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
    return Samples(samples)


@dataclass(frozen=True)
class Calls:
    """Function calls that a contender makes, exactly.

    Attributes:
        python: calls of functions written in Python.
        native: calls from Python of functions written in C or C++.
    """

    python: int
    native: int


def count_calls(call: Callable[[], object], warm: int = 3) -> Calls:
    """Count the function calls of one steady-state call, not counting `call` itself."""
    for _ in range(warm):
        call()
    counts = {"call": 0, "c_call": 0}

    def profile(_frame: Any, event: str, _argument: Any) -> None:
        if event in counts:
            counts[event] += 1

    previous = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(previous)
    # taking the profiler off is a call, too
    return Calls(counts["call"] - 1, counts["c_call"] - 1)
