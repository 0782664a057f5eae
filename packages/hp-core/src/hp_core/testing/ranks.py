"""`run_ranks`: call a function on several ranks of this machine and get every rank's result.

The public face of the launcher: it packs the function, keeps one pool of processes per session (`pool.py`) and turns
failed ranks into one readable error (`failures.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import re
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from hp_core.testing.failures import RankFailure, RankTimeout, describe_failure
from hp_core.testing.messages import Call, Raised, Returned, Stuck, qualified_name
from hp_core.testing.pool import Ended, RankPool

__all__ = ["assert_same_error", "close_ranks", "run_ranks"]

T = TypeVar("T")

GRACE_SECONDS = 3.0  # for the peers of a failed rank; a rank whose peer died usually raises within a second

_lock = threading.RLock()
_pool: RankPool | None = None
_owner: int | None = None  # process that made the pool: a forked child must not end its parent's ranks


def run_ranks(
    world_size: int, fn: Callable[..., T], *args: Any, timeout: float = 60.0, init: bool = True, **kwargs: Any
) -> list[T]:
    """Call `fn(*args, **kwargs)` on `world_size` processes of this machine, as ranks 0 to `world_size` - 1.

    The processes are fresh interpreters (never forks), started at the first call and kept for the next ones, with one
    CPU thread each. Functions, classes and closures of scripts and test modules are sent by value; those of packages by
    reference. The environment, the working directory and the import path are restored after each call; what modules
    keep (caches, seeds) stays until `close_ranks()`.

    Example:
        >>> from hp_core.testing import run_ranks
        >>> def total(x):
        ...     from hp_core import DTensor, Partial, init_device_mesh
        ...     import torch
        ...     mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        ...     return DTensor.from_local(torch.tensor(x), mesh, [Partial()]).full_tensor().item()
        >>> run_ranks(4, total, 2.0)
        [8.0, 8.0, 8.0, 8.0]

    Args:
        world_size: number of ranks.
        fn: what to call. Results may be anything that can be pickled, tensors included.
        args: positional arguments of `fn`, equal on all ranks.
        timeout: seconds the call may take, not counting the start of processes.
        init: whether `hp_core.process_group` is initialised (gloo, on CPU). With False the ranks have no process group,
            only the launcher's variables RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE.
        kwargs: keyword arguments of `fn`.

    Returns:
        The results, in the order of ranks.

    Raises:
        RankFailure: a rank raised or died; other ranks get a few seconds to end, then their stacks are in the message.
        RankTimeout: the time ran out; the message holds the stacks of the ranks that hadn't ended.
        TypeError: the function or its arguments can't be pickled.
        ValueError: the world size isn't positive.
    """
    __tracebackhide__ = True
    ended = _run(world_size, fn, args, kwargs, timeout, init)
    if not ended.returned:
        raise _failure(_name(fn), ended)
    return [pickle.loads(outcome.payload) for outcome in ended.outcomes.values() if isinstance(outcome, Returned)]


def assert_same_error(
    world_size: int,
    fn: Callable[..., object],
    exception_type: type[BaseException] | tuple[type[BaseException], ...],
    match: str = "",
    *args: Any,
    timeout: float = 60.0,
    init: bool = True,
    **kwargs: Any,
) -> list[str]:
    """Check that `fn` is refused alike on all ranks: each raises the same type of exception with a matching message.

    Args:
        world_size: number of ranks.
        fn: what to call.
        exception_type: the type, or types, that every rank's exception must be an instance of.
        match: regular expression that must be found in every rank's message.
        args: positional arguments of `fn`.
        timeout: as for `run_ranks`.
        init: as for `run_ranks`.
        kwargs: keyword arguments of `fn`.

    Returns:
        The messages, in the order of ranks.

    Raises:
        RankFailure: ranks raised something else, or raised different types, or died, or hung.
        AssertionError: no rank raised, or a message doesn't match.
    """
    expected = exception_type if isinstance(exception_type, tuple) else (exception_type,)
    wanted = " or ".join(cls.__name__ for cls in expected)
    __tracebackhide__ = True
    ended = _run(world_size, fn, args, kwargs, timeout, init)
    raised = [outcome for outcome in ended.outcomes.values() if isinstance(outcome, Raised)]
    if ended.returned:
        raise AssertionError(f"{_name(fn)}: all {world_size} ranks returned, but {wanted} was expected")
    if (
        ended.preparing
        or len(raised) != world_size
        or not ended.alike
        or not all(_is_instance(one, expected) for one in raised)
    ):
        failure = _failure(_name(fn), ended)
        raise type(failure)(
            f"{wanted} was expected on all {world_size} ranks.\n{failure}", failure.outcomes, failure.exceptions
        ) from failure.__cause__
    for rank, one in enumerate(raised):
        if not re.search(match, one.message):
            raise AssertionError(
                f"{_name(fn)}: the message on rank {rank} doesn't match {match!r}: {one.message}\n{one.traceback}"
            )
    return [one.message for one in raised]


def close_ranks() -> None:
    """End the processes that `run_ranks` keeps; the next call starts new ones. Runs by itself when Python exits."""
    global _pool
    with _lock:
        if _pool is not None and _owner == os.getpid():
            _pool.close()
        _pool = None


def _run(
    world_size: int, fn: Callable[..., object], args: Any, kwargs: dict[str, Any], timeout: float, init: bool
) -> Ended:
    global _pool, _owner
    if world_size < 1:
        raise ValueError(f"run_ranks needs at least one rank, got world_size={world_size}")
    try:
        # The launcher is the only part of hp-core that needs a package beyond the standard library.
        from hp_core.testing.packing import pack_call
    except ModuleNotFoundError as error:
        raise ImportError("run_ranks needs cloudpickle; install it with: pip install 'hp-core[testing]'") from error
    call = Call(pack_call(fn, args, kwargs), tuple(sys.path), os.getcwd())
    with _lock:
        if _pool is None or _owner != os.getpid():
            if _owner is None:
                atexit.register(close_ranks)
            _pool, _owner = RankPool(), os.getpid()
        return _pool.call(world_size, call, init=init, timeout=timeout, grace=GRACE_SECONDS)


def _failure(name: str, ended: Ended) -> RankFailure:
    exceptions: dict[int, BaseException] = {}
    for rank, outcome in ended.outcomes.items():
        if isinstance(outcome, Raised) and outcome.payload is not None:
            # The report has its text anyway, and must not fail over a class that only the rank could import.
            with contextlib.suppress(Exception):
                exceptions[rank] = pickle.loads(outcome.payload)
    what = f"init_process_group before {name}" if ended.preparing else name
    message = describe_failure(what, ended.outcomes, ended.printed, ended.seconds, ended.first)
    hung = any(isinstance(outcome, Stuck) and outcome.timed_out for outcome in ended.outcomes.values())
    failure = (RankTimeout if hung else RankFailure)(message, tuple(ended.outcomes.values()), exceptions)
    failure.__cause__ = exceptions.get(
        -1 if ended.first is None else ended.first, next(iter(exceptions.values()), None)
    )
    return failure


def _is_instance(raised: Raised, expected: Iterable[type[BaseException]]) -> bool:
    # By name: the exception itself may not be picklable.
    return not {qualified_name(cls) for cls in expected}.isdisjoint(raised.type_names)


def _name(fn: Callable[..., object]) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__qualname__", type(fn).__qualname__)
