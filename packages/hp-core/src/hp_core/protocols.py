"""Small protocols by which components meet without importing each other.

A component that implements one (hp-fsdp, say) and a component that uses it (hp-pipeline) both import only this file.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

__all__ = ["ShardedModule"]


@runtime_checkable
class ShardedModule(Protocol):
    """A module whose parameters can be gathered, sharded again, and whose gradient reduction can be deferred."""

    def unshard(self, async_op: bool = False) -> Any:
        """Gather the parameters; with `async_op` return a handle whose `wait()` finishes it."""

    def reshard(self) -> None:
        """Free the gathered parameters and keep the shards."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether the next backward reduces gradients over the data-parallel ranks."""

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward is the last before the optimizer steps."""
