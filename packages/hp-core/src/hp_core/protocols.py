"""Small protocols by which components meet without importing each other.

A component that implements one (hp-fsdp, say) and a component that uses it (hp-pipeline) both import only this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

__all__ = ["DescribedModule", "ShardedModule", "StagedModule", "UnitDescription"]


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


@dataclass(frozen=True, slots=True)
class UnitDescription:
    """Parameters that are communicated together, for `hp_core.debug.describe`.

    Attributes:
        identity: a number of the unit; modules of one unit give the same.
        name: what to call it.
        state: where its parameters are, in a word: "sharded", "gathering", "whole".
        parameters: how many it has.
        holders: the modules and names under which they are held; a tied one under several.
        ranks: what its parts are called and how many there are, outermost first: {"replicas": 2, "shards": 2}.
        shard_bytes: this rank's part.
        whole_bytes: the parameters when they are gathered, in the type they are computed in.
        gathered: whether that memory is taken now.
        padding: share of the whole that belongs to no parameter.
        waiting: what it holds that wasn't reduced, in words; empty if nothing.
    """

    identity: int
    name: str
    state: str
    parameters: int
    holders: tuple[tuple[Any, str], ...]
    ranks: dict[str, int]
    shard_bytes: int
    whole_bytes: int
    gathered: bool
    padding: float
    waiting: str = ""


@runtime_checkable
class DescribedModule(Protocol):
    """A module whose parameters a component has taken over, and which can say how."""

    def describe_unit(self) -> UnitDescription:
        """The unit that it is part of; nothing is communicated."""


@runtime_checkable
class StagedModule(Protocol):
    """A stage of a pipeline: a module and its place."""

    submodule: Any
    stage_index: int
    stage_num: int
    group: Any
