"""The workspace is what its `pyproject.toml` files say: discovery, order, and what a change affects.

The noxfile stands on these answers, so a package that is added must be found, built, tested and checked without an
edit to it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from workspace import ROOT, Package, affected, discover, requirement_name, with_dependents, with_siblings

PACKAGES = discover()


def add_package(root: Path, name: str, dependencies: list[str]) -> None:
    """Write the least that makes a package."""
    folder = root / "packages" / name
    source = folder / "src" / name.replace("-", "_")
    source.mkdir(parents=True)
    (source / "__init__.py").touch()
    (folder / "pyproject.toml").write_text(
        f'[build-system]\nrequires = ["hatchling"]\n[project]\nname = "{name}"\nversion = "1.2"\n'
        f"dependencies = {dependencies}\n",
        "utf-8",
    )


@pytest.fixture
def diamond(tmp_path: Path) -> dict[str, Package]:
    """Two components on one core, and an umbrella over all; names chosen so that the alphabet is the wrong order."""
    add_package(tmp_path, "z-core", ["packaging>=24"])
    add_package(tmp_path, "b-left", ["z_core>=1"])
    add_package(tmp_path, "c-right", ["Z.Core ~= 1.2"])
    add_package(tmp_path, "a-all", ["b-left", "c-right[extra]; python_version > '3'"])
    return discover(tmp_path)


def names(packages: list[Package]) -> list[str]:
    return [package.name for package in packages]


def test_dependencies_come_first(diamond: dict[str, Package]) -> None:
    assert list(diamond) == ["z-core", "b-left", "c-right", "a-all"]
    assert diamond["a-all"].siblings == ("b-left", "c-right")
    assert diamond["z-core"].siblings == ()


def test_with_siblings_is_all_that_must_be_installed(diamond: dict[str, Package]) -> None:
    assert names(with_siblings(diamond, "b-left")) == ["z-core", "b-left"]
    assert names(with_siblings(diamond, "a-all")) == ["z-core", "b-left", "c-right", "a-all"]


def test_with_dependents_is_all_that_can_break(diamond: dict[str, Package]) -> None:
    assert names(with_dependents(diamond, ["c-right"])) == ["c-right", "a-all"]
    assert names(with_dependents(diamond, ["z-core"])) == ["z-core", "b-left", "c-right", "a-all"]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (["packages/hp-meta/README.md"], ["hyper-parallel"]),
        (["packages/hp-core/src/hp_core/mesh.py"], names(with_dependents(PACKAGES, ["hp-core"]))),
        (["build/constraints.txt"], list(PACKAGES)),
        (["docs/installation.md", "examples/train_lm.py"], []),
    ],
)
def test_a_change_affects_its_package_and_the_dependents(changed: list[str], expected: list[str]) -> None:
    assert names(affected(PACKAGES, changed)) == expected


def test_a_circle_is_refused(tmp_path: Path) -> None:
    add_package(tmp_path, "one", ["two"])
    add_package(tmp_path, "two", ["one"])
    with pytest.raises(ValueError, match=r"circle: \['one', 'two'\]"):
        discover(tmp_path)


def test_a_package_installs_exactly_one_import_name(tmp_path: Path) -> None:
    add_package(tmp_path, "one", [])
    second = tmp_path / "packages" / "one" / "src" / "other"
    second.mkdir()
    (second / "__init__.py").touch()
    with pytest.raises(ValueError, match="exactly one package"):
        discover(tmp_path)


@pytest.mark.parametrize("text", ["hp_core[torch]>=0.1,<0.2", "HP.Core", "hp-core ; python_version > '3.9'"])
def test_requirement_names_are_normalised(text: str) -> None:
    assert requirement_name(text) == "hp-core"


@pytest.mark.parametrize(
    ("requires", "native"), [('"hatchling"', False), ('"hatchling", "scikit_build_core>=0.11", "pybind11>=2.13"', True)]
)
def test_a_package_that_compiles_is_known_by_what_builds_it(tmp_path: Path, requires: str, native: bool) -> None:
    add_package(tmp_path, "one", [])
    file = tmp_path / "packages" / "one" / "pyproject.toml"
    file.write_text(file.read_text("utf-8").replace('"hatchling"', requires), "utf-8")
    assert discover(tmp_path)["one"].native is native


def test_what_others_made_is_known_by_the_extra_that_brings_it(diamond: dict[str, Package]) -> None:
    assert diamond["z-core"].libraries == (("", "packaging>=24"),)
    assert diamond["a-all"].libraries == ()
    found = PACKAGES["hp-core"].libraries
    assert ("torch", "torch>=2.7") in found
    assert ("testing", "cloudpickle>=3.0") in found
    assert not [text for _, text in PACKAGES["hyper-parallel"].libraries if text.startswith("hp-")]


def test_scripts_are_told_what_compiles() -> None:
    command = [sys.executable, str(ROOT / "build" / "workspace.py"), "native"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    assert told == [package.name for package in PACKAGES.values() if package.native]


def test_the_packages_of_the_repository_are_found() -> None:
    assert {"hp-core", "hyper-parallel"} <= set(PACKAGES)
    assert {package.folder for package in PACKAGES.values()} == {
        path.parent for path in ROOT.glob("packages/*/pyproject.toml")
    }
