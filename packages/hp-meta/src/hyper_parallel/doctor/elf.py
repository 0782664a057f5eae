"""Reads what the dynamic linker reads in an ELF file: needed libraries, search paths, symbols and their versions.

Nothing is executed, so a library that would crash on loading can be looked at. The wheel builder audits with
pyelftools; the doctor imports only the standard library, so it has this reader of 64-bit little-endian files.
Structures as in the System V ABI and in `elf.h` of glibc.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Elf", "ElfError", "Symbol", "read_elf"]

_MACHINES = {62: "x86_64", 183: "aarch64", 3: "i686", 40: "armv7l", 243: "riscv64", 21: "ppc64le", 22: "s390x"}
_PT_LOAD, _PT_DYNAMIC = 1, 2
_NEEDED, _STRTAB, _SYMTAB, _STRSZ, _SONAME, _RPATH, _RUNPATH, _HASH = 1, 5, 6, 10, 14, 15, 29, 4
_GNU_HASH, _VERSYM, _VERDEF, _VERDEFNUM, _VERNEED, _VERNEEDNUM = (
    *(0x6FFFFEF5, 0x6FFFFFF0, 0x6FFFFFFC),
    *(0x6FFFFFFD, 0x6FFFFFFE, 0x6FFFFFFF),
)
_WEAK = 2
_HIDDEN = 0x7FFF  # the bits of a version's index without the flag `hidden`


class ElfError(ValueError):
    """The file is not an ELF file, or not one that this reader knows."""


@dataclass(frozen=True)
class Symbol:
    """A symbol that a file wants from elsewhere.

    Attributes:
        name: as the linker sees it (mangled, for C++).
        version: the version wanted, `GLIBCXX_3.4.32` say, or empty.
        library: the file name of the library that should have that version, or empty.
        weak: the program starts without it.
    """

    name: str
    version: str = ""
    library: str = ""
    weak: bool = False


@dataclass(frozen=True)
class Elf:
    """What the dynamic linker reads in one file.

    Attributes:
        machine: the architecture, as `platform.machine()` names it.
        needed: file names of the libraries that it asks for.
        soname: its own name for others, or empty.
        rpath: its DT_RPATH, directories.
        runpath: its DT_RUNPATH.
        undefined: the symbols that it wants from others.
        defined: the names of those that it has for others.
        versions: the symbol versions that it has for others.
        wanted: the symbol versions that it asks for, by library.
    """

    machine: str
    needed: tuple[str, ...] = ()
    soname: str = ""
    rpath: tuple[str, ...] = ()
    runpath: tuple[str, ...] = ()
    undefined: tuple[Symbol, ...] = ()
    defined: frozenset[str] = frozenset()
    versions: frozenset[str] = frozenset()
    wanted: tuple[tuple[str, str], ...] = ()


def read_elf(path: Path) -> Elf:
    """Read a file.

    Raises:
        ElfError: it isn't a whole 64-bit little-endian ELF file. One of another kind, but with a readable header, gives
            an `Elf` with nothing but its machine.
        OSError: it can't be opened.
    """
    with path.open("rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise ElfError(f"{path} is empty") from None
        with data:
            if data[:4] != b"\x7fELF" or len(data) < 20:
                raise ElfError(f"{path} is not an ELF file")
            order = "<" if data[5] == 1 else ">"
            machine = _MACHINES.get(struct.unpack_from(f"{order}H", data, 18)[0], "unknown")
            if data[4] != 2 or data[5] != 1:
                return Elf(machine)
            try:
                return _Reader(data).read(machine)
            except (struct.error, IndexError, OverflowError) as error:
                raise ElfError(f"{path} is cut off or damaged ({error})") from None


class _Reader:
    """Reads one mapped file; addresses are those of the loaded image, offsets those of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        start, size, count = struct.unpack_from("<32xQ14xHH", data, 0)
        self.segments = []
        self.dynamic: dict[int, list[int]] = {}
        table = b""
        for index in range(count):
            kind, _, offset, address, _, length = struct.unpack_from("<IIQQQQ", data, start + index * size)
            if kind == _PT_LOAD:
                self.segments.append((address, length, offset))
            elif kind == _PT_DYNAMIC:
                table = data[offset : offset + length]
        for at in range(0, len(table) - 15, 16):
            tag, value = struct.unpack_from("<QQ", table, at)
            if tag == 0:
                break
            self.dynamic.setdefault(tag, []).append(value)

    def read(self, machine: str) -> Elf:
        if _STRTAB not in self.dynamic or _SYMTAB not in self.dynamic:
            return Elf(machine)  # a static program
        self.strings = self.offset(self.dynamic[_STRTAB][0])
        texts = {tag: [self.text(value) for value in self.dynamic.get(tag, ())] for tag in (_NEEDED, _SONAME)}
        wanted = dict(self.wanted_versions())
        own = dict(self.own_versions())
        undefined, defined = [], set()
        versym = self.dynamic.get(_VERSYM)
        indices = self.offset(versym[0]) if versym else None
        symbols = self.offset(self.dynamic[_SYMTAB][0])
        for index in range(1, self.symbol_count()):
            name, info, _, section, _, _ = struct.unpack_from("<IBBHQQ", self.data, symbols + 24 * index)
            if section:
                defined.add(self.text(name))
                continue
            version = struct.unpack_from("<H", self.data, indices + 2 * index)[0] & _HIDDEN if indices else 0
            library, text = wanted.get(version, ("", ""))
            undefined.append(Symbol(self.text(name), text, library, info >> 4 == _WEAK))
        return Elf(
            machine,
            tuple(texts[_NEEDED]),
            "".join(texts[_SONAME][:1]),
            self.paths(_RPATH),
            self.paths(_RUNPATH),
            tuple(undefined),
            frozenset(defined),
            frozenset(own.values()),
            tuple(wanted.values()),
        )

    def offset(self, address: int) -> int:
        for start, length, offset in self.segments:
            if start <= address < start + length:
                return int(address - start + offset)
        raise IndexError(f"address {address:#x} lies in no segment")

    def text(self, index: int) -> str:
        start = self.strings + index
        end = self.data.find(b"\0", start)
        if end < 0:
            raise IndexError("a string without an end")
        return self.data[start:end].decode("utf-8", errors="replace")

    def paths(self, tag: int) -> tuple[str, ...]:
        return tuple(
            part for value in self.dynamic.get(tag, ()) for part in self.text(value).split(":") if part.strip()
        )

    def symbol_count(self) -> int:
        """The table of symbols has no length of its own; the hash table that indexes it knows."""
        if _HASH in self.dynamic:
            return int(struct.unpack_from("<II", self.data, self.offset(self.dynamic[_HASH][0]))[1])
        if _GNU_HASH not in self.dynamic:
            return 0
        at = self.offset(self.dynamic[_GNU_HASH][0])
        buckets, first, bloom, _ = struct.unpack_from("<IIII", self.data, at)
        at += 16 + 8 * bloom
        last = max(struct.unpack_from(f"<{buckets}I", self.data, at), default=0)
        if last < first:
            return int(first)
        chain = at + 4 * buckets
        # The chain of the last bucket ends at the entry whose lowest bit is set.
        while not struct.unpack_from("<I", self.data, chain + 4 * (last - first))[0] & 1:
            last += 1
        return int(last) + 1

    def wanted_versions(self) -> Iterator[tuple[int, tuple[str, str]]]:
        """Index of a version, with the library and the version."""
        if _VERNEED not in self.dynamic:
            return
        at = self.offset(self.dynamic[_VERNEED][0])
        left = len(self.data) // 16  # the size of an entry: damaged links may lead in circles
        for _ in range(self.dynamic[_VERNEEDNUM][0]):
            _, count, file, auxiliary, following = struct.unpack_from("<HHIII", self.data, at)
            entry = at + auxiliary
            for _ in range(count):
                left -= 1
                if left < 0:
                    raise IndexError("more versions of symbols than the file can hold")
                _, _, index, name, after = struct.unpack_from("<IHHII", self.data, entry)
                yield index & _HIDDEN, (self.text(file), self.text(name))
                entry += after
            if not following:  # the last one, whatever the damaged count says
                return
            at += following

    def own_versions(self) -> Iterator[tuple[int, str]]:
        """Index of a version that the file itself defines, with the version."""
        if _VERDEF not in self.dynamic:
            return
        at = self.offset(self.dynamic[_VERDEF][0])
        for _ in range(self.dynamic[_VERDEFNUM][0]):
            _, _, index, _, _, auxiliary, following = struct.unpack_from("<HHHHIII", self.data, at)
            yield index & _HIDDEN, self.text(struct.unpack_from("<I", self.data, at + auxiliary)[0])
            if not following:
                return
            at += following
