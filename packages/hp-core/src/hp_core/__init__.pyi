"""Names of `hp_core` for type checkers. Written by build/stubs.py: edit the table, not this file."""

from hp_core.debug.description import Description as Description
from hp_core.debug.description import describe as describe
from hp_core.debug.fingerprints import Fingerprint as Fingerprint
from hp_core.debug.fingerprints import fingerprint as fingerprint
from hp_core.determinism import deterministic as deterministic
from hp_core.dtensor.api import DTensor as DTensor
from hp_core.dtensor.custom_shard import custom_shard as custom_shard
from hp_core.dtensor.dispatch import SkipDTensorDispatch as SkipDTensorDispatch
from hp_core.dtensor.dispatch import dispatch_cache_clear as dispatch_cache_clear
from hp_core.dtensor.dispatch import dispatch_cache_info as dispatch_cache_info
from hp_core.dtensor.distribute import distribute_module as distribute_module
from hp_core.dtensor.distribute import distribute_tensor as distribute_tensor
from hp_core.dtensor.factories import empty as empty
from hp_core.dtensor.factories import full as full
from hp_core.dtensor.factories import ones as ones
from hp_core.dtensor.factories import rand as rand
from hp_core.dtensor.factories import randint as randint
from hp_core.dtensor.factories import randn as randn
from hp_core.dtensor.factories import zeros as zeros
from hp_core.dtensor.initialize import init_empty_weights as init_empty_weights
from hp_core.dtensor.initialize import init_on_device as init_on_device
from hp_core.dtensor.initialize import init_parameters as init_parameters
from hp_core.dtensor.state import unique_state_dict as unique_state_dict
from hp_core.errors import CommTimeoutError as CommTimeoutError
from hp_core.errors import HyperParallelError as HyperParallelError
from hp_core.errors import LayoutError as LayoutError
from hp_core.errors import MeshError as MeshError
from hp_core.errors import PlanError as PlanError
from hp_core.errors import PlatformError as PlatformError
from hp_core.errors import ProcessGroupError as ProcessGroupError
from hp_core.errors import RedistributeError as RedistributeError
from hp_core.errors import ReplicaError as ReplicaError
from hp_core.errors import ShardingRuleError as ShardingRuleError
from hp_core.layout import Layout as Layout
from hp_core.mesh import DeviceMesh as DeviceMesh
from hp_core.mesh import get_current_mesh as get_current_mesh
from hp_core.mesh import init_device_mesh as init_device_mesh
from hp_core.placement import FlatShard as FlatShard
from hp_core.placement import Partial as Partial
from hp_core.placement import Placement as Placement
from hp_core.placement import RaggedShard as RaggedShard
from hp_core.placement import Replicate as Replicate
from hp_core.placement import Shard as Shard
from hp_core.platform import get_platform as get_platform
from hp_core.platform.recorder import record_collectives as record_collectives
from hp_core.process_group import destroy_process_group as destroy_process_group
from hp_core.process_group import get_backend as get_backend
from hp_core.process_group import get_group_local_rank as get_group_local_rank
from hp_core.process_group import get_process_group_ranks as get_process_group_ranks
from hp_core.process_group import get_rank as get_rank
from hp_core.process_group import get_world_size as get_world_size
from hp_core.process_group import init_process_group as init_process_group
from hp_core.process_group import split_group as split_group
from hp_core.random import get_rng_state as get_rng_state
from hp_core.random import manual_seed as manual_seed
from hp_core.random import recompute_contexts as recompute_contexts
from hp_core.random import set_rng_state as set_rng_state
from hp_core.redistribute import explain_redistribute as explain_redistribute
from hp_core.redistribute import plan_redistribute as plan_redistribute
from hp_core.redistribute import redistribute_cache_clear as redistribute_cache_clear
from hp_core.redistribute import redistribute_cache_info as redistribute_cache_info
from hp_core.rules.registry import register_sharding_rule as register_sharding_rule
from hp_core.tensor_parallel import ColwiseParallel as ColwiseParallel
from hp_core.tensor_parallel import NoParallel as NoParallel
from hp_core.tensor_parallel import ParallelStyle as ParallelStyle
from hp_core.tensor_parallel import PrepareModuleInput as PrepareModuleInput
from hp_core.tensor_parallel import PrepareModuleInputOutput as PrepareModuleInputOutput
from hp_core.tensor_parallel import PrepareModuleOutput as PrepareModuleOutput
from hp_core.tensor_parallel import RowwiseParallel as RowwiseParallel
from hp_core.tensor_parallel import SequenceParallel as SequenceParallel
from hp_core.tensor_parallel import ShardingPlan as ShardingPlan
from hp_core.tensor_parallel import loss_parallel as loss_parallel
from hp_core.tensor_parallel import parallelize_module as parallelize_module
from hp_core.tensor_parallel import shard_module as shard_module

__version__: str
EXPORTS: dict[str, str]
__all__ = [
    "ColwiseParallel",
    "CommTimeoutError",
    "DTensor",
    "Description",
    "DeviceMesh",
    "Fingerprint",
    "FlatShard",
    "HyperParallelError",
    "Layout",
    "LayoutError",
    "MeshError",
    "NoParallel",
    "ParallelStyle",
    "Partial",
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
    "SequenceParallel",
    "Shard",
    "ShardingPlan",
    "ShardingRuleError",
    "SkipDTensorDispatch",
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
    "get_backend",
    "get_current_mesh",
    "get_group_local_rank",
    "get_platform",
    "get_process_group_ranks",
    "get_rank",
    "get_rng_state",
    "get_world_size",
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
    "unique_state_dict",
    "zeros",
]
