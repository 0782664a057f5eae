"""Prepares the release of a package, and publishes nothing: version, changelog, ranges of dependents, tag.

Usage: python build/release.py prepare NAME [--version X.Y.Z] [--dry-run], then, once the tests of its dependents have passed,
python build/release.py next NAME, which says what is left to do. `nox -s release -- NAME` does all three.

A release is decided first, as a value (`plan`), and only then written.
"""

from __future__ import annotations

import argparse
import datetime
import difflib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tomlkit
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from changelog import FRAGMENTS, Changes, fragments, read_changes, released, section
from minimums import release_tag
from workspace import ROOT, Package, discover, with_dependents

# Kinds of changes that may break a caller; our minor version is the API.
BREAKING = ("Changed", "Removed")


@dataclass(frozen=True)
class Plan:
    """A release, decided and not yet written.

    Attributes:
        name: the package.
        old: the version in the tree.
        new: the version to release.
        tag: the tag that the release commit will have.
        section: its section of the changelog.
        texts: the files that change, with their new text.
        removed: the fragments that the section has taken up.
        widened: packages whose range of this one had left out the new version.
        tested: the packages whose tests must pass: this one and its dependents.
    """

    name: str
    old: Version
    new: Version
    tag: str
    section: str
    texts: Mapping[Path, str]
    removed: tuple[Path, ...]
    widened: tuple[str, ...]
    tested: tuple[str, ...]


def plan(root: Path, name: str, version: str | None = None, date: str | None = None) -> Plan:
    """Decide a release.

    Args:
        root: the repository.
        name: the package to release.
        version: the version to give it. Without one: the version in the tree if that was never released; else the next minor
            version if something was changed or removed, the next patch if things were only added or mended.
        date: the date of the release, YYYY-MM-DD; today if None.

    Raises:
        ValueError: there is no such package, nothing has changed, or the version isn't a newer one.
    """
    packages = discover(root)
    if name not in packages:
        raise ValueError(f"no package {name!r}; there are: {', '.join(packages)}")
    package = packages[name]
    changes = read_changes(package.folder)
    if not changes:
        raise ValueError(f"{name} has no changes under [Unreleased] or in {FRAGMENTS}/ since its last release")
    old = Version(package.version)
    tags = set(_git(root, "tag", "--list", f"{name}-v*"))
    new = _chosen(version, old, tags, name) if version else _next(old, changes, tags, name)
    date = date or datetime.date.today().isoformat()

    texts = {
        package.folder / "pyproject.toml": _with_version(package, new),
        package.folder / "CHANGELOG.md": released(package.folder, changes, str(new), date),
    }
    widened = []
    dependents = with_dependents(packages, [name])
    for dependent in dependents:
        if name in dependent.siblings and (text := _with_range(dependent, name, new)) is not None:
            texts[dependent.folder / "pyproject.toml"] = text
            news = dependent.folder / FRAGMENTS / f"+{name}-{new.major}-{new.minor}.added.md"
            texts[news] = f"Works with {name} {new.major}.{new.minor}.\n"
            widened.append(dependent.name)
    return Plan(
        name=name,
        old=old,
        new=new,
        tag=release_tag(name, new),
        section=section(changes, str(new), date),
        texts=texts,
        removed=tuple(fragments(package.folder)),
        widened=tuple(widened),
        tested=tuple(found.name for found in dependents),
    )


def write(decided: Plan, root: Path) -> None:
    """Write the files of a release.

    Raises:
        ValueError: the tree holds changes that aren't committed; nothing is written then.
    """
    dirty = _git(root, "status", "--porcelain")
    if dirty:
        shown = "\n".join(dirty[:10])
        raise ValueError(f"the tree has changes that aren't committed; commit or stash them first:\n{shown}")
    for path, text in decided.texts.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
    for path in decided.removed:
        path.unlink()


def describe(decided: Plan, root: Path) -> str:
    """What a release would change, for people: versions, tag, and the differences of all files."""
    lines = [
        f"{decided.name} {decided.old} -> {decided.new}, tag {decided.tag}",
        f"tests to pass: {', '.join(decided.tested)}",
        *(f"{name}'s range of {decided.name} is widened" for name in decided.widened),
        "",
    ]
    texts: dict[Path, str | None] = {**decided.texts, **dict.fromkeys(decided.removed)}
    for path, text in texts.items():
        before = path.read_text("utf-8") if path.exists() else ""
        shown = path.relative_to(root).as_posix()
        lines += difflib.unified_diff(
            before.splitlines(),
            (text or "").splitlines(),
            shown,
            shown if text is not None else "/dev/null",
            lineterm="",
        )
    return "\n".join(lines)


def next_steps(root: Path, name: str) -> str:
    """What is left to do by hand once a release is prepared and its dependents are tested."""
    package = discover(root)[name]
    tag = release_tag(name, package.version)
    build = (
        "\n".join(f"    nox -s wheels -- --target {folder.name}" for folder in sorted((root / "docker").glob("*/")))
        if package.native
        else f'    nox -s "build({name})"'
    )
    return (
        f"{name} {package.version} is prepared, and the tests of its dependents pass. Nothing is committed or published. Next:\n"
        f"    git add --all packages && git commit -m 'Release {name} {package.version}'\n"
        f"    git tag -a {tag} -m '{name} {package.version}'\n"
        f"{build}\n"
        "then push the tag, and upload the wheels from dist/. To give it up: git checkout -- packages && git clean -f packages"
    )


def _chosen(version: str, old: Version, tags: set[str], name: str) -> Version:
    try:
        new = Version(version)
    except InvalidVersion as error:
        raise ValueError(f"{version!r} is no version; write X.Y.Z") from error
    if release_tag(name, new) in tags:
        raise ValueError(f"{name} {new} was released: the tag {release_tag(name, new)} exists")
    if new < old:
        raise ValueError(f"{name} is at {old}, so {new} would be older")
    return new


def _next(old: Version, changes: Changes, tags: set[str], name: str) -> Version:
    if release_tag(name, old) not in tags:
        return old
    if any(kind in changes for kind in BREAKING):
        return Version(f"{old.major}.{old.minor + 1}.0")
    return Version(f"{old.major}.{old.minor}.{old.micro + 1}")


def _with_version(package: Package, new: Version) -> str:
    document = tomlkit.parse((package.folder / "pyproject.toml").read_text("utf-8"))
    document["project"]["version"] = str(new)
    return tomlkit.dumps(document)


def _with_range(package: Package, name: str, new: Version) -> str | None:
    """The pyproject.toml of a package with its range of a sibling widened; None where the range holds the version already."""
    path = package.folder / "pyproject.toml"
    text = path.read_text("utf-8")
    changed = False
    project = tomlkit.parse(text).unwrap()["project"]
    for line in project.get("dependencies", ()):
        requirement = Requirement(line)
        if canonicalize_name(requirement.name) != name or requirement.specifier.contains(new, prereleases=True):
            continue
        lower = [str(one) for one in requirement.specifier if one.operator == ">="]
        if {one.operator for one in requirement.specifier} != {">=", "<"}:
            raise ValueError(
                f"{package.name} requires {line}, which leaves out {new}; write it as a range, {name}>=X.Y.Z,<X.Y"
            )
        wider = f"{lower[0]},<{new.major}.{new.minor + 1}"
        if not SpecifierSet(wider).contains(new, prereleases=True):
            raise ValueError(f"{package.name} requires {line}, which begins after {new}")
        extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
        marker = f"; {requirement.marker}" if requirement.marker else ""
        text = text.replace(line, f"{requirement.name}{extras}{wider}{marker}")
        changed = True
    return text if changed else None


def _git(root: Path, *arguments: str) -> list[str]:
    result = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise ValueError(f"git {' '.join(arguments)} failed in {root}: {result.stderr.strip()}")
    return result.stdout.splitlines()


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Prepare a release, or say what is next; returns the exit status."""
    parser = argparse.ArgumentParser(prog="release.py", description="Prepare a release; nothing is published.")
    commands = parser.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser("prepare", help="write version, changelog and ranges")
    prepare.add_argument("name", help="a package, such as hp-fsdp")
    prepare.add_argument("--version", help="the version to release, where the changelog doesn't say it well enough")
    prepare.add_argument("--dry-run", action="store_true", help="only print what would be written")
    following = commands.add_parser("next", help="say what is left to do")
    following.add_argument("name")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "next":
            print(next_steps(root, chosen.name))
            return 0
        decided = plan(root, chosen.name, chosen.version)
        print(describe(decided, root))
        if not chosen.dry_run:
            write(decided, root)
            print(f"\nwritten: {decided.name} {decided.new}")
    except ValueError as error:
        sys.stderr.write(f"release: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
