"""Judges of the group `launch`: what a launcher tells each process, the place where ranks meet, and the limits."""

from __future__ import annotations

import errno
import os

from hyper_parallel.doctor.finding import Finding, failure, ok, skipped, warning
from hyper_parallel.doctor.interfaces import Pattern, chosen
from hyper_parallel.doctor.world import World

__all__ = ["judge"]

# The same two numbers as different launchers spell them.
_RANKS = ("RANK", "RANK_ID", "OMPI_COMM_WORLD_RANK")
_SIZES = ("WORLD_SIZE", "RANK_SIZE", "OMPI_COMM_WORLD_SIZE", "MS_WORKER_NUM")
_LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
_EXACT = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_FEW_FILES, _VERY_FEW_FILES = 1024, 256
_DOCKER_SHARED = 64 << 20  # bytes: docker's default
_LOCAL_ADDRESSES = ("localhost", "127.0.0.1", "::1")


def judge(world: World) -> list[Finding]:
    """The findings of the group."""
    return [_ranks(world), _master(world), _port(world), _interface(world), _files(world), _shared(world)]


def _numbers(world: World, *names: str) -> dict[str, int]:
    """Those of the variables that are set to whole numbers."""
    found = {}
    for name in names:
        text = world.environment.get(name, "").strip()
        if text.isascii() and text.lstrip("-").isdigit():
            found[name] = int(text)
    return found


def _ranks(world: World) -> Finding:
    names = (*_RANKS, *_SIZES, *_LOCAL)
    given = {name: world.environment[name] for name in names if world.environment.get(name, "").strip()}
    if not given:
        return skipped("launch.ranks", "no launcher has set RANK or WORLD_SIZE; torchrun does")
    problem = _contradiction(world, given)
    shown = ", ".join(f"{name}={value}" for name, value in given.items())
    if problem is None:
        return ok("launch.ranks", shown)
    remedy = ["# let one launcher set them all:", f"unset {' '.join(given)}", "torchrun --nproc-per-node 4 train.py"]
    return failure("launch.ranks", problem, remedy, [shown])


def _contradiction(world: World, given: dict[str, str]) -> str | None:
    """The first contradiction between the numbers of the launchers."""
    numbers = _numbers(world, *given)
    for name, text in given.items():
        if name not in numbers:
            return f"{name}={text} is not a whole number"
    for names in (_RANKS, _SIZES):
        values = {name: numbers[name] for name in names if name in numbers}
        if len(set(values.values())) > 1:
            return (
                f"two launchers contradict each other: {', '.join(f'{name}={value}' for name, value in values.items())}"
            )
    ranks = [name for name in _RANKS if name in numbers]
    sizes = [name for name in _SIZES if name in numbers]
    if ranks and not sizes:
        return f"{ranks[0]}={numbers[ranks[0]]} is set, but WORLD_SIZE is not"
    if sizes and not ranks:
        return f"{sizes[0]}={numbers[sizes[0]]} is set, but RANK is not: every process would take itself for rank 0"
    pairs = [(ranks[0], sizes[0])] if ranks else []
    pairs += [_LOCAL] if all(name in numbers for name in _LOCAL) else []
    for rank, size in pairs:
        if numbers[size] < 1:
            return f"{size}={numbers[size]} should be 1 or more"
        if not 0 <= numbers[rank] < numbers[size]:
            return f"{rank}={numbers[rank]} is not below {size}={numbers[size]}: ranks are 0 to {numbers[size] - 1}"
    if ranks and "LOCAL_RANK" in numbers and numbers["LOCAL_RANK"] > numbers[ranks[0]]:
        return f"LOCAL_RANK={numbers['LOCAL_RANK']} is above {ranks[0]}={numbers[ranks[0]]}: it counts the ranks of one machine"
    if sizes and numbers.get("LOCAL_WORLD_SIZE", 0) > numbers[sizes[0]]:
        return f"LOCAL_WORLD_SIZE={numbers['LOCAL_WORLD_SIZE']} is above {sizes[0]}={numbers[sizes[0]]}"
    return None


def _size(world: World) -> int:
    return next(iter(_numbers(world, *_SIZES).values()), 1)


def _master(world: World) -> Finding:
    address, port = (world.environment.get(name, "").strip() for name in ("MASTER_ADDR", "MASTER_PORT"))
    size = _size(world)
    if not address and not port:
        if size > 1 and world.environment.get("RANK"):
            text = f"WORLD_SIZE={size}, but MASTER_ADDR and MASTER_PORT are not set: the ranks can't find each other"
            return failure(
                "launch.master",
                text,
                ["export MASTER_ADDR=<name of the machine of rank 0>", "export MASTER_PORT=29500"],
            )
        return skipped("launch.master", "MASTER_ADDR and MASTER_PORT are not set")
    if not address:
        return failure(
            "launch.master", f"MASTER_PORT={port} is set, MASTER_ADDR is not", ["export MASTER_ADDR=127.0.0.1"]
        )
    if not port:
        return failure(
            "launch.master", f"MASTER_ADDR={address} is set, MASTER_PORT is not", ["export MASTER_PORT=29500"]
        )
    if not _valid(port):
        return failure("launch.master", f"MASTER_PORT={port} is no port: 1 to 65535", ["export MASTER_PORT=29500"])
    local = _numbers(world, "LOCAL_WORLD_SIZE").get("LOCAL_WORLD_SIZE", size)
    if address in _LOCAL_ADDRESSES and local < size:
        text = f"MASTER_ADDR={address} means another machine on each of them, and only {local} of {size} ranks are on this one"
        return failure(
            "launch.master",
            text,
            [
                "# on every machine, the name of that of rank 0; there it is:",
                "hostname -f",
                "export MASTER_ADDR=<that name>",
            ],
        )
    outcome = world.outcome("network")
    lookup = outcome.facts.get("lookup.error")
    if lookup or (outcome.end and "addresses" not in outcome.facts):
        text = f"MASTER_ADDR={address} can't be looked up: {lookup or outcome.end}"
        remedy = [
            f"getent hosts {address}",
            "# or use the number of the machine of rank 0 instead, which this says there:",
            "hostname -I",
        ]
        return failure("launch.master", text, remedy)
    found = ", ".join(outcome.facts.get("addresses", ()))
    return ok("launch.master", f"{address}:{port}" + (f" ({found})" if found and found != address else ""))


def _valid(port: str) -> bool:
    return port.isascii() and port.isdigit() and 0 < int(port) < 65536


def _port(world: World) -> Finding:
    outcome, port = world.outcome("network"), world.environment.get("MASTER_PORT", "").strip()
    if "addresses" not in outcome.facts or not _valid(port):
        return skipped("launch.port", "no MASTER_ADDR and MASTER_PORT to look at")
    if world.environment.get("TORCHELASTIC_RUN_ID"):
        return skipped("launch.port", "inside a job of torchrun, which holds the port itself")
    number, reason = outcome.facts.get("bind.error", (0, ""))
    if number == errno.EADDRNOTAVAIL:
        return skipped("launch.port", "the master is another machine")
    if number == errno.EADDRINUSE:
        holder = outcome.facts.get("holder")
        text = f"port {port} is taken" + (f" by {holder}" if holder else "")
        remedy = [
            f"export MASTER_PORT={outcome.facts.get('free', int(port) + 1)}",
            "# or see who holds it, and end that:",
        ]
        return failure("launch.port", text, [*remedy, f"ss -ltnp 'sport = :{port}'"])
    if number:
        text = f"port {port} can't be used: {reason}"
        return failure("launch.port", text, [f"export MASTER_PORT={outcome.facts.get('free', 29500)}"])
    if outcome.end:
        return warning("launch.port", f"port {port}: looking at it {outcome.end}", [f"ss -ltnp 'sport = :{port}'"])
    return ok("launch.port", f"port {port} is free")


def _interface(world: World) -> Finding:
    interfaces = world.facts("host").get("interfaces", {})
    given = {name: world.environment[name] for name in (*_EXACT, "NCCL_SOCKET_IFNAME") if world.environment.get(name)}
    if not given:
        return skipped("launch.interface", "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME are not set")
    usable = [name for name in sorted(interfaces) if name != "lo"] or ["lo"]
    for name, text in given.items():
        # gloo takes whole names only; NCCL has HCCL's patterns.
        pattern = Pattern(tuple(text.split(",")), exact=True) if name in _EXACT else Pattern.parse(text)
        lost = [part for part in pattern.names if part not in interfaces] if name in _EXACT else []
        if interfaces and (lost or not chosen(pattern, interfaces)):
            found = f"fits no interface of this host ({', '.join(sorted(interfaces))})"
            return failure(
                "launch.interface",
                f"{name}={text} {found}",
                [f"export {name}={usable[0]}", "# the interfaces:", "ip -brief address"],
            )
    return ok("launch.interface", ", ".join(f"{name}={text}" for name, text in given.items()))


def _files(world: World) -> Finding:
    limits = world.facts("host").get("open-files")
    if not limits:
        return skipped("launch.open-files", "not known")
    soft, hard = limits
    wanted = max(_FEW_FILES, 256 + 4 * _size(world))
    if soft is not None and soft < wanted:
        raised = 65535 if hard is None else min(hard, 65535)
        text = f"this shell may open {soft} files; {wanted} or more are wanted for connections between ranks"
        remedy = [f"ulimit -n {raised}"]
        if raised < wanted:
            remedy += [
                "# the hard limit is too low; as root:",
                f"echo '* - nofile 65535' >> {os.sep}etc/security/limits.conf",
            ]
        if soft < _VERY_FEW_FILES:
            return failure("launch.open-files", text, remedy)
        return warning("launch.open-files", text, remedy)
    return ok("launch.open-files", "no limit" if soft is None else f"{soft} open files")


def _shared(world: World) -> Finding:
    facts = world.facts("host")
    if "shared-memory.error" in facts:
        text = f"/dev/shm can't be used: {facts['shared-memory.error']}"
        return warning("launch.shared-memory", text, ["mount -t tmpfs -o size=8g tmpfs /dev/shm"])
    if "shared-memory" not in facts:
        return skipped("launch.shared-memory", "not known")
    total, free = facts["shared-memory"]
    text = f"/dev/shm has {_megabytes(total)} MB, {_megabytes(free)} MB free"
    remedy = [
        "# a container gets more with one of:",
        "docker run --ipc=host ...",
        "docker run --shm-size=8g ...",
        "# as root, in place:",
        "mount -o remount,size=8g /dev/shm",
    ]
    if total <= _DOCKER_SHARED:
        return warning(
            "launch.shared-memory", f"{text}: docker's default, too little for loader workers and NCCL", remedy
        )
    if free < _DOCKER_SHARED:
        return warning(
            "launch.shared-memory",
            f"{text}: what is left by dead processes fills it",
            ["ls -lt /dev/shm | head", *remedy],
        )
    return ok("launch.shared-memory", text)


def _megabytes(size: int) -> int:
    return size >> 20
