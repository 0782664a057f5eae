"""`python -m hp_kernels.build torch` and `... mindspore`: compile the island of a framework, after checking what it needs.

Everything that can be wrong is looked at first, and said with the command that mends it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys

from hp_kernels.islands import ISLANDS

__all__ = ["BuildError", "main", "require_compiler", "require_version"]


class BuildError(RuntimeError):
    """An island can't be built here; the message says why and what to do."""


def main(arguments: list[str] | None = None) -> int:
    """Build one island; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m hp_kernels.build", description=__doc__)
    parser.add_argument("island", choices=ISLANDS)
    parser.add_argument(
        "--backend", choices=("CPU", "Ascend"), default="CPU", help="of MindSpore's op (Ascend needs CANN)"
    )
    chosen = parser.parse_args(arguments)
    # What insists on the island can't be asked for it before it is built.
    os.environ[f"HP_KERNELS_{chosen.island.upper()}"] = "off"
    try:
        if chosen.island == "torch":
            from hp_kernels.platform.torch.building import build_island

            built = build_island()
        else:
            from hp_kernels.platform.mindspore.building import build_island as build_for_mindspore

            built = build_for_mindspore(chosen.backend)
    except BuildError as error:
        print(f"hp_kernels.build: {error}", file=sys.stderr)
        return 1
    print(f"built {built}")
    return 0


def require_version(framework: str, found: str, least: tuple[int, int]) -> tuple[int, int]:
    """The version's first two numbers.

    Raises:
        BuildError: it is older than the least that is supported.
    """
    numbers = found.split("+")[0].split(".")
    version = int(numbers[0]), int("".join(filter(str.isdigit, numbers[1])) or 0)
    if version < least:
        wanted = ".".join(map(str, least))
        raise BuildError(
            f"{framework} {found} is installed, {wanted} or newer is needed: pip install '{framework}>={wanted}'"
        )
    return version


def require_compiler() -> str:
    """The C++ compiler: `$CXX`, or g++.

    Raises:
        BuildError: there is none.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise BuildError(
            f"no C++ compiler {compiler!r} on PATH: apt-get install g++ (Debian, Ubuntu) or dnf install gcc-c++ (openEuler), or "
            f"name one in CXX"
        )
    return compiler


if __name__ == "__main__":
    sys.exit(main())
