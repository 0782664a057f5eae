"""The state of the generator: a seed, and how many random calls were made under it.

It is one pair of integers, alike on all ranks, that can be read and set. Activation recomputation must set it back to
where the forward began; `recompute_contexts` does so, and a random call that is recomputed without it is refused.
"""

from __future__ import annotations

from typing import Any

from hp_core.errors import ShardingRuleError
from hp_core.platform import get_platform

__all__ = ["get_rng_state", "manual_seed", "next_offset", "recompute_contexts", "set_rng_state"]

RngState = tuple[int, int]
"""Seed and number of random calls made."""

_state = {"seed": 0, "offset": 0, "replays": 0}


def manual_seed(seed: int) -> None:
    """Start the stream of random tensors anew; call it alike on all ranks.

    Args:
        seed: its low 64 bits count. Before the first call the seed is 0.
    """
    set_rng_state((int(seed), 0))


def get_rng_state() -> RngState:
    """Seed and number of random calls made: all there is, so that a checkpoint of a run can hold it."""
    return _state["seed"], _state["offset"]


def set_rng_state(state: RngState) -> None:
    """Go on from a state that `get_rng_state` told; call it alike on all ranks."""
    seed, offset = state
    _state["seed"], _state["offset"] = int(seed), int(offset)


def next_offset() -> RngState:
    """Seed and offset of the next random call.

    Raises:
        ShardingRuleError: a forward is being recomputed inside a backward, and would draw other numbers than it did.
    """
    if not _state["replays"] and get_platform().autograd.recomputes():
        raise ShardingRuleError(
            "a random op on DTensors is recomputed in backward, where it would draw other numbers than in forward. Give the "
            "checkpoint the generator's state: checkpoint(function, ..., use_reentrant=False, context_fn=recompute_contexts)."
        )
    state = get_rng_state()
    _state["offset"] += 1
    return state


def recompute_contexts() -> tuple[Any, Any]:
    """Contexts for the forward and for the recomputation of one region, so that both draw the same numbers.

    What `torch.utils.checkpoint.checkpoint` takes as `context_fn` (with `use_reentrant=False`)::

        y = checkpoint(block, x, use_reentrant=False, context_fn=recompute_contexts)
    """
    forward = _Remembers()
    return forward, _Replays(forward)


class _Remembers:
    """Keeps the state in which a region began."""

    state: RngState

    def __enter__(self) -> None:
        self.state = get_rng_state()

    def __exit__(self, *_: object) -> None:
        return None


class _Replays:
    """Begins in the state of the forward, and leaves the state as it found it."""

    def __init__(self, forward: _Remembers) -> None:
        self._forward = forward
        self._outside: list[RngState] = []

    def __enter__(self) -> None:
        self._outside.append(get_rng_state())
        set_rng_state(self._forward.state)
        _state["replays"] += 1

    def __exit__(self, *_: object) -> None:
        _state["replays"] -= 1
        set_rng_state(self._outside.pop())
