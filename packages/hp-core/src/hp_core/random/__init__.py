"""Randomness that doesn't depend on the layout: every element is a function of the seed, the call and its global index.

`manual_seed` sets the seed; each random call takes the next offset. All ranks make the same random calls in the same
order, so replicas agree and shards are parts of one global tensor.
"""

from hp_core.random.fill import random_integers, random_like, random_mask
from hp_core.random.state import get_rng_state, manual_seed, next_offset, recompute_contexts, set_rng_state

__all__ = [
    "get_rng_state",
    "manual_seed",
    "next_offset",
    "random_integers",
    "random_like",
    "random_mask",
    "recompute_contexts",
    "set_rng_state",
]
