"""One rank of the launcher: a process that calls the functions it is sent.

Started by `pool.py` as `python -m hp_core.testing.worker <pipe> <stack file>`. The main thread runs the calls; a second
one reads the pipe, so that a rank ends with its parent even while a call hangs.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import queue
import shutil
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle  # type: ignore[import-untyped, unused-ignore]

from hp_core.testing.messages import Call, Prepare, Raised, Reply, Request, Returned, Stop, qualified_name

__all__ = ["main"]

# The pool runs on CPU. A test that wants another backend passes init=False and initialises a group of its own.
BACKEND = "gloo"


def main(pipe: int, stack_file: str) -> None:
    """Serve requests until told to stop, or until the parent is gone.

    Args:
        pipe: file descriptor of this end of the pipe to the parent.
        stack_file: file that gets the Python stacks of all threads whenever SIGUSR1 arrives.
    """
    # Written by a C signal handler: works while the main thread is blocked inside a collective. Stays open for good.
    stacks = open(stack_file, "ab", buffering=0)  # noqa: SIM115
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    connection = Connection(pipe)
    requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, requests, stack_file), name="pipe", daemon=True).start()
    while not isinstance(request := requests.get(), Stop):
        connection.send(_prepare(request) if isinstance(request, Prepare) else _call(request))
    _leave_group()


def _read(connection: Connection[Any, Any], requests: queue.SimpleQueue[Request], stack_file: str) -> None:
    try:
        while True:
            requests.put(connection.recv())
    except (EOFError, OSError):
        # The parent is gone without a word, and can't remove the pool's folder any more. The main thread may hang in a
        # collective, so there is no orderly end from here.
        shutil.rmtree(os.path.dirname(stack_file), ignore_errors=True)
        os._exit(1)


def _prepare(request: Prepare) -> Reply:
    try:
        _leave_group()
        os.environ.update(
            RANK=str(request.rank),
            LOCAL_RANK=str(request.rank),
            WORLD_SIZE=str(request.world_size),
            LOCAL_WORLD_SIZE=str(request.world_size),
        )
        if request.init_method is not None:
            from hp_core.process_group import init_process_group

            init_process_group(
                BACKEND, init_method=request.init_method, world_size=request.world_size, rank=request.rank
            )
        return Returned(cloudpickle.dumps(None), _has_group())
    except BaseException as error:
        return _raised(error)


def _call(request: Call) -> Reply:
    environment, import_path, folder = dict(os.environ), list(sys.path), os.getcwd()
    try:
        sys.path[:] = request.import_path
        os.chdir(request.folder)
        fn, args, kwargs = pickle.loads(request.payload)
        result = fn(*args, **kwargs)
        return Returned(cloudpickle.dumps(result), _has_group())
    except BaseException as error:  # SystemExit and KeyboardInterrupt of the function must not end the pool
        return _raised(error)
    finally:
        sys.path[:] = import_path
        if os.path.isdir(folder):
            os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)


def _raised(error: BaseException) -> Raised:
    # The first frame is this file's own call of the function.
    if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
        error = error.with_traceback(error.__traceback__.tb_next)
    text = "".join(traceback.format_exception(error))
    names = tuple(qualified_name(cls) for cls in type(error).__mro__ if cls is not object)
    payload: bytes | None
    try:
        payload = cloudpickle.dumps(error)
        pickle.loads(payload)  # an exception with arguments of its own often pickles, and fails only here
    except Exception:
        payload = None
    try:
        message = str(error)
    except Exception as broken:
        message = f"<str() of the exception raised {type(broken).__name__}>"
    return Raised(names, message, text, payload)


def _has_group() -> bool:
    # Asked only if something has loaded it, so that a rank without a group stays free of frameworks.
    if "hp_core.process_group" not in sys.modules:
        return False
    from hp_core.errors import HyperParallelError
    from hp_core.process_group import get_backend

    try:
        get_backend()
    except (HyperParallelError, RuntimeError, ValueError):
        return False
    return True


def _leave_group() -> None:
    if _has_group():
        from hp_core.process_group import destroy_process_group

        destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
