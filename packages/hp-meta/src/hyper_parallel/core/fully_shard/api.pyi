"""Names of `hyper_parallel.core.fully_shard.api` for type checkers. Written by build/stubs.py: edit the table, not this file."""

from hp_fsdp import CPUOffloadPolicy as CPUOffloadPolicy
from hp_fsdp import HSDPModule as HSDPModule
from hp_fsdp import MixedPrecisionPolicy as MixedPrecisionPolicy
from hp_fsdp import OffloadPolicy as OffloadPolicy
from hp_fsdp import fully_shard as fully_shard
from hp_fsdp import hsdp_sync_stream as hsdp_sync_stream

__all__ = [
    "CPUOffloadPolicy",
    "HSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "fully_shard",
    "hsdp_sync_stream",
]
