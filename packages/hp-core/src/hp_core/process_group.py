"""The process world and its groups, as users call them; groups by ranks, made once and by their members only.

Everything here is framework-neutral; the platform's `processes` do the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from hp_core.errors import ProcessGroupError
from hp_core.platform import Group, get_platform
from hp_core.platform.select import require_choice_unchanged

__all__ = [
    "destroy_process_group",
    "get_backend",
    "get_group_local_rank",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group_of_ranks",
    "init_process_group",
    "on_destroy",
    "split_group",
]

_groups: dict[tuple[tuple[int, ...], str], Group] = {}
_clearers: list[Any] = []


def init_process_group(
    backend: str | None = None,
    *,
    init_method: str | None = None,
    world_size: int | None = None,
    rank: int | None = None,
    timeout: timedelta | float | None = None,
) -> None:
    """Join the world of processes.

    Args:
        backend: "gloo", "nccl", "hccl", or per device ("cpu:gloo,npu:hccl"); None takes the device's own (npu: hccl,
            cuda: nccl, cpu: gloo), with gloo beside it for CPU tensors.
        init_method: where processes meet ("tcp://host:port", "file:///path"); default the launcher's MASTER_ADDR/PORT.
        world_size: number of processes; default the launcher's WORLD_SIZE.
        rank: this process; default the launcher's RANK.
        timeout: how long a collective waits for its peers, in seconds or as a timedelta; default 10 minutes.

    Raises:
        ProcessGroupError: the backend can't work here, or the numbers contradict each other or the launcher; raised
            before anything is communicated.
        PlatformError: the environment has come to name another framework than the one in use.
    """
    require_choice_unchanged()
    if timeout is not None and not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=timeout)
    get_platform().processes.init_world(
        backend, init_method=init_method, world_size=world_size, rank=rank, timeout=timeout
    )


def destroy_process_group() -> None:
    """Leave the world; groups, and caches that hold them, are dropped."""
    _groups.clear()
    for clear in _clearers:
        clear()
    get_platform().processes.destroy_world()


def on_destroy(clear: Any) -> Any:
    """Register a function (usable as a decorator) that drops what holds groups when the world is destroyed."""
    _clearers.append(clear)
    return clear


def get_rank() -> int:
    """Global rank of this process; what the launcher says before the world exists, else 0."""
    return get_platform().processes.rank()


def get_world_size() -> int:
    """Number of processes; what the launcher says before the world exists, else 1."""
    return get_platform().processes.world_size()


def get_backend(group: Group | None = None) -> str:
    """Name of the communication backend of a group (default: of the world)."""
    processes = get_platform().processes
    if not processes.is_initialized():
        raise ProcessGroupError("there is no process world yet; call init_process_group() first.")
    return processes.backend(group)


def get_process_group_ranks(group: Group) -> list[int]:
    """Global ranks of a group, ascending."""
    return list(group.ranks)


def get_group_local_rank(group: Group | None = None) -> int:
    """Position of this process in a group (default: in the world)."""
    rank = get_rank()
    if group is None:
        return rank
    if rank not in group.ranks:
        raise ProcessGroupError(f"rank {rank} is not in the group of ranks {list(group.ranks)}.")
    return group.ranks.index(rank)


def split_group(split_ranks: Sequence[Sequence[int]]) -> Group:
    """Cut the world into groups; each rank gets its own, and only members take part in making one.

    Args:
        split_ranks: disjoint lists of global ranks; the same argument on every rank.

    Raises:
        ProcessGroupError: a rank is outside the world or named twice, or this rank is in none of the lists.
    """
    flat = [rank for ranks in split_ranks for rank in ranks]
    world = get_world_size()
    outside = [rank for rank in flat if not 0 <= rank < world]
    if outside or len(set(flat)) != len(flat):
        raise ProcessGroupError(
            f"split_group({[list(ranks) for ranks in split_ranks]}): "
            + (f"ranks {outside} are outside the world of {world}." if outside else "a rank stands in two groups.")
        )
    own = next((ranks for ranks in split_ranks if get_rank() in ranks), None)
    if own is None:
        raise ProcessGroupError(f"rank {get_rank()} is in none of the groups {[list(ranks) for ranks in split_ranks]}.")
    return group_of_ranks(tuple(sorted(own)))


def group_of_ranks(ranks: tuple[int, ...], purpose: str = "") -> Group:
    """The group of these ascending global ranks, made when first asked for; one rank alone needs no world.

    Args:
        ranks: the members, all of which ask, and in the same order as for their other groups.
        purpose: communication for different purposes goes through groups of its own, so that a device's queues are too.
    """
    group = _groups.get((ranks, purpose))
    if group is None:
        group = Group(ranks) if len(ranks) == 1 else get_platform().processes.new_group(ranks, bool(purpose))
        _groups[ranks, purpose] = group
    return group
