"""The one hierarchy of errors of HyperParallel.

Every error says what happened, where (rank, axis, shapes) and what to do. Errors about bad input are raised before any
communication and from facts that are equal on all ranks, so that all ranks raise alike and none is left waiting.
"""

from __future__ import annotations

__all__ = [
    "CommTimeoutError",
    "HyperParallelError",
    "LayoutError",
    "MeshError",
    "PlanError",
    "PlatformError",
    "ProcessGroupError",
    "RedistributeError",
    "ReplicaError",
    "ShardingRuleError",
]


class HyperParallelError(Exception):
    """Base of all errors that HyperParallel raises on purpose."""


class PlatformError(HyperParallelError, RuntimeError):
    """No usable framework, or the framework, device and backend don't fit together."""


class ProcessGroupError(HyperParallelError, RuntimeError):
    """The process world or a group is missing, or contradicts what was asked."""


class CommTimeoutError(HyperParallelError, TimeoutError):
    """A peer didn't answer in time; the message names who waited for whom."""


class MeshError(HyperParallelError, ValueError):
    """A mesh or a mesh axis is not what was asked for."""


class LayoutError(HyperParallelError, ValueError):
    """A layout contradicts its mesh, or the shape of a tensor."""


class RedistributeError(HyperParallelError, ValueError):
    """There is no legal way from one layout to another."""


class ShardingRuleError(HyperParallelError, RuntimeError):
    """An op can't run on these layouts, or has no sharding rule."""


class PlanError(HyperParallelError, ValueError):
    """A parallelisation plan doesn't fit the module it is applied to."""


class ReplicaError(HyperParallelError, RuntimeError):
    """Ranks that should hold the very same bits don't."""
