"""Names of `hp_fsdp` for type checkers. Written by build/stubs.py: edit the table, not this file."""

from hp_fsdp.clip import clip_grad_norm_ as clip_grad_norm_
from hp_fsdp.clip import total_grad_norm as total_grad_norm
from hp_fsdp.hsdp_module import HSDPModule as HSDPModule
from hp_fsdp.optim.hyper import get_hyper_optimizer as get_hyper_optimizer
from hp_fsdp.policy import CPUOffloadPolicy as CPUOffloadPolicy
from hp_fsdp.policy import MixedPrecisionPolicy as MixedPrecisionPolicy
from hp_fsdp.policy import OffloadPolicy as OffloadPolicy
from hp_fsdp.root import hsdp_sync_stream as hsdp_sync_stream
from hp_fsdp.sharding import fully_shard as fully_shard

__version__: str
EXPORTS: dict[str, str]
__all__ = [
    "CPUOffloadPolicy",
    "HSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "clip_grad_norm_",
    "fully_shard",
    "get_hyper_optimizer",
    "hsdp_sync_stream",
    "total_grad_norm",
]
