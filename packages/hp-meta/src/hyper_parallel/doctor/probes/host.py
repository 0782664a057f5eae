"""Facts about the machine: system, interpreter, C and C++ libraries, limits, and network interfaces."""

from __future__ import annotations

import os
import platform
import socket
import struct
import sys
from pathlib import Path
from typing import Any

from hyper_parallel.doctor.linking import Loader
from hyper_parallel.doctor.probes.answer import Answer
from hyper_parallel.doctor.tags import Interpreter

__all__ = ["probe"]

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface


def probe(answer: Answer, request: dict[str, Any]) -> None:
    """Gather them; `request["root"]` stands for `/`."""
    root = Path(request["root"])
    here = Interpreter.current()
    answer.fact("system", sys.platform)
    answer.fact("machine", platform.machine())
    answer.fact("kernel", platform.release())
    answer.fact("os", _os_name(root / "etc/os-release"))
    answer.fact("python", platform.python_version())
    answer.fact("implementation", platform.python_implementation())
    answer.fact("tag", here.tag)
    answer.fact("threaded", here.threaded)
    answer.fact("executable", sys.executable)
    answer.fact("glibc", list(here.glibc) if here.glibc else None)
    answer.fact("nvidia", sorted(path.name for path in (root / "dev").glob("nvidia[0-9]*")))
    with answer.attempt("limits"):
        import resource  # Unix only; on other systems that they are others is the finding

        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        answer.fact("open-files", [None if value == resource.RLIM_INFINITY else value for value in limits])
    with answer.attempt("shared-memory"):
        space = os.statvfs(root / "dev/shm")
        answer.fact("shared-memory", [space.f_frsize * space.f_blocks, space.f_frsize * space.f_bavail])
    with answer.attempt("interfaces"):
        answer.fact("interfaces", _interfaces())
    with answer.attempt("libstdcxx"):
        answer.fact("glibcxx", Loader().newest("libstdc++.so.6", "GLIBCXX_"))


def _os_name(path: Path) -> str:
    try:
        lines = path.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    fields = dict(line.split("=", 1) for line in lines if "=" in line)
    return fields.get("PRETTY_NAME", fields.get("ID", "")).strip("\"'")


def _interfaces() -> dict[str, list[str]]:
    """Every network interface with its addresses (IPv4 by ioctl, IPv6 from /proc)."""
    import fcntl

    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
        for name, addresses in found.items():
            try:
                reply = fcntl.ioctl(channel, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # no IPv4 address
            addresses.append(socket.inet_ntoa(reply[20:24]))
    try:
        lines = Path("/proc/net/if_inet6").read_text("ascii").splitlines()
    except OSError:
        lines = []
    for line in lines:
        digits, *_, name = line.split()
        found.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found
