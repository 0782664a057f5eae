"""What packages this repository holds, and who depends on whom.

Everything is read from `packages/*/pyproject.toml`, so a new package is a new folder and nothing else: the noxfile,
the import rules and the tests of the workspace all ask here. `python build/workspace.py native` prints the packages that
compile code, for scripts.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:  # nox, which loads this file, brings tomli on Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent

# Build requirements that compile.
_COMPILING = ("scikit-build-core", "pybind11", "cmake")
_REQUIREMENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Package:
    """One distribution of the workspace.

    Attributes:
        name: the distribution's name, as pip knows it (`hp-core`).
        version: its version.
        folder: where its `pyproject.toml` lies.
        import_name: the package that it installs (`hp_core`).
        siblings: distributions of this workspace that it depends on directly, extras included.
        extras: names of its optional dependencies.
        libraries: what it requires and isn't of this workspace: pairs of an extra ("" for what it always needs) and a requirement.
        build_requires: what its build backend needs.
        floors: for a package that orders its own modules, the floors from top to bottom.
        pure_tests: paths, from its folder, of tests that need no framework.
        native: whether it compiles code, so that its wheel is for one Python and platform.
    """

    name: str
    version: str
    folder: Path
    import_name: str
    siblings: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    libraries: tuple[tuple[str, str], ...] = ()
    build_requires: tuple[str, ...] = ()
    floors: tuple[tuple[str, ...], ...] = ()
    pure_tests: tuple[str, ...] = ()
    native: bool = False

    @property
    def source(self) -> Path:
        """The folder of the importable package."""
        return self.folder / "src" / self.import_name

    @property
    def tests(self) -> Path:
        """The folder of its own tests."""
        return self.folder / "tests"

    def wheel_name(self) -> str:
        """How the file name of its wheel begins, up to the tags."""
        return f"{self.name.replace('-', '_')}-{self.version}-"


def discover(root: Path = ROOT) -> dict[str, Package]:
    """Read every `packages/*/pyproject.toml`.

    Args:
        root: the workspace.

    Returns:
        The packages by name, each after those it depends on.

    Raises:
        ValueError: a package has no, or more than one, importable package in `src/`, or the dependencies form a circle.
    """
    tables = {path.parent: read_toml(path) for path in root.glob("packages/*/pyproject.toml")}
    names = {table["project"]["name"] for table in tables.values()}
    found = {}
    for folder, table in sorted(tables.items()):
        project = table["project"]
        importable = [path.parent.name for path in folder.glob("src/*/__init__.py")]
        if len(importable) != 1:
            raise ValueError(f"{folder}: src/ must hold exactly one package, found {sorted(importable)}")
        optional = project.get("optional-dependencies", {})
        requirements = chain(project.get("dependencies", ()), *optional.values())
        required = {requirement_name(text) for text in requirements}
        own = table.get("tool", {}).get("hyper-parallel", {})
        found[project["name"]] = Package(
            name=project["name"],
            version=project["version"],
            folder=folder,
            import_name=importable[0],
            siblings=tuple(sorted(required & names - {project["name"]})),
            extras=tuple(sorted(optional)),
            libraries=tuple(
                (extra, text)
                for extra, texts in [("", project.get("dependencies", ())), *optional.items()]
                for text in texts
                if requirement_name(text) not in names
            ),
            build_requires=tuple(table["build-system"]["requires"]),
            floors=tuple(tuple(floor) for floor in own.get("floors", ())),
            pure_tests=tuple(own.get("pure-tests", ())),
            native=any(requirement_name(text) in _COMPILING for text in table["build-system"]["requires"]),
        )
    return {name: found[name] for name in _in_order(found)}


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    return tomllib.loads(path.read_text("utf-8"))


def requirement_name(requirement: str) -> str:
    """The normalised distribution name in a requirement such as `hp_core[torch]>=0.1`."""
    match = _REQUIREMENT_NAME.match(requirement.strip())
    if match is None:
        raise ValueError(f"not a requirement: {requirement!r}")
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def with_siblings(packages: dict[str, Package], name: str) -> list[Package]:
    """A package and everything of the workspace that it needs, dependencies first."""
    needed = {name}
    for candidate in reversed(packages):
        if candidate in needed:
            needed.update(packages[candidate].siblings)
    return [package for package in packages.values() if package.name in needed]


def with_dependents(packages: dict[str, Package], names: Iterable[str]) -> list[Package]:
    """The named packages and everything of the workspace that depends on them, directly or not."""
    reached = set(names)
    for package in packages.values():
        if reached.intersection(package.siblings):
            reached.add(package.name)
    return [package for package in packages.values() if package.name in reached]


def affected(packages: dict[str, Package], changed: Sequence[str], root: Path = ROOT) -> list[Package]:
    """The packages whose tests a change can break.

    Args:
        packages: as `discover` returns them.
        changed: paths of changed files, relative to the root.
        root: the workspace.

    Returns:
        Packages with a changed file, and their dependents. A change to what all of them stand on (the build folder,
        the noxfile, the workspace's settings) affects every package; one to documentation or examples affects none.
    """
    if any(path.startswith("build/") or path in ("noxfile.py", "pyproject.toml") for path in changed):
        return list(packages.values())
    folders = {package.folder.relative_to(root).as_posix() + "/": package.name for package in packages.values()}
    names = {name for path in changed for folder, name in folders.items() if path.startswith(folder)}
    return with_dependents(packages, names)


def _in_order(packages: dict[str, Package]) -> list[str]:
    """Names with each package after its dependencies."""
    ordered: list[str] = []
    while len(ordered) < len(packages):
        ready = [
            name for name in sorted(packages) if name not in ordered and set(packages[name].siblings) <= {*ordered}
        ]
        if not ready:
            raise ValueError(f"packages depend on each other in a circle: {sorted(set(packages) - set(ordered))}")
        ordered += ready
    return ordered


if __name__ == "__main__":
    if sys.argv[1:] != ["native"]:
        sys.exit("usage: python build/workspace.py native")
    for found in discover().values():
        if found.native:
            print(found.name)
