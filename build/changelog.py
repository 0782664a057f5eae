"""A package's changes since its last release, and the section of its CHANGELOG.md that they become.

Changes stand under [Unreleased], or as fragments, one file each in `changelog.d/` (`+ring-order.fixed.md`, or `12.fixed.md` for
issue 12), which several people can add at once without meeting in one line. towncrier reads those; both are merged, in the order
of Keep a Changelog.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
FRAGMENTS = "changelog.d"
UNRELEASED = "## [Unreleased]"

Changes = Mapping[str, str]

_FRAGMENT = re.compile(r"(?:\+[\w-]+|\d+)\.(?:" + "|".join(kind.lower() for kind in KINDS) + r")\.md")


def read_changes(folder: Path) -> Changes:
    """All unreleased changes of a package: the text under each kind's heading.

    Args:
        folder: the package's folder.

    Raises:
        ValueError: CHANGELOG.md has no [Unreleased], a kind isn't one of Keep a Changelog, or a fragment is misnamed.
    """
    changes: dict[str, list[str]] = {}
    for text in (_unreleased(folder)[1], _fragments_as_text(folder)):
        for kind, entries in _by_kind(folder, text).items():
            changes.setdefault(kind, []).append(entries)
    return {kind: "\n".join(changes[kind]) for kind in KINDS if kind in changes}


def released(folder: Path, changes: Changes, version: str, date: str) -> str:
    """The text of CHANGELOG.md once the changes are a release: their section below an empty [Unreleased]."""
    before, _, after = _unreleased(folder)
    return f"{before}{UNRELEASED}\n\n{section(changes, version, date)}\n{after}".rstrip("\n") + "\n"


def section(changes: Changes, version: str, date: str) -> str:
    """The section of a release."""
    parts = [f"## [{version}] - {date}\n"]
    parts += [f"### {kind}\n\n{text}\n" for kind, text in changes.items()]
    return "\n".join(parts)


def fragments(folder: Path) -> list[Path]:
    """The fragments of a package.

    Raises:
        ValueError: a file there isn't named +SLUG.KIND.md or ISSUE.KIND.md.
    """
    found = sorted(path for path in (folder / FRAGMENTS).glob("*") if not path.name.startswith("."))
    for path in found:
        if _FRAGMENT.fullmatch(path.name) is None:
            kinds = ", ".join(kind.lower() for kind in KINDS)
            raise ValueError(f"{path} must be named +SLUG.KIND.md or ISSUE.KIND.md, with a KIND of {kinds}")
    return found


def _unreleased(folder: Path) -> tuple[str, str, str]:
    """CHANGELOG.md cut into what stands before [Unreleased], under it, and from the next release on."""
    path = folder / "CHANGELOG.md"
    before, heading, rest = path.read_text("utf-8").partition(UNRELEASED)
    if not heading:
        raise ValueError(f"{path} has no {UNRELEASED}, under which the changes since the last release stand")
    older = re.search(r"^## ", rest, re.MULTILINE)
    cut = older.start() if older else len(rest)
    return before, rest[:cut], rest[cut:]


def _by_kind(folder: Path, text: str) -> dict[str, str]:
    """What stands under each `### Kind`."""
    first, *parts = re.split(r"^### +(.+?) *$", text, flags=re.MULTILINE)
    if first.strip():
        raise ValueError(f"{folder / 'CHANGELOG.md'}: a change stands under no kind: {first.strip().splitlines()[0]}")
    found: dict[str, str] = {}
    for kind, entries in zip(parts[::2], parts[1::2], strict=True):
        if kind not in KINDS:
            raise ValueError(f"{folder / 'CHANGELOG.md'}: {kind!r} is none of {', '.join(KINDS)}")
        if entries.strip():
            found[kind] = "\n".join([*([found[kind]] if kind in found else []), entries.strip()])
    return found


def _fragments_as_text(folder: Path) -> str:
    """The fragments in the form of a section, by towncrier."""
    if not fragments(folder):
        return ""
    types = "".join(
        f'[[tool.towncrier.type]]\ndirectory = "{kind.lower()}"\nname = "{kind}"\nshowcontent = true\n'
        for kind in KINDS
    )
    with tempfile.TemporaryDirectory() as work:
        config = Path(work) / "towncrier.toml"
        settings = f'directory = "{FRAGMENTS}"\nfilename = "CHANGELOG.md"\ntitle_format = "## x"\nwrap = false\n'
        config.write_text(f"[tool.towncrier]\n{settings}{types}", "utf-8")
        command = [sys.executable, "-m", "towncrier", "build", "--draft", "--config", str(config), "--dir", str(folder)]
        result = subprocess.run(
            [*command, "--version", "0", "--date", "-"], capture_output=True, text=True, check=False, cwd=folder
        )
    if result.returncode != 0:
        raise ValueError(f"towncrier can't read {folder / FRAGMENTS}:\n{result.stdout}{result.stderr}")
    return re.sub(r"\A.*?(?=^### )", "", result.stdout, flags=re.DOTALL | re.MULTILINE)
