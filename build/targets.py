"""The systems that the wheels are built for, and what their own libraries offer: build/floors.toml as values.

A shared object asks its libraries for versions of symbols (`GLIBCXX_3.4.29`); a target offers each family up to a floor.
The wheel checks, the images and the tests all ask here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from packaging.version import Version

from workspace import read_toml

FLOORS = Path(__file__).resolve().parent / "floors.toml"
ARCHITECTURES = ("x86_64", "aarch64")

# Families of symbol versions, with the key of floors.toml that bounds each.
FAMILIES = {"GLIBC": "glibc", "GLIBCXX": "glibcxx", "CXXABI": "cxxabi", "GCC": "libgcc"}

# Versions without a number, with the first glibc that has them.
_NAMED = {"GLIBC_ABI_DT_RELR": "GLIBC_2.36", "GLIBC_ABI_DT_X86_64_PLT": "GLIBC_2.39", "CXXABI_FLOAT128": "CXXABI_1.3"}
_VERSION = re.compile(r"([A-Z]+)_([0-9.]+)")


@dataclass(frozen=True)
class Target:
    """A system that wheels are built for.

    Attributes:
        name: as `nox -s wheels -- --target` takes it, and the folder in docker/.
        title: as people call it.
        gcc: the compiler of its image.
        offers: the newest version that its own libraries have, by family (`GLIBC`, `GLIBCXX`, `CXXABI`, `GCC`).
    """

    name: str
    title: str
    gcc: str
    offers: Mapping[str, Version]

    def has(self, version: str) -> bool:
        """Whether its libraries have a version of symbols, such as `GLIBC_2.34`; a family we don't know counts as absent."""
        family, number = split_version(version)
        return number is not None and family in self.offers and number <= self.offers[family]

    def takes(self, glibc: Version) -> bool:
        """Whether pip on it installs a wheel whose tag asks for this glibc."""
        return glibc <= self.offers["GLIBC"]


@dataclass(frozen=True)
class Floors:
    """All of floors.toml.

    Attributes:
        targets: by name.
        everywhere: libraries that every shared object of ours may need.
        frameworks: libraries of frameworks.
        islands: by the name of a file, libraries that this one may need beyond those everywhere.
    """

    targets: Mapping[str, Target]
    everywhere: frozenset[str]
    frameworks: frozenset[str] = frozenset()
    islands: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @cached_property
    def foreign(self) -> frozenset[str]:
        """Libraries that no wheel may carry, whoever links them."""
        return self.frameworks.union(*self.islands.values())

    def target(self, name: str) -> Target:
        """A target by name.

        Raises:
            ValueError: there is none of this name.
        """
        if name not in self.targets:
            raise ValueError(f"no target {name!r} in build/floors.toml; there are: {', '.join(self.targets)}")
        return self.targets[name]


def read_floors(path: Path = FLOORS) -> Floors:
    """Read floors.toml, or a file of its form."""
    table = read_toml(path)
    targets = {
        name: Target(
            name,
            row["title"],
            row["gcc"],
            {family: Version(row[key]) for family, key in FAMILIES.items() if key in row},
        )
        for name, row in table["targets"].items()
    }
    needed = table["needed"]
    islands = {module: frozenset(libraries) for module, libraries in needed.get("islands", {}).items()}
    return Floors(targets, frozenset(needed["everywhere"]), frozenset(needed["frameworks"]), islands)


def split_version(version: str) -> tuple[str, Version | None]:
    """`GLIBCXX_3.4.29` as family and number; the number is None for a version that has none and isn't known here."""
    match = _VERSION.fullmatch(_NAMED.get(version, version))
    return (match[1], Version(match[2])) if match else (version, None)
