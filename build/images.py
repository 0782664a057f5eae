"""Builds the wheels for a target in the image of that system, through docker or podman.

Usage: python build/images.py TARGET [--arch x86_64|aarch64] [--build-arg NAME=VALUE]...

The image is docker/TARGET/Dockerfile. Its wheels come into dist/TARGET-ARCH, after its test stage has tried them. Exit status: 0, 1
(no engine, or a step of the image failed), 2 (usage).
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from targets import ARCHITECTURES, read_floors
from workspace import ROOT

ENGINES = ("docker", "podman")
# What the engines call our architectures.
_PLATFORMS = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}
_ANSWER_SECONDS = 30


def find_engine() -> str:
    """The first engine that is installed and answers.

    Raises:
        RuntimeError: there is none; the message says what was found, and how to build without one.
    """
    found = []
    for engine in ENGINES:
        if shutil.which(engine) is None:
            found.append(f"{engine} is not installed")
            continue
        try:
            result = subprocess.run(
                [engine, "info"], capture_output=True, text=True, check=False, timeout=_ANSWER_SECONDS
            )
        except subprocess.TimeoutExpired:
            found.append(f"{engine} is installed and gave no answer in {_ANSWER_SECONDS} s")
            continue
        if result.returncode == 0:
            return engine
        said = (result.stderr.strip() or result.stdout.strip()).splitlines()
        found.append(f"{engine} is installed and doesn't work: {said[-1] if said else f'exit {result.returncode}'}")
    raise RuntimeError(
        f"no container engine: {'; '.join(found)}.\n"
        "Start the engine, or run this on a machine that has one. Without, `nox -s wheels -- --host` builds for this machine and "
        "says which targets the result serves; on the target's own system, docker/build.sh TARGET PYTHON... does the same"
    )


def build_command(engine: str, target: str, arch: str, build_args: Sequence[str] = (), root: Path = ROOT) -> list[str]:
    """The engine's command that builds an image's wheels into dist/TARGET-ARCH.

    Raises:
        ValueError: there is no such target, architecture or Dockerfile, or a build argument isn't NAME=VALUE.
    """
    targets = read_floors().targets
    if target not in targets:
        raise ValueError(f"no target {target!r} in build/floors.toml; there are: {', '.join(targets)}")
    file = root / "docker" / target / "Dockerfile"
    if not file.is_file():
        raise ValueError(f"{file} is missing")
    if arch not in ARCHITECTURES:
        raise ValueError(f"no architecture {arch!r}; there are: {', '.join(ARCHITECTURES)}")
    wrong = [one for one in build_args if "=" not in one]
    if wrong:
        raise ValueError(f"--build-arg takes NAME=VALUE, not {wrong[0]!r}")
    return [
        *[engine, "build", "--file", str(file), "--target", "wheels", "--platform", _PLATFORMS[arch]],
        *[part for one in build_args for part in ("--build-arg", one)],
        *["--output", f"type=local,dest={root / 'dist' / f'{target}-{arch}'}", str(root)],
    ]


def main(arguments: Sequence[str]) -> int:
    """Build the wheels for one target; returns the exit status."""
    parser = argparse.ArgumentParser(prog="images.py", description="Build wheels in the image of a target.")
    parser.add_argument("target", help=f"one of {', '.join(read_floors().targets)}")
    parser.add_argument(
        "--arch", default=platform.machine(), help="x86_64 or aarch64; another than this machine's is emulated"
    )
    parser.add_argument(
        "--build-arg", action="append", default=[], metavar="NAME=VALUE", help="an ARG of the Dockerfile"
    )
    chosen = parser.parse_args(arguments)
    try:
        build_command(ENGINES[0], chosen.target, chosen.arch, chosen.build_arg)
    except ValueError as error:
        parser.error(str(error))
    try:
        command = build_command(find_engine(), chosen.target, chosen.arch, chosen.build_arg)
    except RuntimeError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    print(" ".join(command), flush=True)
    status = subprocess.call(command)
    if status != 0:
        sys.stderr.write(f"the image of {chosen.target} failed; its output is above\n")
        return 1
    for wheel in sorted((ROOT / "dist" / f"{chosen.target}-{chosen.arch}").glob("*.whl")):
        print(wheel.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
