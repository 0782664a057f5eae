"""Names of `hyper_parallel.core.dtensor.placement_types` for type checkers. Written by build/stubs.py: edit the table, not this file."""

from hp_core import FlatShard as FlatShard
from hp_core import Partial as Partial
from hp_core import Placement as Placement
from hp_core import RaggedShard as RaggedShard
from hp_core import Replicate as Replicate
from hp_core import Shard as Shard

__all__ = [
    "FlatShard",
    "Partial",
    "Placement",
    "RaggedShard",
    "Replicate",
    "Shard",
]
