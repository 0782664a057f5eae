"""The processes behind `run_ranks`: started once, kept between calls, replaced when a call may have spoilt them.

The process group is kept while the world size stays the same. It is made anew after an exception that all ranks raised
alike, and all processes are started anew after ranks ended in different ways: a half-done collective can't reach the
next call.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from hp_core.testing.failures import Printed
from hp_core.testing.messages import Call, Died, Outcome, Prepare, Raised, Request, Returned, Stop, Stuck
from hp_core.testing.stacks import readable_stacks

__all__ = ["Ended", "RankPool"]

START_SECONDS = 60.0  # to start the interpreters, load the framework and meet; the first load from a cold disk is slow
LEAVE_SECONDS = 3.0  # to leave a group and end in order; then the process is killed
STACK_SECONDS = 2.0  # for a rank to write its stacks
SHOWN_CHARACTERS = 8000  # of each rank's stdout and stderr


class _Worker:
    """One child process and the files it writes."""

    def __init__(self, number: int, folder: Path) -> None:
        self._stdout, self._stderr, self._stacks = (
            folder / f"{number}.{kind}" for kind in ("stdout", "stderr", "stacks")
        )
        self._stacks.touch()
        ours, theirs = Pipe()
        environment = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", PYTHONUNBUFFERED="1")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        command = [sys.executable, "-m", "hp_core.testing.worker", str(theirs.fileno()), str(self._stacks)]
        # Appending files, so that the parent may empty them before each call. A session of its own, so that Ctrl-C
        # reaches the parent only, which then ends its ranks.
        with theirs, self._stdout.open("ab") as stdout, self._stderr.open("ab") as stderr:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.connection: Connection[Any, Any] = ours

    def alive(self) -> bool:
        return self.process.poll() is None

    def send(self, request: Request) -> None:
        # A worker that is gone shows as an end of file when its answer is read.
        with contextlib.suppress(OSError):
            self.connection.send(request)

    def forget_output(self) -> None:
        for file in (self._stdout, self._stderr):
            os.truncate(file, 0)

    def printed(self) -> Printed:
        return Printed(_tail(self._stdout), _tail(self._stderr))

    def ask_for_stacks(self) -> None:
        os.truncate(self._stacks, 0)
        if self.alive():
            self.process.send_signal(signal.SIGUSR1)

    def read_stacks(self, until: float) -> str:
        """Wait until the stacks are written and the file has stopped growing, at the latest until `until`."""
        size = 0
        while time.monotonic() < until:
            time.sleep(0.05)
            now = self._stacks.stat().st_size
            if now and now == size:
                return readable_stacks(self._stacks.read_text(errors="replace"))
            size = now
        return "(the process wrote no stack)"

    def death(self) -> Died:
        """Say how the process ended, ending it if it only closed its pipe."""
        try:
            code = self.process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return Died("it closed its pipe to the launcher but went on running; it has been killed")
        if code < 0:
            names = {member.value: member.name for member in signal.Signals}
            return Died(f"killed by signal {names.get(-code, -code)}")
        return Died(f"exit code {code}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


@dataclass(frozen=True)
class Ended:
    """How a call ended on all ranks.

    Attributes:
        outcomes: by rank.
        printed: the end of each rank's output, by rank.
        first: the rank that failed first, if any did before the time ran out.
        seconds: how long the call ran.
        preparing: True if the ranks failed to meet, and the function wasn't called.
    """

    outcomes: Mapping[int, Outcome]
    printed: Mapping[int, Printed]
    first: int | None
    seconds: float
    preparing: bool = False

    @property
    def returned(self) -> bool:
        """True if all ranks returned."""
        return all(isinstance(outcome, Returned) for outcome in self.outcomes.values())

    @property
    def alike(self) -> bool:
        """True if all ranks returned, or all raised the same type."""
        kinds = {o.type_names[0] if isinstance(o, Raised) else type(o) for o in self.outcomes.values()}
        return len(kinds) == 1 and all(isinstance(o, (Raised, Returned)) for o in self.outcomes.values())


class RankPool:
    """Ranks for any world size, kept between calls."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hp-ranks-"))
        self._workers: list[_Worker] = []
        self._world_size: int | None = None  # of the process group that the ranks share now
        self._meetings = 0

    def call(self, world_size: int, call: Call, *, init: bool, timeout: float, grace: float) -> Ended:
        """Make a call on ranks 0 to `world_size` - 1.

        Args:
            world_size: number of ranks.
            call: what to call.
            init: whether the ranks share a process group; otherwise they have none.
            timeout: seconds for the call, not counting the start of processes.
            grace: seconds that ranks get to end after the first one has failed.

        Returns:
            How it ended. The pool is ready for the next call.
        """
        try:
            prepared = self._prepare(world_size, init)
            if not prepared.returned:
                self._end_workers()
                return prepared
            ended = self._exchange([call] * world_size, timeout, grace)
        except BaseException:  # an interrupt leaves ranks in the middle of the call
            self._end_workers()
            raise
        if not ended.alike:
            self._end_workers()
        kept = init and all(isinstance(o, Returned) and o.group_alive for o in ended.outcomes.values())
        self._world_size = world_size if kept else None
        return ended

    def close(self) -> None:
        """End all processes and remove their files."""
        self._end_workers(orderly=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end_workers(self, *, orderly: bool = False) -> None:
        """End all processes: by request if `orderly`, so that they leave their group, otherwise at once."""
        workers, self._workers, self._world_size = self._workers, [], None
        if not orderly:
            for worker in workers:
                worker.process.kill()
        for worker in workers:
            worker.send(Stop())
        until = time.monotonic() + LEAVE_SECONDS
        for worker in workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, until - time.monotonic()))
            worker.kill()

    def _prepare(self, world_size: int, init: bool) -> Ended:
        """Have enough live ranks, in the process group that the call wants."""
        if not all(worker.alive() for worker in self._workers):
            self._end_workers()
        leaves_nothing = not self._workers
        while len(self._workers) < world_size:
            self._workers.append(_Worker(len(self._workers), self._folder))
        if init and self._world_size == world_size:
            return Ended({}, {}, None, 0.0)
        ended = self._meet(world_size, init)
        if not ended.returned and not leaves_nothing:
            # What an earlier call left behind may keep its group from ending: that must not fail this call.
            self._end_workers()
            return self._prepare(world_size, init)
        return ended

    def _meet(self, world_size: int, init: bool) -> Ended:
        self._meetings += 1
        place = (self._folder / f"meeting-{self._meetings}").as_uri() if init else None
        ended = self._exchange([Prepare(rank, world_size, place) for rank in range(world_size)], START_SECONDS, 1.0)
        return Ended(ended.outcomes, ended.printed, ended.first, ended.seconds, preparing=True)

    def _exchange(self, requests: Iterable[Request], timeout: float, grace: float) -> Ended:
        """Send each rank its request and wait for the answers."""
        start = time.monotonic()
        limit, first = start + timeout, None
        outcomes: dict[int, Outcome] = {}
        waiting: dict[int, _Worker] = {}
        for rank, request in enumerate(requests):
            waiting[rank] = self._workers[rank]
            waiting[rank].forget_output()
            waiting[rank].send(request)
        asked = dict(waiting)
        while waiting and (left := limit - time.monotonic()) > 0:
            # The processes' own end is looked at twice a second: a rank's child may hold the pipe open.
            ready = wait([worker.connection for worker in waiting.values()], min(left, 0.5))
            for rank, worker in list(waiting.items()):
                if worker.connection in ready:
                    outcomes[rank] = _receive(worker)
                elif not worker.alive() and not worker.connection.poll():
                    outcomes[rank] = worker.death()
                else:
                    continue
                del waiting[rank]
                if first is None and not isinstance(outcomes[rank], Returned):
                    first, limit = rank, min(limit, time.monotonic() + grace)
        for worker in waiting.values():
            worker.ask_for_stacks()
        until = time.monotonic() + STACK_SECONDS
        for rank, worker in waiting.items():
            outcomes[rank] = Stuck(worker.read_stacks(until), timed_out=first is None)
        for worker in waiting.values():
            worker.process.kill()
        printed = {rank: worker.printed() for rank, worker in asked.items()}
        return Ended(dict(sorted(outcomes.items())), printed, first, time.monotonic() - start)


def _receive(worker: _Worker) -> Outcome:
    try:
        reply: Outcome = pickle.loads(worker.connection.recv_bytes())
    except (EOFError, OSError):
        return worker.death()
    return reply


def _tail(file: Path) -> str:
    text = file.read_text(errors="replace")
    return text if len(text) <= SHOWN_CHARACTERS else f"[... {len(text)} characters]\n" + text[-SHOWN_CHARACTERS:]
