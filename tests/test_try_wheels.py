"""Wheels are tried with the oldest siblings that they declare: on a made-up repository where that makes a difference.

Our own wheels are tried by `nox -s wheel_smoke`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.made_repository import commit, make_repository

import try_wheels
from try_wheels import Trial
from workspace import discover


def test_a_component_that_needs_more_than_its_oldest_sibling_has_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tree's core is 0.1.1 and has a new name, which the component uses while it says that 0.1.0 is enough."""
    repository = make_repository(tmp_path / "repository")
    core, part = (repository / "packages" / name for name in ("hp-core", "hp-part"))
    version = 'from importlib.metadata import version\n\n__version__ = version("{}")\n'
    (core / "pyproject.toml").write_text(
        (core / "pyproject.toml").read_text("utf-8").replace("0.1.0", "0.1.1"), "utf-8"
    )
    (core / "src" / "hp_core" / "__init__.py").write_text('"""Made up."""\n\nSINCE = NEW = "0.1.1"\n', "utf-8")
    (part / "src" / "hp_part" / "__init__.py").write_text('"""Made up."""\n\n' + version.format("hp-part"), "utf-8")
    (part / "src" / "hp_part" / "py.typed").touch()
    (part / "LICENSE").touch()
    (part / "src" / "hp_part" / "uses.py").write_text('"""Made up."""\n\nfrom hp_core import NEW as NEW\n', "utf-8")
    commit(repository, "More")
    packages = discover(repository)
    wheels = tmp_path / "wheels"
    for name in ("hp-core", "hp-part"):
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)]
        subprocess.run(command, cwd=packages[name].folder, check=True, capture_output=True, timeout=60)
    with pytest.raises(
        RuntimeError, match=r"hp_part\.uses can't be imported: .*cannot import name 'NEW' from 'hp_core'"
    ):
        Trial(wheels, new_folder(tmp_path / "oldest"), repository).alone(packages, packages["hp-part"])
    # With the tree's own core, which it says it takes as well, all is well.
    monkeypatch.setattr(try_wheels, "declared_minimums", lambda package, packages: {})
    Trial(wheels, new_folder(tmp_path / "newest"), repository).alone(packages, packages["hp-part"])


def test_without_a_history_the_tree_s_siblings_are_taken_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in an image, which is made from a tree without its history."""
    repository = make_repository(tmp_path / "repository")
    shutil.rmtree(repository / ".git")
    core = repository / "packages" / "hp-core" / "pyproject.toml"
    core.write_text(core.read_text("utf-8").replace("0.1.0", "0.1.1"), "utf-8")
    packages = discover(repository)
    asked = []
    monkeypatch.setattr(try_wheels.Trial, "environment", lambda self, name, *pinned: asked.append((name, pinned)) or "")
    monkeypatch.setattr(try_wheels, "_run", lambda *_, **__: None)
    monkeypatch.setattr(try_wheels.shutil, "rmtree", lambda _: None)
    Trial(tmp_path, new_folder(tmp_path / "work"), repository).alone(packages, packages["hp-part"])
    assert asked == [("hp-part-with-oldest", ("hp-part==0.1.0", "hp-core==0.1.1"))]
    assert "hp-part is not tried with hp-core 0.1.0" in capsys.readouterr().out


def new_folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert try_wheels.main([]) == 2
    assert "usage" in capsys.readouterr().err
