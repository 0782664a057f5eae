"""Randomness that doesn't depend on the layout: every element is a function of the seed, the call and its global index.

`manual_seed` sets the seed; each random call takes the next offset. All ranks make the same random calls in the same
order, so replicas agree and shards are parts of one global tensor.
"""

from hp_core.random.fill import manual_seed, next_offset, random_like

__all__ = ["manual_seed", "next_offset", "random_like"]
