"""Facts about the place where ranks meet: whether its name resolves, whether it is here, whether its port is free.

A name server that doesn't answer makes a look-up hang, which is why this is a probe of its own.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from hyper_parallel.doctor.probes.answer import Answer

__all__ = ["probe"]


def probe(answer: Answer, request: dict[str, Any]) -> None:
    """Look at `request["address"]` and `request["port"]`."""
    name, port = request["address"], request["port"]
    answer.step(f"looking up {name}")
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError as error:
        answer.fact("lookup.error", str(error))
        return
    answer.fact("addresses", sorted({str(entry[4][0]) for entry in found}))
    answer.step(f"binding {name}:{port}")
    family, kind, protocol, _, place = found[0]
    with socket.socket(family, kind, protocol) as channel:
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            channel.bind(place)
            channel.listen(1)
        except OSError as error:
            # EADDRNOTAVAIL: the address is another host's; EADDRINUSE: the port is taken; EACCES: below 1024.
            answer.fact("bind.error", [error.errno, error.strerror])
    with socket.socket(family, kind, protocol) as channel:
        channel.bind(("", 0))
        answer.fact("free", channel.getsockname()[1])
    answer.step(f"looking for who holds port {port}")
    answer.fact("holder", _holder(port))


def _holder(port: int) -> str | None:
    """The process that listens on a port, as far as this user may see: `process 4711 (python train.py)`."""
    inodes = set()
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{name}").read_text("ascii").splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:  # 0A: listening
                inodes.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*") if inodes else ():
        try:
            if any(os.readlink(link) in inodes for link in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f"process {process.name} ({command[:80]})"
        except OSError:  # another user's, or gone
            continue
    return None
