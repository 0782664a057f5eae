"""Whether a native part finds what it needs: follows the dynamic linker through the libraries without loading them.

For each symbol that stays unresolved it says which library should have had it: the one that the file names beside the
symbol's version, or the one whose symbols begin like it.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from hyper_parallel.doctor.elf import Elf, ElfError, Symbol, read_elf

__all__ = ["Linkage", "Loader", "provider"]

_DEFAULT = ("/lib64", "/usr/lib64", "/lib", "/usr/lib")
_CACHE_MAGIC = b"glibc-ld.so.cache1.1"

# How the symbols, or the file names, of the libraries begin that native parts are linked to, and who installs them.
_PROVIDERS = (
    (("_ZNSt", "_ZSt", "_ZNKSt", "_ZTVN10__cxxabiv1", "__cxa_", "__gxx_personality"), "libstdc++.so.6", "libstdc++"),
    (("GOMP_", "omp_"), "libgomp.so.1", "libgomp"),
    (("__kmpc_",), "libomp.so", "LLVM's OpenMP"),
    (("_ZN2at", "_ZNK2at", "_ZN5torch", "_ZNK5torch", "aoti_torch_"), "libtorch_cpu.so", "torch"),
    (("_ZN3c10", "_ZNK3c10"), "libc10.so", "torch"),
    (("THP", "_ZN8torch_py"), "libtorch_python.so", "torch"),
    (("_ZN2ms", "_ZNK2ms", "_ZN9mindspore", "_ZNK9mindspore"), "libmindspore_core.so", "mindspore"),
    (("Hccl", "hccl"), "libhccl.so", "CANN"),
    (("aclnn",), "libopapi.so", "CANN"),
    (("acl",), "libascendcl.so", "CANN"),
    (("rt",), "libruntime.so", "CANN"),
    (("nccl",), "libnccl.so.2", "NCCL"),
    (("cuda",), "libcudart.so", "CUDA"),
    (("Py", "_Py"), "libpython", "Python"),
)
_FILES = (
    (("libtorch", "libc10", "libshm"), "torch"),
    (("libmindspore",), "mindspore"),
    (
        ("libhccl", "libhcomm", "libascend", "libopapi", "libruntime", "libge_", "libacl", "libgraph", "libnnopbase"),
        "CANN",
    ),
    (("libcudart", "libcublas", "libcudnn", "libnvrtc"), "CUDA"),
    (("libnccl",), "NCCL"),
    (("libstdc++",), "libstdc++"),
    (("libgomp",), "libgomp"),
    (("libpython",), "Python"),
    (("libc.so", "libm.so", "libpthread", "libdl", "librt", "ld-linux"), "glibc"),
)


def provider(name: str, *, file: bool = False) -> tuple[str, str]:
    """The library that should have a symbol, and who installs that library; of a file name, `file=True`, the same."""
    if file:
        return name, next((owner for prefixes, owner in _FILES if name.startswith(prefixes)), "")
    for prefixes, library, owner in _PROVIDERS:
        if name.startswith(prefixes) and not (prefixes == ("rt",) and not name[2:3].isupper()):
            return library, owner
    return "", ""


@dataclass(frozen=True)
class Linkage:
    """How one native part is linked here.

    Attributes:
        path: the file.
        machine: its architecture.
        missing: names of libraries that were not found.
        unresolved: symbols that no library has, or not in the version wanted.
        wanted: symbol versions that it asks for, by library.
        found: where the other libraries were found, by name.
    """

    path: Path
    machine: str
    missing: tuple[str, ...] = ()
    unresolved: tuple[Symbol, ...] = ()
    wanted: tuple[tuple[str, str], ...] = ()
    found: Mapping[str, Path] = field(default_factory=dict)


class Loader:
    """Finds libraries as glibc's dynamic linker would for a process of this interpreter.

    Args:
        environment: where LD_LIBRARY_PATH is looked up.
        loaded: directories of libraries that the program has loaded before, as torch's are before an extension of
            torch.
        cache: the linker's cache.
    """

    def __init__(
        self,
        environment: Mapping[str, str] = os.environ,
        loaded: Iterable[Path] = (),
        cache: Path = Path("/etc/ld.so.cache"),
    ) -> None:
        self._library_path = [Path(part or ".") for part in _split(environment.get("LD_LIBRARY_PATH", ""))]
        self._loaded = list(loaded)
        self._cached = _read_cache(cache)
        self._read = _tolerant
        self._program: tuple[frozenset[str], frozenset[str]] | None = None

    def link(self, path: Path) -> Linkage:
        """Follow a file through all that it needs.

        Raises:
            ElfError: the file itself can't be read. Damaged libraries count as missing.
        """
        own = read_elf(path)
        if not own.needed and not own.undefined:
            return Linkage(path, own.machine)
        found, missing, closure = self._closure(path, own)
        names, versions = self._of_program(own.machine)
        defined = set(names).union(own.defined, *(elf.defined for elf in closure))
        of_library = {name: elf.versions for name, elf in zip(found, closure, strict=True)}
        unresolved = []
        for symbol in own.undefined:
            if symbol.weak or symbol.library in missing:
                continue  # the missing library says it all
            known = of_library.get(symbol.library, versions)
            if symbol.name not in defined or (symbol.version and symbol.version not in known):
                unresolved.append(symbol)
        return Linkage(path, own.machine, tuple(missing), tuple(unresolved), own.wanted, found)

    def newest(self, library: str, prefix: str) -> str:
        """The newest version of a library that this process would get: `newest("libstdc++.so.6", "GLIBCXX_")`."""
        program = Path(sys.executable).resolve()
        own = self._read(program)
        path = self._find(library, [(program, own)] if own else [], own.machine if own else "")
        elf = self._read(path) if path else None
        numbers = [
            _numbers(version[len(prefix) :]) for version in (elf.versions if elf else ()) if version.startswith(prefix)
        ]
        return ".".join(map(str, max((number for number in numbers if number), default=())))

    def _closure(self, path: Path, own: Elf) -> tuple[dict[str, Path], list[str], list[Elf]]:
        """All libraries that a file needs, breadth first, as the linker searches them."""
        found: dict[str, Path] = {}
        missing: list[str] = []
        closure: list[Elf] = []
        queue: list[list[tuple[Path, Elf]]] = [[(path, own)]]
        while queue:
            chain = queue.pop(0)
            for name in chain[-1][1].needed:
                if name in found or name in missing:
                    continue
                place = self._find(name, chain, own.machine)
                elf = self._read(place) if place else None
                if place is None or elf is None:
                    missing.append(name)
                    continue
                found[name] = place
                closure.append(elf)
                queue.append([*chain, (place, elf)])
        return found, missing, closure

    def _of_program(self, machine: str) -> tuple[frozenset[str], frozenset[str]]:
        """Symbols and versions that the interpreter, and what it is linked to, brings into the process."""
        if self._program is None:
            program = Path(sys.executable).resolve()
            own = self._read(program)
            if own is None or own.machine != machine:
                return frozenset(), frozenset()
            _, _, closure = self._closure(program, own)
            self._program = (
                own.defined.union(*(elf.defined for elf in closure)),
                frozenset[str]().union(*(elf.versions for elf in closure)),
            )
        return self._program

    def _find(self, name: str, chain: Sequence[tuple[Path, Elf]], machine: str) -> Path | None:
        """Where the linker finds a library that the last of a chain of files asks for."""
        if "/" in name:
            return Path(name) if Path(name).exists() else None
        places: list[Path] = []
        if chain and not chain[-1][1].runpath:
            places += [place for path, elf in reversed(chain) for place in _expand(elf.rpath, path)]
        places += self._library_path
        if chain:
            places += _expand(chain[-1][1].runpath, chain[-1][0])
        candidates = [place / name for place in [*self._loaded, *places]]
        candidates += self._cached.get(name, [])
        candidates += [Path(place) / name for place in _DEFAULT]
        for candidate in candidates:
            if candidate.is_file():
                elf = self._read(candidate)
                if elf is not None and machine in ("", elf.machine):
                    return candidate
        return None


@cache
def _tolerant(path: Path) -> Elf | None:
    """A library, or nothing if it can't be read."""
    try:
        return read_elf(path)
    except (ElfError, OSError):
        return None


def _split(paths: str) -> list[str]:
    return paths.split(":") if paths else []


def _expand(paths: Iterable[str], owner: Path) -> list[Path]:
    """Search paths with `$ORIGIN`, the folder of the file that states them."""
    origin = str(owner.resolve().parent)
    return [Path(path.replace("$ORIGIN", origin).replace("${ORIGIN}", origin)) for path in paths]


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else ()


def _read_cache(path: Path) -> dict[str, list[Path]]:
    """The linker's cache, name to paths; empty where there is none, or of an unknown kind.

    The format is glibc's, `sysdeps/generic/dl-cache.h`: a header of 48 bytes, entries of 24, strings counted from the
    header.
    """
    try:
        data = path.read_bytes()
    except OSError:
        return {}
    start = data.find(_CACHE_MAGIC)
    if start < 0:
        return {}
    found: dict[str, list[Path]] = {}
    try:
        (count,) = struct.unpack_from("<I", data, start + 20)
        for index in range(count):
            _, key, value = struct.unpack_from("<iII", data, start + 48 + 24 * index)
            name, place = (
                data[start + at : data.index(b"\0", start + at)].decode("utf-8", errors="replace")
                for at in (key, value)
            )
            found.setdefault(name, []).append(Path(place))
    except (struct.error, ValueError):
        return {}
    return found
