"""Names of `hyper_parallel.core.shard` for type checkers. Written by build/stubs.py: edit the table, not this file."""

from hp_core import ShardingPlan as ShardingPlan
from hp_core import custom_shard as custom_shard
from hp_core import register_sharding_rule as register_sharding_rule
from hp_core import shard_module as shard_module

__all__ = [
    "ShardingPlan",
    "custom_shard",
    "register_sharding_rule",
    "shard_module",
]
