"""`doctor run -n 4`: real processes on this machine go through every collective, with right values and timings.

When one of them dies or disagrees, the others are ended and the report says which, and what it was doing.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hyper_parallel.doctor.finding import Finding, Report, failure, ok
from hyper_parallel.doctor.probe import Outcome, Running

__all__ = ["BACKENDS", "run_collectives"]

BACKENDS = ("gloo", "nccl", "hccl")

_CHECK = "run.collectives"
_LENGTHS = (1 << 10, 1 << 20)  # elements of float32: 4 KiB for the latency, 4 MiB for the bandwidth
_REPEATS = 5
_GRACE = 3.0  # seconds that the others have to say why they fail, after one has failed
_BY_PROFILE = {"cpu": "gloo", "mindspore": "gloo", "cuda": "nccl", "npu": "hccl"}
_NODES = {"nccl": "nvidia[0-9]*", "hccl": "davinci[0-9]*"}


def run_collectives(
    processes: int = 4,
    *,
    backend: str | None = None,
    profile: str | None = None,
    environment: Mapping[str, str] | None = None,
    timeout: float = 60.0,
) -> Report:
    """Run every collective between processes on this machine.

    Args:
        processes: how many; with NCCL and HCCL one for each device.
        backend: `gloo`, `nccl` or `hccl`; by default that of the profile, or, without one, NCCL or HCCL where there are
            enough devices and gloo elsewhere.
        profile: as `diagnose`.
        environment: environment variables of the processes; those of this process by default.
        timeout: seconds for all of it.

    Returns:
        A report with the one finding `run.collectives`, whose details are the table of timings.
    """
    start = time.perf_counter()
    variables = dict(os.environ if environment is None else environment)
    reason = ""
    if backend is None and profile is not None:
        backend, reason = _BY_PROFILE[profile], f"for the profile {profile}"
    elif backend is None:
        backend, reason = _choose(processes)
    outcomes = _run(processes, backend, variables, timeout)
    finding = _judge(outcomes, backend, timeout)
    subject = f"run of {processes} process{'es' * (processes != 1)} on {backend}"
    return Report(subject, reason, (finding,), time.perf_counter() - start)


def _choose(processes: int) -> tuple[str, str]:
    for backend, pattern in _NODES.items():
        devices = list(Path("/dev").glob(pattern))
        if len(devices) >= processes:
            return backend, f"{len(devices)} devices are here"
    return "gloo", "there are not enough devices here" if any(
        list(Path("/dev").glob(pattern)) for pattern in _NODES.values()
    ) else "no NPU and no CUDA device is here"


def _run(processes: int, backend: str, environment: dict[str, str], timeout: float) -> list[Outcome]:
    """Start all ranks and wait: for all, for the first that fails and a moment more, or for the limit."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    common |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    if backend != "hccl":
        common["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    # A launcher around this would have its own idea of the rank, and of who keeps the store.
    inherited = {name: value for name, value in environment.items() if not name.startswith("TORCHELASTIC_")}
    ranks: list[Running] = []
    failed: int | None = None
    try:
        for rank in range(processes):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            request = {"rank": rank, "size": processes, "backend": backend, "timeout": timeout}
            request |= {"lengths": _LENGTHS, "repeats": _REPEATS}
            ranks.append(Running("collective_rank", request, {**inherited, **common, **own}))
        deadline = time.monotonic() + timeout
        waiting = set(range(processes))
        while waiting and time.monotonic() < deadline:
            for rank in sorted(waiting):
                if ranks[rank].wait(0.02):
                    waiting.discard(rank)
                    if failed is None and ranks[rank].status:
                        failed = rank
                        deadline = min(deadline, time.monotonic() + _GRACE)
    finally:
        late = f"hung: not at its end within {timeout:g} s"
        late = late if failed is None else f"was ended, since rank {failed} had failed"
        outcomes = [rank.finish(late) for rank in ranks]
    return outcomes


def _judge(outcomes: Sequence[Outcome], backend: str, timeout: float) -> Finding:
    count = len(outcomes)
    ended = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome.end}
    if ended:
        # Not those that were ended because of another: the first cause.
        causes = {rank: outcome for rank, outcome in ended.items() if not outcome.end.startswith("was ended")} or ended
        rank, first = next(iter(causes.items()))
        text = f"rank {rank} of {count} {first.story}"
        details = [f"rank {number}: {outcome.story}" for number, outcome in ended.items()]
        return failure(_CHECK, text, _remedy(first, backend, timeout), [*details, *first.output])
    wrong = [
        (rank, name, size)
        for rank, outcome in enumerate(outcomes)
        for name, size, right, _ in outcome.facts.get("results", ())
        if right is False
    ]
    table = _table(outcomes)
    if wrong:
        rank, name, size = wrong[0]
        text = f"{name} of {size} bytes gives wrong values on rank {rank} of {count}"
        return failure(
            _CHECK,
            text,
            ["# the same numbers without an accelerator:", f"hyper-parallel doctor run -n {count} --backend gloo"],
            table,
        )
    lacking = sorted({name for name, _, right, _ in outcomes[0].facts["results"] if right is None})
    text = f"{count} processes, {backend}: all values right" + (
        f"; {backend} lacks {', '.join(lacking)}" if lacking else ""
    )
    return ok(_CHECK, text, table)


def _table(outcomes: Sequence[Outcome]) -> list[str]:
    """One line for each operation: the slowest rank's median, and bytes of one rank's data in a second."""
    lines = [f"{'operation':<18}{'bytes':>9}{'ms':>10}{'MB/s':>9}"]
    for index, (name, size, right, _) in enumerate(outcomes[0].facts.get("results", ())):
        if right is None:
            lines.append(f"{name:<18}{size:>9}{'not supported':>19}")
            continue
        seconds = max(outcome.facts["results"][index][3] for outcome in outcomes)
        carried, speed = (size, f"{size / seconds / 1e6:.0f}") if name != "barrier" else ("", "")
        lines.append(f"{name:<18}{carried:>9}{1e3 * seconds:>10.2f}{speed:>9}".rstrip())
    slowest = max(outcome.facts.get("seconds", 0.0) for outcome in outcomes)
    return [*lines, f"meeting took {slowest:.2f} s"]


def _remedy(outcome: Outcome, backend: str, timeout: float) -> list[str]:
    """What to try, by what the rank was doing."""
    if "No module named 'torch'" in outcome.end:
        return ['pip install "torch>=2.7"']
    if outcome.during.startswith("import"):
        return ["# see what is wrong with the framework:", "hyper-parallel doctor -v"]
    if "device" in outcome.during:
        return [
            "# one device for each process is needed:",
            "hyper-parallel doctor run -n 1",
            "# or try without devices:",
            "hyper-parallel doctor run --backend gloo",
        ]
    lines = ["# is the interface right, and open to this machine itself?", "ip -brief address"]
    if backend == "gloo":
        lines.append("GLOO_SOCKET_IFNAME=lo hyper-parallel doctor run --backend gloo")
    elif backend == "nccl":
        lines.append("NCCL_DEBUG=INFO hyper-parallel doctor run --backend nccl")
    else:
        lines.append("ASCEND_GLOBAL_LOG_LEVEL=1 ASCEND_SLOG_PRINT_TO_STDOUT=1 hyper-parallel doctor run --backend hccl")
    if outcome.end.startswith("hung"):
        lines += ["# or give it more time:", f"hyper-parallel doctor run --timeout {4 * timeout:g}"]
    return lines
