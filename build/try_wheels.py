"""Installs built wheels as users do, each in an environment of its own, and tries what is promised of them.

Usage: python build/try_wheels.py FOLDER

- Each package alone, with nothing but what it declares, and the oldest siblings that it declares (which takes the git history).
- The umbrella, which brings every component, and whose doctor finds no failure; then component after component is removed, and the
  umbrella says what to install.

No index is asked for anything of ours: what others made is downloaded first, and pip then sees that and the folder only.
Exit status: 0, or 1 with what went wrong.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from packaging.version import Version

from minimums import declared_minimums, minimum_wheel
from wheel_file import Wheel, read_wheel
from workspace import ROOT, Package, discover, with_siblings

UMBRELLA = "hyper-parallel"
_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


class Trial:
    """A folder of wheels, the libraries that they need, and a place for environments; older siblings come from the repository."""

    def __init__(self, wheels: Path, work: Path, root: Path = ROOT) -> None:
        self.wheels, self.work, self.root = wheels, work, root
        self.libraries = work / "libraries"
        self.older = work / "older"
        for folder in (self.libraries, self.older):
            folder.mkdir()

    def download(self, wheels: Sequence[Wheel], ours: Sequence[str]) -> None:
        """Fetch what the wheels always need and others made, at the versions of build/constraints.txt."""
        foreign = sorted(
            {
                f"{found.name}{found.specifier}"
                for wheel in wheels
                for found in wheel.requirements
                if found.name not in ours and "extra" not in str(found.marker or "")
            }
        )
        if foreign:
            constraints = str(ROOT / "build" / "constraints.txt")
            _run([*_PIP, "download", "--dest", str(self.libraries), "--constraint", constraints, *foreign])

    def environment(self, name: str, *requirements: str) -> str:
        """A new environment with some requirements and what they declare; returns its interpreter."""
        home = self.work / name
        # pip runs outside of it, so that nothing is inside but what a wheel asks for.
        _run([sys.executable, "-m", "venv", "--without-pip", str(home)])
        python = str(home / "bin" / "python")
        sources = [f"--find-links={folder}" for folder in (self.wheels, self.older, self.libraries)]
        _run([*_PIP, "--python", python, "install", "--no-index", "--no-compile", *sources, *requirements])
        return python

    def alone(self, packages: dict[str, Package], package: Package) -> None:
        """One package, with the oldest siblings that it says it works with, and with those of the tree where they differ."""
        oldest = declared_minimums(package, packages)
        for name, version in oldest.items():
            if version != Version(packages[name].version) and not (self.root / ".git").exists():
                print(f"{package.name} is not tried with {name} {version}: there is no history here to build it from")
                oldest[name] = Version(packages[name].version)
            else:
                minimum_wheel(packages[name], version, self.wheels, self.older, self.root)
        worlds = {f"{package.name}-with-oldest": oldest}
        if any(Version(packages[name].version) != version for name, version in oldest.items()):
            worlds[package.name] = {
                found.name: Version(found.version)
                for found in with_siblings(packages, package.name)
                if found is not package
            }
        for world, siblings in worlds.items():
            pinned = [f"{name}=={version}" for name, version in {package.name: package.version, **siblings}.items()]
            python = self.environment(world, *pinned)
            _run([python, "-I", _smoke(), "alone", package.import_name, package.name, package.version], show=True)
            shutil.rmtree(self.work / world)

    def umbrella(self, packages: dict[str, Package]) -> None:
        """The umbrella brings all components, and copes with each one's absence."""
        python = self.environment(UMBRELLA, f"{UMBRELLA}=={packages[UMBRELLA].version}")
        components = [package for package in reversed(with_siblings(packages, UMBRELLA)) if package.name != UMBRELLA]
        for component in components:
            _run([python, "-I", "-c", f"import {component.import_name}"])
        command = str(Path(python).with_name("hyper-parallel"))
        _run([command, "--version"], show=True)
        _run([command, "doctor"], show=True)
        _run([python, "-I", _smoke(), "umbrella"], show=True)
        gone = []
        # Those that others stand on go last.
        for component in components:
            _run([*_PIP, "--python", python, "uninstall", "--yes", component.name])
            gone.append(component.import_name)
            _run([python, "-I", _smoke(), "umbrella", *gone], show=True)


def _smoke() -> str:
    return str(ROOT / "build" / "smoke.py")


def _run(command: Sequence[str], *, show: bool = False) -> None:
    """Run a command; one that fails ends the trial with all that it said."""
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tempfile.gettempdir())
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{result.stdout}{result.stderr}")
    if show:
        print(result.stdout, end="", flush=True)


def try_wheels(folder: Path, packages: dict[str, Package]) -> None:
    """Try all packages, from the wheels of a folder.

    Raises:
        RuntimeError: a command failed; the message has what it said.
        ValueError: a minimum can't be had.
    """
    wheels = [read_wheel(path) for path in sorted(folder.glob("*.whl"))]
    with tempfile.TemporaryDirectory() as work:
        trial = Trial(folder.resolve(), Path(work))
        trial.download(wheels, list(packages))
        for package in packages.values():
            trial.alone(packages, package)
        if UMBRELLA in packages:
            trial.umbrella(packages)


def main(arguments: Sequence[str]) -> int:
    """Try the wheels of one folder; returns the exit status."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python build/try_wheels.py FOLDER\n")
        return 2
    begin = time.monotonic()
    try:
        try_wheels(Path(arguments[0]), discover())
    except (RuntimeError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    print(f"all wheels do what is promised ({time.monotonic() - begin:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
