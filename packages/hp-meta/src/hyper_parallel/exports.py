"""Which component provides each public name, and what to install when it is missing.

`NAMES` is the whole surface of the umbrella: for each of its modules, the names by component. Nothing is loaded before
a name is used. A new component adds its names here and its range to this distribution's dependencies; `build/stubs.py`
then writes the stubs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType

__all__ = ["NAMES", "available", "lazy_names"]

_PLACEMENTS = ("FlatShard", "Partial", "Placement", "RaggedShard", "Replicate", "Shard")
_MESH = ("DeviceMesh", "get_current_mesh", "init_device_mesh")
_WEIGHTS = ("init_empty_weights", "init_on_device", "init_parameters")
_FACTORIES = ("empty", "full", "ones", "rand", "randint", "randn", "zeros")
_DTENSOR = ("DTensor", "SkipDTensorDispatch", "distribute_module", "distribute_tensor")
_STYLES = (
    "ColwiseParallel",
    "NoParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "loss_parallel",
    "parallelize_module",
)
_SHARDING = ("ShardingPlan", "custom_shard", "register_sharding_rule", "shard_module")
_PIPELINE = (
    "BatchDimSpec",
    "CommComputeOverlap",
    "MetaStep",
    "MetaStepType",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
)
_DEBUGGING = (
    "Description",
    "Fingerprint",
    "describe",
    "dispatch_cache_info",
    "explain_redistribute",
    "fingerprint",
    "record_collectives",
    "redistribute_cache_info",
)
_KERNELS = (
    "KernelArgumentError",
    "Permuted",
    "build_info",
    "cast_into",
    "fill_random",
    "lse_merge",
    "lse_merge_",
    "moe_permute",
    "moe_unpermute",
    "pack",
    "pack_into",
    "unpack",
    "unpack_into",
)
_FULLY_SHARD = ("HSDPModule", "fully_shard", "hsdp_sync_stream")
_FSDP_POLICIES = ("CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy")
_FSDP_TOOLS = ("clip_grad_norm_", "get_hyper_optimizer", "total_grad_norm")
_CONTEXT_PARALLEL = ("AsyncContextParallel", "ContextParallel")
_ACTIVATIONS = (
    "CheckpointPolicy",
    "SwapManager",
    "checkpoint",
    "checkpoint_wrapper",
    "swap",
    "swap_tensor_wrapper",
    "swap_wrapper",
)

# Module of the umbrella -> component's package -> names. The distribution of hp_core is hp-core, and so on.
NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "hyper_parallel": {
        "hp_core": (
            "CommTimeoutError",
            "HyperParallelError",
            "Layout",
            "LayoutError",
            "MeshError",
            "PlanError",
            "PlatformError",
            "ProcessGroupError",
            "RedistributeError",
            "ReplicaError",
            "ShardingRuleError",
            "destroy_process_group",
            "explain_redistribute",
            "get_backend",
            "get_group_local_rank",
            "get_platform",
            "get_process_group_ranks",
            "get_rank",
            "get_world_size",
            "init_process_group",
            "get_rng_state",
            "manual_seed",
            "recompute_contexts",
            "set_rng_state",
            "plan_redistribute",
            "record_collectives",
            "dispatch_cache_clear",
            "dispatch_cache_info",
            "redistribute_cache_clear",
            "redistribute_cache_info",
            "split_group",
            "unique_state_dict",
            "Description",
            "Fingerprint",
            "describe",
            "deterministic",
            "fingerprint",
            *_PLACEMENTS,
            *_MESH,
            *_DTENSOR,
            *_WEIGHTS,
            *_FACTORIES,
            *_STYLES,
            *_SHARDING,
        ),
        "hp_fsdp": (*_FULLY_SHARD, *_FSDP_POLICIES, *_FSDP_TOOLS),
        "hp_pipeline": _PIPELINE,
        "hp_cp": _CONTEXT_PARALLEL,
    },
    # The paths that existing scripts import.
    "hyper_parallel.core.dtensor": {"hp_core": ("Layout", *_MESH, *_PLACEMENTS, *_DTENSOR, *_WEIGHTS, *_FACTORIES)},
    "hyper_parallel.core.dtensor.device_mesh": {"hp_core": _MESH},
    "hyper_parallel.core.dtensor.dtensor": {"hp_core": _DTENSOR},
    "hyper_parallel.core.dtensor.init_weights": {"hp_core": _WEIGHTS},
    "hyper_parallel.core.dtensor.layout": {"hp_core": ("Layout",)},
    "hyper_parallel.core.dtensor.placement_types": {"hp_core": _PLACEMENTS},
    "hyper_parallel.core.shard": {"hp_core": _SHARDING},
    "hyper_parallel.core.tensor_parallel": {"hp_core": _STYLES},
    "hyper_parallel.core.fully_shard": {"hp_fsdp": (*_FULLY_SHARD, *_FSDP_POLICIES)},
    "hyper_parallel.core.fully_shard.api": {"hp_fsdp": (*_FULLY_SHARD, *_FSDP_POLICIES)},
    "hyper_parallel.core.optimizer": {"hp_fsdp": ("get_hyper_optimizer",)},
    "hyper_parallel.core.pipeline_parallel": {"hp_pipeline": _PIPELINE},
    "hyper_parallel.core.context_parallel": {"hp_cp": _CONTEXT_PARALLEL},
    "hyper_parallel.core.activation_checkpoint": {"hp_swap": _ACTIVATIONS},
    "hyper_parallel.kernels": {"hp_kernels": _KERNELS},
    "hyper_parallel.platform": {"hp_core": ("get_platform",)},
    "hyper_parallel.debug": {"hp_core": _DEBUGGING},
}


def available(module: str) -> dict[str, str]:
    """Names of a module of the umbrella that the installed components provide, each with its component's package."""
    found = {}
    for component, names in NAMES[module].items():
        try:
            provided = set(import_module(component).__all__)
        except ModuleNotFoundError as error:
            if error.name != component:
                raise
            continue
        found.update({name: component for name in names if name in provided})
    return dict(sorted(found.items()))


def lazy_names(module: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Make `__getattr__` and `__dir__` of a module of the umbrella.

    Args:
        module: the module's own `__name__`, a key of `NAMES`.

    Returns:
        The two, in this order. `__all__` is computed on demand too: it holds what the installed components provide, so
        that a star import brings all of it instead of failing on the first absent component.
    """
    owners = {name: component for component, names in NAMES[module].items() for name in names}

    def getattr_(name: str) -> object:
        if name == "__all__":
            # Not kept: a component may be installed while this runs (in a notebook, say).
            return list(available(module))
        if name == "__version__" and module == "hyper_parallel":
            from importlib.metadata import version

            value: object = version("hyper-parallel")
        elif f"{module}.{name}" in NAMES:
            value = import_module(f"{module}.{name}")  # hyper_parallel.debug, of an `import hyper_parallel` alone
        elif name in owners:
            value = getattr(_component(owners[name], module, name), name)
        else:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        setattr(sys.modules[module], name, value)
        return value

    def dir_() -> list[str]:
        return sorted({*vars(sys.modules[module]), *available(module)})

    return getattr_, dir_


def _component(package: str, module: str, name: str) -> ModuleType:
    """Import the component that provides a name, or say what to install."""
    distribution = package.replace("_", "-")
    try:
        component = import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise  # The component is there, and misses something of its own.
        raise ImportError(
            f"{module}.{name} is part of {distribution}, which is not installed: pip install {distribution}",
            name=package,
        ) from None
    if name not in component.__all__:
        raise ImportError(
            f"{module}.{name} is not in the installed {distribution} {component.__version__}: "
            f"pip install --upgrade {distribution}",
            name=package,
        )
    return component
