"""The README's commands say why they can't run: wrong usage, an unsupported Python, a system without venv.

The command itself is exercised by CI, which is nothing but `dev.py test`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from workspace import ROOT


def run(folder: Path, *arguments: str, python: tuple[int, ...] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a copy of dev.py in a folder of its own, where a file may stand in for a system module, as some Python."""
    (folder / "build").mkdir()
    shutil.copy(ROOT / "build" / "constraints.txt", folder / "build")
    shutil.copy(ROOT / "dev.py", folder)
    pretend = f"import sys, runpy; sys.version_info = {python or sys.version_info[:3]}; "
    start = f"sys.argv = {['dev.py', *arguments]}; runpy.run_path('dev.py', run_name='__main__')"
    command = [sys.executable, "-c", pretend + start]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("arguments", [[], ["tests"], ["test", "extra"]])
def test_wrong_usage_shows_the_two_commands(tmp_path: Path, arguments: list[str]) -> None:
    result = run(tmp_path, *arguments)
    assert result.returncode == 2
    assert "dev.py train" in result.stderr
    assert "dev.py test" in result.stderr


@pytest.mark.parametrize("version", [(3, 9, 1), (3, 14, 0)])
def test_an_unsupported_python_is_refused_before_anything_is_made(tmp_path: Path, version: tuple[int, ...]) -> None:
    result = run(tmp_path, "test", python=version)
    assert result.returncode == 1
    assert "runs on 3.10 to 3.13" in result.stderr
    assert not (tmp_path / ".venv-dev").exists()


def test_a_system_without_venv_is_told_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "venv.py").write_text("import sys\nsys.exit('ensurepip is not available')\n", "utf-8")
    result = run(tmp_path, "test")
    assert result.returncode == 1
    assert "ensurepip is not available" in result.stderr
    assert f"apt-get install python3.{sys.version_info.minor}-venv" in result.stderr


def test_the_readmes_show_exactly_these_commands() -> None:
    for readme in ("README.md", "README.zh-CN.md"):
        commands = re.findall(r"^python3 dev\.py (\w+)", (ROOT / readme).read_text("utf-8"), re.MULTILINE)
        assert commands == ["train", "test"], readme


@pytest.mark.parametrize("broken", ["lint", "typecheck", "tests_mindspore", ""])
def test_the_first_session_that_fails_ends_the_tests(tmp_path: Path, broken: str) -> None:
    """A made-up nox that notes its sessions; types are checked beside the first ones, and shown after them."""
    stand_in = tmp_path / "nox.py"
    stand_in.write_text(
        "import sys\n"
        "sessions = sys.argv[sys.argv.index('--session') + 1:]\n"
        "print('ran', *sessions, flush=True)\n"
        f"sys.exit({broken!r} in sessions)\n"
    )
    script = f"import sys, dev; sys.exit(dev.test([sys.executable, {str(stand_in)!r}]))"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    ran = ["ran lint docs wheel_smoke", "ran typecheck", "ran tests_mindspore tests"]
    assert result.stdout.splitlines() == (ran if broken in ("", "tests_mindspore") else ran[:2])
    assert result.returncode == (broken != "")
