"""A repository of three small packages, with a commit and a release, for the tests of releases and of oldest siblings."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n{changes}"


def make_repository(root: Path) -> Path:
    """Write core 0.1.0, a component on it and an umbrella over both, commit them, and tag core's release."""
    root.mkdir(exist_ok=True)
    git(root, "init", "--quiet", "--initial-branch", "main")
    make_package(root, "hp-core", [])
    make_package(root, "hp-part", ["hp-core>=0.1.0,<0.2"])
    make_package(root, "hyper-parallel", ["hp-core>=0.1.0,<0.2", "hp-part>=0.1.0,<0.2"])
    commit(root, "First")
    git(root, "tag", "hp-core-v0.1.0")
    return root


def make_package(root: Path, name: str, dependencies: list[str]) -> Path:
    """Write a package that can be built, whose one function says its version."""
    folder = root / "packages" / name
    source = folder / "src" / name.replace("-", "_")
    source.mkdir(parents=True)
    (source / "__init__.py").write_text('"""Made up."""\n\nSINCE = "0.1"\n', "utf-8")
    required = "".join(f'    "{one}",\n' for one in dependencies)
    (folder / "pyproject.toml").write_text(
        "# A comment that stays.\n"
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n\n'
        f'[project]\nname = "{name}"\nversion = "0.1.0"  # the only place\n'
        f"dependencies = [\n{required}]\n\n"
        f'[tool.hatch.build.targets.wheel]\npackages = ["src/{source.name}"]\n',
        "utf-8",
    )
    (folder / "CHANGELOG.md").write_text(CHANGELOG.format(changes="### Added\n\n- The first version.\n"), "utf-8")
    return folder


def change(root: Path, name: str, changes: str, fragments: dict[str, str] | None = None) -> None:
    """Put changes under [Unreleased], and fragments beside them, and commit."""
    folder = root / "packages" / name
    (folder / "CHANGELOG.md").write_text(
        CHANGELOG.format(changes=f"{changes}\n## [0.1.0] - 2026-01-02\n\n### Added\n\n- The first version.\n"), "utf-8"
    )
    for file, text in (fragments or {}).items():
        (folder / "changelog.d").mkdir(exist_ok=True)
        (folder / "changelog.d" / file).write_text(text, "utf-8")
    commit(root, "Change")


def commit(root: Path, message: str) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", message)


def git(root: Path, *arguments: str) -> str:
    """Run git with an identity, and without the settings of this machine."""
    person = {
        f"GIT_{role}_{key}": value
        for role in ("AUTHOR", "COMMITTER")
        for key, value in (("NAME", "A"), ("EMAIL", "a@b.c"))
    }
    environment = {**os.environ, **person, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    result = subprocess.run(
        ["git", *arguments], cwd=root, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    return result.stdout
