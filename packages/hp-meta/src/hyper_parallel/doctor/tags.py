"""Which part of a wheel's name doesn't fit an interpreter: Python, ABI or platform, and why.

pip says "not a supported wheel on this platform" and no more. The rules are those of the platform compatibility tags
(PEP 425, 600, 656) for CPython on Linux; the tests compare them with the library `packaging`.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import PurePath

__all__ = ["Interpreter", "Misfit", "WheelName", "WheelNameError", "misfits", "parse_wheel_name"]

_MANYLINUX = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}
_NAME = re.compile(
    r"(?P<name>[^-]+)-(?P<version>[^-]+)(-(?P<build>\d[^-]*))?-(?P<python>[^-]+)-(?P<abi>[^-]+)-(?P<platform>[^-]+)\.whl"
)


class WheelNameError(ValueError):
    """A file name is not that of a wheel."""


@dataclass(frozen=True)
class Interpreter:
    """What a wheel's tags are compared with.

    Attributes:
        version: Python's, `(3, 11)`.
        threaded: a build without the global lock, `cp313t`.
        implementation: `cpython`, or another.
        system: `linux`, or another.
        machine: the architecture of the process, `x86_64` or `aarch64`.
        glibc: version of glibc, `(2, 36)`; None where the C library is another one.
    """

    version: tuple[int, int] = (3, 11)
    threaded: bool = False
    implementation: str = "cpython"
    system: str = "linux"
    machine: str = "x86_64"
    glibc: tuple[int, int] | None = (2, 35)

    @classmethod
    def current(cls) -> Interpreter:
        """This one."""
        return cls(
            (sys.version_info.major, sys.version_info.minor),
            bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
            sys.implementation.name,
            sys.platform,
            platform.machine(),
            _glibc(),
        )

    @property
    def python(self) -> str:
        """The Python tag, `cp311`."""
        letters = {"cpython": "cp", "pypy": "pp"}.get(self.implementation, self.implementation)
        return f"{letters}{self.version[0]}{self.version[1]}"

    @property
    def abi(self) -> str:
        """The ABI tag, `cp311`, or `cp313t` without the global lock."""
        return self.python + ("t" if self.threaded else "")

    @property
    def tag(self) -> str:
        """The tags of a wheel that is built here."""
        return f"{self.python}-{self.abi}-{self.system}_{self.machine}"


@dataclass(frozen=True)
class WheelName:
    """The parts of a wheel's file name; several tags in one part are separated by dots there."""

    distribution: str
    version: str
    python: tuple[str, ...]
    abi: tuple[str, ...]
    platform: tuple[str, ...]


@dataclass(frozen=True)
class Misfit:
    """One part of a name that doesn't fit.

    Attributes:
        part: `Python`, `ABI` or `platform`.
        tag: what the wheel says.
        reason: why it doesn't fit, in one sentence without a full stop.
    """

    part: str
    tag: str
    reason: str


def parse_wheel_name(path: str) -> WheelName:
    """Take a wheel's file name apart.

    Raises:
        WheelNameError: it doesn't have the form `name-version(-build)-python-abi-platform.whl`.
    """
    match = _NAME.fullmatch(PurePath(path).name)
    if match is None:
        raise WheelNameError(
            f"{PurePath(path).name} is not the name of a wheel: name-version-python-abi-platform.whl is needed, "
            "and pip refuses renamed files"
        )
    parts = (tuple(match[part].split(".")) for part in ("python", "abi", "platform"))
    return WheelName(match["name"].replace("_", "-").lower(), match["version"], *parts)


def misfits(wheel: WheelName, here: Interpreter) -> list[Misfit]:
    """The parts of a wheel's name that don't fit an interpreter; empty if pip would install it."""
    pairs = [(python, abi) for python in wheel.python for abi in wheel.abi]
    found = []
    # Python and ABI are judged together: cp39-abi3 fits a later Python, cp39-cp39 doesn't.
    if not any(_python(python, abi, here) is None and _abi(python, abi, here) is None for python, abi in pairs):
        reasons = [_python(python, abi, here) for python, abi in pairs]
        if all(reasons):
            found.append(Misfit("Python", ".".join(wheel.python), _last(reasons)))
        reasons = [_abi(python, abi, here) for python, abi in pairs]
        # The ABI of that other Python needs no mention of its own.
        if not found or (all(reasons) and not all(abi.rstrip("dmut") in wheel.python for abi in wheel.abi)):
            found.append(Misfit("ABI", ".".join(wheel.abi), _last(reasons)))
    reasons = [_platform(tag, wheel.abi, here) for tag in wheel.platform]
    if all(reasons):
        found.append(Misfit("platform", ".".join(wheel.platform), _last(reasons)))
    return found


def _python(tag: str, abi: str, here: Interpreter) -> str | None:
    """Why a Python tag doesn't fit, or None."""
    match = re.fullmatch(r"([a-z]+)(\d)(\d*)", tag)
    if match is None:
        return f"{tag!r} is no Python tag that is known here"
    letters, major, minor = match[1], int(match[2]), int(match[3] or -1)
    own = f"this is {here.python} ({here.implementation} {here.version[0]}.{here.version[1]})"
    version = (major, minor)
    if letters == "py":
        fits = major == here.version[0] and minor <= here.version[1]
        return None if fits else f"it needs Python {major}.{max(minor, 0)} or newer of the same major, {own}"
    if letters != here.python[: len(here.python) - len(f"{here.version[0]}{here.version[1]}")]:
        return f"it is for another implementation of Python ({letters}), {own}"
    if abi in ("abi3", "none") and (3, 2) <= version <= here.version and (abi == "none" or not here.threaded):
        # `cp39-none-any` fits only its own Python; the stable ABI (abi3) fits every later one.
        return None if abi == "abi3" or version == here.version else f"it is for {tag} alone, {own}"
    if version == here.version:
        return None
    return f"it is built for Python {major}.{max(minor, 0)}, {own}"


def _abi(python: str, abi: str, here: Interpreter) -> str | None:
    """Why an ABI tag doesn't fit, or None."""
    if abi == "none":
        return None
    if python.startswith("py"):
        return f"the Python tag {python} goes with the ABI none, not with {abi}: the name is wrong"
    if abi == here.abi:
        return None
    if abi == "abi3":
        return "the stable ABI (abi3) is not that of a build without the global lock" if here.threaded else None
    if abi.rstrip("dmut") == here.abi.rstrip("t"):
        mine = "without the global lock (free-threaded)" if here.threaded else "with the global lock"
        kind = {"t": "a build without the global lock", "d": "a debug build"}.get(
            abi[-1], "a build with the global lock"
        )
        return f"it is for {kind} ({abi}), this is a build {mine} ({here.abi})"
    return f"it is for the ABI {abi}, this interpreter has {here.abi}"


def _platform(tag: str, abis: tuple[str, ...], here: Interpreter) -> str | None:
    """Why a platform tag doesn't fit, or None."""
    if tag == "any":
        return None if "none" in abis else "a wheel with an ABI is for some platform, not for any: the name is wrong"
    own = f"{here.system} {here.machine}"
    match = re.fullmatch(r"(manylinux\d*|musllinux|linux)(?:_(\d+)_(\d+))?_(.+)", tag)
    if match is None or here.system != "linux":
        return f"it is for {tag}, this is {own}"
    family, machine = match[1], match[4]
    if machine != here.machine:
        return f"it is built for the architecture {machine}, this is {here.machine}"
    if family == "linux":
        return None
    if family == "musllinux":
        return None if here.glibc is None else "it is built for musl (Alpine), this system has glibc"
    if here.glibc is None:
        return "it is built for glibc, and this system has another C library"
    needed = (int(match[2]), int(match[3])) if match[2] else _MANYLINUX.get(family)
    if needed is None:
        return f"{tag!r} is no platform tag that is known here"
    if needed > here.glibc:
        return (
            f"it needs glibc {needed[0]}.{needed[1]} or newer, this system has {here.glibc[0]}.{here.glibc[1]} "
            "and glibc can't be upgraded without the system"
        )
    return None


def _last(reasons: list[str | None]) -> str:
    """One reason of several tags: the last is that of the newest tag, by custom."""
    return next((reason for reason in reversed(reasons) if reason), "")


def _glibc() -> tuple[int, int] | None:
    try:
        text = os.confstr("CS_GNU_LIBC_VERSION")  # "glibc 2.36"
    except (AttributeError, ValueError, OSError):
        return None
    match = re.fullmatch(r"glibc (\d+)\.(\d+).*", text or "")
    return (int(match[1]), int(match[2])) if match else None
