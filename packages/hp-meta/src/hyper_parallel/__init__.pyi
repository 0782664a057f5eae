"""Names of `hyper_parallel` for type checkers. Written by build/stubs.py: edit the table, not this file."""

from hp_core import ColwiseParallel as ColwiseParallel
from hp_core import CommTimeoutError as CommTimeoutError
from hp_core import DTensor as DTensor
from hp_core import Description as Description
from hp_core import DeviceMesh as DeviceMesh
from hp_core import Fingerprint as Fingerprint
from hp_core import FlatShard as FlatShard
from hp_core import HyperParallelError as HyperParallelError
from hp_core import Layout as Layout
from hp_core import LayoutError as LayoutError
from hp_core import MeshError as MeshError
from hp_core import NoParallel as NoParallel
from hp_core import ParallelStyle as ParallelStyle
from hp_core import Partial as Partial
from hp_core import Placement as Placement
from hp_core import PlanError as PlanError
from hp_core import PlatformError as PlatformError
from hp_core import PrepareModuleInput as PrepareModuleInput
from hp_core import PrepareModuleInputOutput as PrepareModuleInputOutput
from hp_core import PrepareModuleOutput as PrepareModuleOutput
from hp_core import ProcessGroupError as ProcessGroupError
from hp_core import RaggedShard as RaggedShard
from hp_core import RedistributeError as RedistributeError
from hp_core import ReplicaError as ReplicaError
from hp_core import Replicate as Replicate
from hp_core import RowwiseParallel as RowwiseParallel
from hp_core import SequenceParallel as SequenceParallel
from hp_core import Shard as Shard
from hp_core import ShardingPlan as ShardingPlan
from hp_core import ShardingRuleError as ShardingRuleError
from hp_core import SkipDTensorDispatch as SkipDTensorDispatch
from hp_core import custom_shard as custom_shard
from hp_core import describe as describe
from hp_core import destroy_process_group as destroy_process_group
from hp_core import deterministic as deterministic
from hp_core import dispatch_cache_clear as dispatch_cache_clear
from hp_core import dispatch_cache_info as dispatch_cache_info
from hp_core import distribute_module as distribute_module
from hp_core import distribute_tensor as distribute_tensor
from hp_core import empty as empty
from hp_core import explain_redistribute as explain_redistribute
from hp_core import fingerprint as fingerprint
from hp_core import full as full
from hp_core import get_backend as get_backend
from hp_core import get_current_mesh as get_current_mesh
from hp_core import get_group_local_rank as get_group_local_rank
from hp_core import get_platform as get_platform
from hp_core import get_process_group_ranks as get_process_group_ranks
from hp_core import get_rank as get_rank
from hp_core import get_rng_state as get_rng_state
from hp_core import get_world_size as get_world_size
from hp_core import init_device_mesh as init_device_mesh
from hp_core import init_empty_weights as init_empty_weights
from hp_core import init_on_device as init_on_device
from hp_core import init_parameters as init_parameters
from hp_core import init_process_group as init_process_group
from hp_core import loss_parallel as loss_parallel
from hp_core import manual_seed as manual_seed
from hp_core import ones as ones
from hp_core import parallelize_module as parallelize_module
from hp_core import plan_redistribute as plan_redistribute
from hp_core import rand as rand
from hp_core import randint as randint
from hp_core import randn as randn
from hp_core import recompute_contexts as recompute_contexts
from hp_core import record_collectives as record_collectives
from hp_core import redistribute_cache_clear as redistribute_cache_clear
from hp_core import redistribute_cache_info as redistribute_cache_info
from hp_core import register_sharding_rule as register_sharding_rule
from hp_core import set_rng_state as set_rng_state
from hp_core import shard_module as shard_module
from hp_core import split_group as split_group
from hp_core import unique_state_dict as unique_state_dict
from hp_core import zeros as zeros
from hp_fsdp import CPUOffloadPolicy as CPUOffloadPolicy
from hp_fsdp import HSDPModule as HSDPModule
from hp_fsdp import MixedPrecisionPolicy as MixedPrecisionPolicy
from hp_fsdp import OffloadPolicy as OffloadPolicy
from hp_fsdp import clip_grad_norm_ as clip_grad_norm_
from hp_fsdp import fully_shard as fully_shard
from hp_fsdp import get_hyper_optimizer as get_hyper_optimizer
from hp_fsdp import hsdp_sync_stream as hsdp_sync_stream
from hp_fsdp import total_grad_norm as total_grad_norm
from hp_pipeline import BatchDimSpec as BatchDimSpec
from hp_pipeline import CommComputeOverlap as CommComputeOverlap
from hp_pipeline import MetaStep as MetaStep
from hp_pipeline import MetaStepType as MetaStepType
from hp_pipeline import PipelineStage as PipelineStage
from hp_pipeline import Schedule1F1B as Schedule1F1B
from hp_pipeline import ScheduleGPipe as ScheduleGPipe
from hp_pipeline import ScheduleInterleaved1F1B as ScheduleInterleaved1F1B

from hyper_parallel import debug as debug
from hyper_parallel import kernels as kernels
from hyper_parallel import platform as platform

__version__: str
__all__ = [
    "BatchDimSpec",
    "CPUOffloadPolicy",
    "ColwiseParallel",
    "CommComputeOverlap",
    "CommTimeoutError",
    "DTensor",
    "Description",
    "DeviceMesh",
    "Fingerprint",
    "FlatShard",
    "HSDPModule",
    "HyperParallelError",
    "Layout",
    "LayoutError",
    "MeshError",
    "MetaStep",
    "MetaStepType",
    "MixedPrecisionPolicy",
    "NoParallel",
    "OffloadPolicy",
    "ParallelStyle",
    "Partial",
    "PipelineStage",
    "Placement",
    "PlanError",
    "PlatformError",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "ProcessGroupError",
    "RaggedShard",
    "RedistributeError",
    "ReplicaError",
    "Replicate",
    "RowwiseParallel",
    "Schedule1F1B",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "SequenceParallel",
    "Shard",
    "ShardingPlan",
    "ShardingRuleError",
    "SkipDTensorDispatch",
    "clip_grad_norm_",
    "custom_shard",
    "describe",
    "destroy_process_group",
    "deterministic",
    "dispatch_cache_clear",
    "dispatch_cache_info",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "explain_redistribute",
    "fingerprint",
    "full",
    "fully_shard",
    "get_backend",
    "get_current_mesh",
    "get_group_local_rank",
    "get_hyper_optimizer",
    "get_platform",
    "get_process_group_ranks",
    "get_rank",
    "get_rng_state",
    "get_world_size",
    "hsdp_sync_stream",
    "init_device_mesh",
    "init_empty_weights",
    "init_on_device",
    "init_parameters",
    "init_process_group",
    "loss_parallel",
    "manual_seed",
    "ones",
    "parallelize_module",
    "plan_redistribute",
    "rand",
    "randint",
    "randn",
    "recompute_contexts",
    "record_collectives",
    "redistribute_cache_clear",
    "redistribute_cache_info",
    "register_sharding_rule",
    "set_rng_state",
    "shard_module",
    "split_group",
    "total_grad_norm",
    "unique_state_dict",
    "zeros",
]
