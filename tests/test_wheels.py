"""What the built wheels hold and promise, read from the wheels themselves.

`nox -s wheel_smoke` installs them in clean environments; this reads their content and metadata.
"""

from __future__ import annotations

import subprocess
import sys
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename
from packaging.version import Version

from workspace import ROOT, Package, discover

PACKAGES = discover()
PURE = [package for package in PACKAGES.values() if package.import_name != "hp_kernels"]
FRAMEWORKS = {"torch", "mindspore", "torch-npu"}


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


def metadata(wheel: Path) -> Message:
    """The METADATA of a wheel."""
    with ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def requirements(wheel: Path) -> list[Requirement]:
    """What a wheel declares, extras included."""
    return [Requirement(text) for text in metadata(wheel).get_all("Requires-Dist", [])]


def test_tag_is_pure_and_so_is_the_content(wheels: dict[str, Path], package: Package) -> None:
    _, version, _, tags = parse_wheel_filename(wheels[package.name].name)
    assert version == Version(package.version)
    assert {str(tag) for tag in tags} == {"py3-none-any"}
    with ZipFile(wheels[package.name]) as archive:
        native = [name for name in archive.namelist() if archive.read(name)[:4] == b"\x7fELF"]
    assert native == []


def test_wheel_holds_the_package_its_types_and_its_licence(wheels: dict[str, Path], package: Package) -> None:
    with ZipFile(wheels[package.name]) as archive:
        names = archive.namelist()
    roots = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert roots == {package.import_name}
    assert f"{package.import_name}/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    sources = {path.relative_to(package.folder / "src").as_posix() for path in package.source.rglob("*.py*")}
    assert {name for name in sources if name.endswith((".py", ".pyi"))} <= set(names)


def test_licence_and_python_range_are_declared(wheels: dict[str, Path], package: Package) -> None:
    found = metadata(wheels[package.name])
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Requires-Python"] == "<3.14,>=3.10"
    assert (package.folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_no_wheel_needs_a_framework(wheels: dict[str, Path], package: Package) -> None:
    required = {found.name for found in requirements(wheels[package.name]) if found.marker is None}
    assert not required & FRAMEWORKS


def test_siblings_are_bounded_on_both_sides(wheels: dict[str, Path], package: Package) -> None:
    for found in requirements(wheels[package.name]):
        if found.name in PACKAGES and not found.extras:
            operators = {specifier.operator for specifier in found.specifier}
            assert operators == {">=", "<"}, f"{found}: a sibling's minor version is its API, so the range must end"
            assert found.specifier.contains(PACKAGES[found.name].version), f"{found} excludes the one beside it"


def test_every_package_has_a_changelog_and_a_readme(package: Package) -> None:
    assert "## [" in (package.folder / "CHANGELOG.md").read_text("utf-8")
    assert package.name in (package.folder / "README.md").read_text("utf-8")
