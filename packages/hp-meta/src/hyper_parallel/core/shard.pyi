"""Names of `hyper_parallel.core.shard` for type checkers. Written by build/stubs.py: edit the table, not this file."""

from hp_core import register_sharding_rule as register_sharding_rule

__all__ = [
    "register_sharding_rule",
]
