"""What a shared object asks of the machine that loads it, read from its ELF tables.

`build/check_wheel.py` judges it; nothing here knows wheels or targets. The tables are read by pyelftools.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection, DynamicTag
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection, GNUVerSymSection
from elftools.elf.sections import SymbolTableSection

ELF_MAGIC = b"\x7fELF"
# What else is compiled code: static archives, and the formats of other systems.
NATIVE_MAGICS = (ELF_MAGIC, b"!<arch>\n", b"MZ", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
_TEXTS = {"DT_NEEDED": "needed", "DT_RPATH": "rpath", "DT_RUNPATH": "runpath"}
_MACHINES = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}


@dataclass(frozen=True)
class Need:
    """A version of symbols that a shared object needs from a library.

    Attributes:
        library: the library's name, as the loader looks for it (`libstdc++.so.6`).
        version: the version (`GLIBCXX_3.4.29`).
        symbols: the symbols that are bound to it, mangled as in the file, sorted.
    """

    library: str
    version: str
    symbols: tuple[str, ...]


@dataclass(frozen=True)
class SharedObject:
    """One ELF file.

    Attributes:
        path: where it lies, relative to the wheel's root.
        machine: the architecture as platform tags spell it (`x86_64`), or the ELF name of one that we don't build for.
        shared: whether it is a shared object, and not an executable or an object file.
        needed: the libraries that the loader must find for it.
        rpath: the folders of its RPATH and RUNPATH.
        needs: the versions of symbols that it needs.
    """

    path: str
    machine: str
    shared: bool
    needed: tuple[str, ...]
    rpath: tuple[str, ...]
    needs: tuple[Need, ...]


def read_shared_object(path: str, content: bytes) -> SharedObject:
    """Read an ELF file.

    Args:
        path: what to call it.
        content: all of its bytes.

    Raises:
        ValueError: it is damaged, or its section headers were stripped, without which its needs can't be told.
    """
    try:
        elf = ELFFile(BytesIO(content))
        sections = list(elf.iter_sections())
        dynamic = next((section for section in sections if isinstance(section, DynamicSection)), None)
        tags = list(dynamic.iter_tags()) if dynamic is not None else []
        shared = elf["e_type"] == "ET_DYN"
        if shared and not sections:
            raise ValueError(
                f"{path} has no section headers, so what it needs can't be told; link it without stripping those"
            )
        return SharedObject(
            path=path,
            machine=_MACHINES.get(elf["e_machine"], str(elf["e_machine"])),
            shared=shared,
            needed=tuple(_text(tag) for tag in tags if tag.entry.d_tag == "DT_NEEDED"),
            rpath=tuple(
                folder
                for tag in tags
                if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH")
                for folder in _text(tag).split(":")
            ),
            needs=_needs(sections),
        )
    except (ELFError, UnicodeDecodeError, KeyError, IndexError, OverflowError) as error:
        raise ValueError(f"{path} is a damaged ELF file: {error}") from error


def _text(tag: DynamicTag) -> str:
    """What a tag of the dynamic section says, which pyelftools keeps under the tag's own name."""
    return str(getattr(tag, _TEXTS[tag.entry.d_tag]))


def _needs(sections: Sequence[object]) -> tuple[Need, ...]:
    """Join the table of needed versions with the symbols that carry each version's index."""
    symbols = defaultdict(list)
    table = next(
        (section for section in sections if isinstance(section, SymbolTableSection) and section.name == ".dynsym"), None
    )
    for section in sections:
        if isinstance(section, GNUVerSymSection) and table is not None:
            for symbol, versioned in zip(table.iter_symbols(), section.iter_symbols(), strict=True):
                # The high bit only marks a hidden version.
                index = versioned.entry["ndx"]
                if isinstance(index, int) and symbol["st_shndx"] == "SHN_UNDEF":
                    symbols[index & 0x7FFF].append(symbol.name)
    found = []
    for section in sections:
        if isinstance(section, GNUVerNeedSection):
            for library, versions in section.iter_versions():
                found += [
                    Need(str(library.name), str(version.name), tuple(sorted(symbols[version["vna_other"]])))
                    for version in versions
                ]
    return tuple(sorted(found, key=lambda need: (need.library, need.version)))
