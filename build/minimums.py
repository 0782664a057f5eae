"""The oldest siblings that a package says it works with, and wheels of them.

A package states a range of each sibling: `hp-core>=0.1.0,<0.2`. `build/try_wheels.py` installs it with the lower ends. Where one
is older than the tree, the wheel is built from the commit that released it, tagged `hp-core-v0.1.0`.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from workspace import ROOT, Package, read_toml


def release_tag(name: str, version: Version | str) -> str:
    """The tag of a release in git."""
    return f"{name}-v{version}"


def declared_minimums(package: Package, packages: dict[str, Package]) -> dict[str, Version]:
    """The lower end of the range that a package declares of each sibling it always needs.

    Raises:
        ValueError: a range has no lower end, or the tree's own version of the sibling is outside of it.
    """
    project = read_toml(package.folder / "pyproject.toml")["project"]
    found: dict[str, Version] = {}
    for text in project.get("dependencies", ()):
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if name not in packages:
            continue
        lower = [Version(one.version) for one in requirement.specifier if one.operator in (">=", "==", "~=")]
        if not lower:
            raise ValueError(f"{package.name} requires {text}, which says no oldest version; write {name}>=X.Y.Z")
        if not requirement.specifier.contains(packages[name].version, prereleases=True):
            raise ValueError(f"{package.name} requires {text}, which leaves out the {packages[name].version} beside it")
        found[name] = max(lower)
    return found


def minimum_wheel(package: Package, version: Version, current: Path, folder: Path, root: Path = ROOT) -> Path:
    """The wheel of one version of a package: that of the tree, or one built from the tag of its release.

    Args:
        package: the package.
        version: which version.
        current: the folder with the wheels of the tree.
        folder: where to put a wheel of an older version.
        root: the repository.

    Raises:
        ValueError: there is no such tag, or the tag holds another version.
    """
    if version == Version(package.version):
        [wheel] = current.glob(f"{package.wheel_name()}*.whl")
        return wheel
    tag = release_tag(package.name, version)
    inside = package.folder.relative_to(root).as_posix()
    archive = subprocess.run(
        ["git", "archive", "--format", "zip", tag, inside], cwd=root, capture_output=True, check=False
    )
    if archive.returncode != 0:
        raise ValueError(
            f"{package.name} {version} is declared as a minimum, and {root} has no tag {tag} to build it from "
            f"({archive.stderr.decode().strip()}). Fetch the tags (git fetch --tags), or raise the minimum to {package.version}"
        )
    with tempfile.TemporaryDirectory() as work:
        with ZipFile(io.BytesIO(archive.stdout)) as tree:
            tree.extractall(work)
        found = read_toml(Path(work) / inside / "pyproject.toml")["project"]["version"]
        if Version(found) != version:
            raise ValueError(f"the tag {tag} holds {package.name} {found}")
        command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder)]
        built = subprocess.run([*command, str(Path(work) / inside)], capture_output=True, text=True, check=False)
    if built.returncode != 0:
        raise ValueError(f"{package.name} {version} can't be built from its tag {tag}:\n{built.stdout}{built.stderr}")
    [wheel] = folder.glob(f"{package.name.replace('-', '_')}-{version}-*.whl")
    return wheel
