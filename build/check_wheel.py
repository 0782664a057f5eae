"""Whether a wheel is what its name and metadata say, and runs wherever pip would install it.

Usage: python build/check_wheel.py [--target NAME]... FILE...

Each rule is a function from a wheel to what is wrong with it. `--target` adds the demand that the wheel serves a target of
build/floors.toml, whatever its tag. Exit status: 0, 1 (a rule is broken), 2 (usage).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from packaging.tags import Tag, parse_tag
from packaging.utils import canonicalize_name
from packaging.version import Version

from shared_objects import SharedObject
from targets import ARCHITECTURES, Floors, Target, read_floors, split_version
from wheel_file import Wheel, read_wheel
from workspace import discover

FRAMEWORKS = frozenset({"torch", "torch-npu", "mindspore"})
LICENCE = "Apache-2.0"
# Longest lists of symbols in a message.
_SHOWN = 3

# The aliases of PEP 600 for the manylinux tags of old, by the glibc that they stand for.
_ALIASES = {"manylinux1": "2.5", "manylinux2010": "2.12", "manylinux2014": "2.17"}
_PLATFORM = re.compile(r"(?:linux|(manylinux(?:_(\d+)_(\d+)|1|2010|2014)))_(\w+)")
_EXTENSION = re.compile(r"\.(?:cpython-(\d+)-(\w+)-linux-gnu|(abi3))\.so$")
_TESTS = re.compile(r"(?:^|/)(?:tests?(?:_\w+)?/|conftest\.py$|test_\w+\.py$)")
_LEFTOVER = re.compile(r"(?:^|/)(?:__pycache__/|\.git|\.DS_Store$)|\.(?:pyc|pyo|o|a)$")


class Finding(NamedTuple):
    """A broken rule: its name, and what is wrong and what to do."""

    rule: str
    message: str


@dataclass(frozen=True)
class Demands:
    """What wheels are held against.

    Attributes:
        floors: what the targets offer.
        siblings: the distributions of the workspace, normalised; their ranges must be bounded.
        targets: targets that the wheel must serve, whatever its tag.
    """

    floors: Floors
    siblings: frozenset[str]
    targets: tuple[Target, ...] = ()

    def served(self, wheel: Wheel) -> tuple[Target, ...]:
        """The targets whose libraries have all that the wheel's shared objects need, whatever its tag."""
        return tuple(target for target in self.floors.targets.values() if not list(missing(wheel, target)))

    def promised(self, wheel: Wheel) -> tuple[Target, ...]:
        """The targets that the wheel must serve: those demanded, and those where its tag lets pip install it."""
        glibcs = [glibc for glibc in map(tagged_glibc, wheel.platforms) if glibc is not None]
        reached = [target for target in self.floors.targets.values() if glibcs and target.takes(min(glibcs))]
        return (*self.targets, *(target for target in reached if target not in self.targets))


Rule = Callable[[Wheel, Demands], Iterator[str]]


def tag_names_what_is_inside(wheel: Wheel, _: Demands) -> Iterator[str]:
    """A wheel for any machine has nothing compiled in it; one for a platform has, for that platform."""
    if wheel.pure:
        for path in wheel.native:
            yield (
                f"the tag py3-none-any says that it runs on every machine, and {path} is compiled code. Build it with the tag "
                "of its Python and platform (hp-kernels does so by the hook of scikit-build-core)"
            )
        return
    if not wheel.native:
        yield f"the tag {_names(wheel.platforms)} says that it is for one platform, and nothing in it is compiled"
    for platform in sorted(wheel.platforms):
        match = _PLATFORM.fullmatch(platform)
        if match is None or match[4] not in ARCHITECTURES:
            yield f"the platform {platform} is none that we build for: linux or manylinux on {' or '.join(ARCHITECTURES)}"
            continue
        for found in wheel.shared_objects:
            if found.machine != match[4]:
                yield f"{found.path} is compiled for {found.machine}, and the tag says {match[4]}"


def modules_fit_the_interpreter(wheel: Wheel, _: Demands) -> Iterator[str]:
    """The suffix of an extension module names the interpreter and architecture of the tag."""
    for found in wheel.shared_objects:
        match = _EXTENSION.search(found.path)
        if match is None:
            continue
        if match[3]:
            if {tag.abi for tag in wheel.tags} != {"abi3"}:
                yield f"{found.path} uses the stable ABI, and the tag says {_names({tag.abi for tag in wheel.tags})}"
            continue
        interpreter = f"cp{match[1]}"
        if {(tag.interpreter, tag.abi) for tag in wheel.tags} != {(interpreter, interpreter)}:
            yield (
                f"{found.path} is for {interpreter}-{interpreter}, and the tag says "
                f"{_names({f'{tag.interpreter}-{tag.abi}' for tag in wheel.tags})}: a Python that the tag lets in can't import it"
            )
        if match[2] != found.machine:
            yield f"{found.path} is named for {match[2]} and compiled for {found.machine}"


def name_and_metadata_agree(wheel: Wheel, _: Demands) -> Iterator[str]:
    """The file's name, its METADATA and its WHEEL say the same."""
    name, version = str(wheel.metadata["Name"]), str(wheel.metadata["Version"])
    if canonicalize_name(name) != wheel.name or Version(version) != wheel.version:
        yield f"the file is named for {wheel.name} {wheel.version}, and METADATA says {name} {version}"
    written: set[Tag] = set().union(*(parse_tag(text) for text in wheel.description.get_all("Tag", [])))
    if written != wheel.tags:
        yield (
            f"WHEEL says {_names(map(str, written))}, and the file's name {_names(map(str, wheel.tags))}. "
            "A wheel isn't given another tag by renaming it: auditwheel repair does that (nox -s wheels)"
        )
    purelib = str(wheel.description.get("Root-Is-Purelib", "")).lower()
    if purelib != str(wheel.pure).lower():
        yield f"WHEEL says Root-Is-Purelib: {purelib or 'nothing'}, and the tags are {_names(wheel.platforms)}"


def symbols_are_on_the_targets(wheel: Wheel, demands: Demands) -> Iterator[str]:
    """Every version of symbols that a shared object needs is on every target that must run it."""
    for target in demands.promised(wheel):
        demanded = "" if target in demands.targets else f", where pip installs a wheel tagged {_names(wheel.platforms)}"
        for found, version, library, symbols in missing(wheel, target):
            family, _ = split_version(version)
            newest = f"{family}_{target.offers[family]}" if family in target.offers else f"no {family}"
            yield (
                f"{found.path} needs {version} of {library}{_for(symbols)}; {target.title} has up to {newest}{demanded}. "
                f"Build it in that system's image: nox -s wheels -- --target {target.name}"
            )
    # A tag may also ask for less than the oldest target has.
    for platform in sorted(wheel.platforms):
        glibc = tagged_glibc(platform)
        for found in wheel.shared_objects if glibc is not None else ():
            for need in found.needs:
                family, number = split_version(need.version)
                if family == "GLIBC" and number is not None and glibc is not None and number > glibc:
                    yield (
                        f"{found.path} needs {need.version} of {need.library}{_for(need.symbols)}, and the tag {platform} "
                        f"promises that {glibc} is enough. Let auditwheel repair choose the tag"
                    )


def libraries_are_everywhere(wheel: Wheel, demands: Demands) -> Iterator[str]:
    """A shared object asks the loader only for libraries that every target has, or that lie in the wheel."""
    carried = {PurePosixPath(path).name for path in wheel.native}
    for found in wheel.shared_objects:
        module = PurePosixPath(found.path).name.partition(".")[0]
        allowed = demands.floors.everywhere | demands.floors.islands.get(module, frozenset()) | carried
        for library in found.needed:
            if library not in allowed:
                yield (
                    f"{found.path} links {library}, which is on no list in build/floors.toml: a machine without it can't load "
                    "the module. Link it statically, do without, or make it an optional island"
                )
    for library in sorted(carried & demands.floors.foreign):
        yield f"it carries {library}, which others install: two copies in one process break each other"


def rpaths_stay_inside(wheel: Wheel, _: Demands) -> Iterator[str]:
    """A shared object looks for libraries only in the wheel that it came in."""
    for found in wheel.shared_objects:
        for folder in found.rpath:
            if not _inside(folder, found.path):
                yield (
                    f"{found.path} has the RPATH {folder!r}: the loader would take libraries from there on a user's machine. "
                    "Only folders of the wheel are allowed, from $ORIGIN on"
                )


def types_come_along(wheel: Wheel, _: Demands) -> Iterator[str]:
    """The package is one, and has the marker that makes type checkers read it."""
    package = wheel.name.replace("-", "_")
    own = [name for name in wheel.packages if not name.endswith(".libs")]
    if own != [package]:
        yield f"it installs {_names(own) or 'nothing'} and must install {package} alone"
    if f"{package}/py.typed" not in wheel.files:
        yield f"{package}/py.typed is missing, so type checkers ignore the package"


def licence_comes_along(wheel: Wheel, _: Demands) -> Iterator[str]:
    """The licence is declared, and its text is inside."""
    if wheel.metadata["License-Expression"] != LICENCE:
        yield f"METADATA says License-Expression: {wheel.metadata['License-Expression']}, which must be {LICENCE}"
    if not any(path.endswith(".dist-info/licenses/LICENSE") for path in wheel.files):
        yield "the text of the licence is missing: license-files of its pyproject.toml names no file that exists"


def siblings_are_bounded(wheel: Wheel, demands: Demands) -> Iterator[str]:
    """What it takes of ours has a range that begins and ends, since our minor versions are the API."""
    # An extra such as hp-core[torch] adds to a range that stands in a requirement of its own.
    bounded = {
        canonicalize_name(found.name)
        for found in wheel.requirements
        if found.marker is None and {specifier.operator for specifier in found.specifier} == {">=", "<"}
    }
    for found in wheel.requirements:
        name = canonicalize_name(found.name)
        if name in demands.siblings - {wheel.name} and name not in bounded:
            yield f"it requires {found}: give it a range that begins and ends, such as {name}>=0.1.0,<0.2"


def frameworks_are_optional(wheel: Wheel, _: Demands) -> Iterator[str]:
    """No framework is installed unless an extra asks for it."""
    for found in wheel.requirements:
        if canonicalize_name(found.name) in FRAMEWORKS and "extra" not in str(found.marker or ""):
            yield f"it requires {found}: a framework comes with an extra, so that no wheel forces one on a machine"


def nothing_else_is_shipped(wheel: Wheel, _: Demands) -> Iterator[str]:
    """No tests, caches or objects of a build."""
    for path in wheel.files:
        if _TESTS.search(path):
            yield f"{path} is a test: users don't install tests"
        elif _LEFTOVER.search(path):
            yield f"{path} is left over from a build or a run"


RULES: tuple[Rule, ...] = (
    tag_names_what_is_inside,
    modules_fit_the_interpreter,
    name_and_metadata_agree,
    symbols_are_on_the_targets,
    libraries_are_everywhere,
    rpaths_stay_inside,
    types_come_along,
    licence_comes_along,
    siblings_are_bounded,
    frameworks_are_optional,
    nothing_else_is_shipped,
)


def check(wheel: Wheel, demands: Demands) -> list[Finding]:
    """All broken rules of a wheel, in the order of the rules."""
    return [Finding(rule.__name__.replace("_", "-"), message) for rule in RULES for message in rule(wheel, demands)]


def missing(wheel: Wheel, target: Target) -> Iterator[tuple[SharedObject, str, str, tuple[str, ...]]]:
    """What a wheel needs and a target lacks: the object, the version of symbols, its library, and the symbols."""
    carried = {PurePosixPath(path).name for path in wheel.native}
    for found in wheel.shared_objects:
        for need in found.needs:
            family, _ = split_version(need.version)
            # Other libraries version their symbols as they like; whether they may be needed at all is another rule.
            if need.library not in carried and family in target.offers and not target.has(need.version):
                yield found, need.version, need.library, need.symbols


def tagged_glibc(platform: str) -> Version | None:
    """The glibc that a platform tag asks for; None for tags that ask for none."""
    match = _PLATFORM.fullmatch(platform)
    if match is None or match[1] is None:
        return None
    return Version(f"{match[2]}.{match[3]}" if match[2] else _ALIASES[match[1]])


def workspace_demands(targets: Sequence[str] = ()) -> Demands:
    """The demands on wheels of this workspace; ValueError for a target that isn't there."""
    floors = read_floors()
    return Demands(floors, frozenset(discover()), tuple(floors.target(name) for name in targets))


def _inside(folder: str, path: str) -> bool:
    """Whether an RPATH of a file in the wheel stays in the wheel."""
    match = re.fullmatch(r"(?:\$ORIGIN|\$\{ORIGIN\})(/.*)?", folder)
    if match is None:
        return False
    depth = len(PurePosixPath(path).parent.parts)
    for part in PurePosixPath((match[1] or "").lstrip("/")).parts:
        depth += -1 if part == ".." else 1
        if depth < 0:
            return False
    return True


def _for(symbols: Sequence[str]) -> str:
    if not symbols:
        return ""
    more = f" and {len(symbols) - _SHOWN} more" if len(symbols) > _SHOWN else ""
    return f" (for {', '.join(symbols[:_SHOWN])}{more})"


def _names(values: Iterable[str]) -> str:
    return ", ".join(sorted(values))


def main(arguments: Sequence[str]) -> int:
    """Check the wheels named; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="check_wheel.py", description="Check wheels against their tags and our targets."
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument(
        "--target", action="append", default=[], help="a target of build/floors.toml that must be served"
    )
    chosen = parser.parse_args(arguments)
    try:
        demands = workspace_demands(chosen.target)
    except ValueError as error:
        parser.error(str(error))
    broken = False
    for path in chosen.files:
        try:
            wheel = read_wheel(path)
        except ValueError as error:
            findings = [Finding("readable", str(error))]
        else:
            findings = check(wheel, demands)
        broken = broken or bool(findings)
        for rule, message in findings:
            print(f"{path.name}: {rule}: {message}")
        if not findings:
            serves = (
                "every machine"
                if wheel.pure
                else _names(target.title for target in demands.served(wheel)) or "no target"
            )
            print(f"{path.name}: keeps all {len(RULES)} rules; serves {serves}")
    return int(broken)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
