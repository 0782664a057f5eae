"""What the built wheels hold and promise, read from the wheels themselves.

`nox -s wheel_smoke` builds all, the native ones too, and installs them in clean environments; this reads the pure ones.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from check_wheel import check, workspace_demands
from minimums import declared_minimums
from wheel_file import read_wheel
from workspace import ROOT, Package, discover

PACKAGES = discover()
PURE = [package for package in PACKAGES.values() if not package.native]


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every pure wheel, built from the working tree."""
    folder = tmp_path_factory.mktemp("wheels")
    for package in PURE:
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        subprocess.run(command, cwd=package.folder, check=True, capture_output=True, timeout=120)
    return {package.name: next(folder.glob(f"{package.wheel_name()}*.whl")) for package in PURE}


@pytest.fixture(params=PURE, ids=lambda package: package.name)
def package(request: pytest.FixtureRequest) -> Package:
    """One package after another."""
    found = request.param
    assert isinstance(found, Package)
    return found


def test_it_keeps_the_rules_that_every_wheel_is_held_to(wheels: dict[str, Path], package: Package) -> None:
    """Tag and content, metadata, types, licence, bounded siblings, no framework, no tests: tests/test_check_wheel.py."""
    wheel = read_wheel(wheels[package.name])
    assert wheel.pure
    assert check(wheel, workspace_demands()) == []


def test_it_holds_every_module_and_stub(wheels: dict[str, Path], package: Package) -> None:
    sources = {path.relative_to(package.folder / "src").as_posix() for path in package.source.rglob("*.py*")}
    assert {name for name in sources if name.endswith((".py", ".pyi"))} <= set(read_wheel(wheels[package.name]).files)


def test_licence_and_python_range_are_those_of_the_workspace(wheels: dict[str, Path], package: Package) -> None:
    assert read_wheel(wheels[package.name]).metadata["Requires-Python"] == "<3.14,>=3.10"
    assert (package.folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("name", PACKAGES)
def test_ranges_of_siblings_hold_the_one_beside_it(name: str) -> None:
    declared = declared_minimums(PACKAGES[name], PACKAGES)
    assert set(declared) <= set(PACKAGES[name].siblings)


@pytest.mark.parametrize("package", PACKAGES.values(), ids=lambda package: package.name)
def test_every_package_has_a_changelog_and_a_readme(package: Package) -> None:
    assert "## [" in (package.folder / "CHANGELOG.md").read_text("utf-8")
    assert package.name in (package.folder / "README.md").read_text("utf-8")
