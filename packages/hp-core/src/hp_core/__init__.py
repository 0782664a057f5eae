"""hp-core: meshes, layouts, distributed tensors, redistribution and tensor parallelism.

Every public name is here, and is loaded when it is first used: `import hp_core` loads no framework.
`__init__.pyi` lists the same names for type checkers; `python build/stubs.py` writes it from `EXPORTS`.
"""

from __future__ import annotations

from hp_core.lazy_exports import lazy_exports

# Public name -> module that defines it.
EXPORTS = {
    "CommTimeoutError": "errors",
    "HyperParallelError": "errors",
    "LayoutError": "errors",
    "MeshError": "errors",
    "PlanError": "errors",
    "PlatformError": "errors",
    "ProcessGroupError": "errors",
    "RedistributeError": "errors",
    "ShardingRuleError": "errors",
    "Partial": "placement",
    "Placement": "placement",
    "RaggedShard": "placement",
    "Replicate": "placement",
    "Shard": "placement",
    "get_platform": "platform",
    "record_collectives": "platform.recorder",
    "destroy_process_group": "process_group",
    "get_backend": "process_group",
    "get_group_local_rank": "process_group",
    "get_process_group_ranks": "process_group",
    "get_rank": "process_group",
    "get_world_size": "process_group",
    "init_process_group": "process_group",
    "split_group": "process_group",
    "DeviceMesh": "mesh",
    "get_current_mesh": "mesh",
    "init_device_mesh": "mesh",
    "Layout": "layout",
    "explain_redistribute": "redistribute",
    "plan_redistribute": "redistribute",
    "redistribute_cache_clear": "redistribute",
    "redistribute_cache_info": "redistribute",
    "manual_seed": "random",
    "register_sharding_rule": "rules.registry",
    "DTensor": "dtensor.api",
    "SkipDTensorDispatch": "dtensor.dispatch",
    "dispatch_cache_clear": "dtensor.dispatch",
    "dispatch_cache_info": "dtensor.dispatch",
    "custom_shard": "dtensor.custom_shard",
    "distribute_module": "dtensor.distribute",
    "distribute_tensor": "dtensor.distribute",
    "empty": "dtensor.factories",
    "full": "dtensor.factories",
    "ones": "dtensor.factories",
    "init_empty_weights": "dtensor.initialize",
    "init_on_device": "dtensor.initialize",
    "init_parameters": "dtensor.initialize",
    "rand": "dtensor.factories",
    "randn": "dtensor.factories",
    "zeros": "dtensor.factories",
    "unique_state_dict": "dtensor.state",
    "ColwiseParallel": "tensor_parallel",
    "NoParallel": "tensor_parallel",
    "ParallelStyle": "tensor_parallel",
    "PrepareModuleInput": "tensor_parallel",
    "PrepareModuleInputOutput": "tensor_parallel",
    "PrepareModuleOutput": "tensor_parallel",
    "RowwiseParallel": "tensor_parallel",
    "SequenceParallel": "tensor_parallel",
    "ShardingPlan": "tensor_parallel",
    "loss_parallel": "tensor_parallel",
    "parallelize_module": "tensor_parallel",
    "shard_module": "tensor_parallel",
}

__getattr__, __dir__, __all__ = lazy_exports(__name__, "hp-core", EXPORTS)
