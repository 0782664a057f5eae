"""The kernels for Ascend NPUs: whether they can be built here, and the library where they were.

`HP_KERNELS_CANN=auto|on|off` decides twice: when the package is built (CMake runs this file as a script), whether the CANN
kernels are; and at run time, whether they are used. They have not run on hardware.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["cann_library", "cann_problems", "decide", "why_not_cann"]

SWITCH = "HP_KERNELS_CANN"
_LIBRARY = Path(__file__).resolve().with_name("libhp_kernels_cann.so")
_loaded: list[tuple[ctypes.CDLL | None, str]] = []


def cann_problems(environment: Mapping[str, str]) -> list[str]:
    """What keeps the CANN kernels from being built here, each with the command that mends it.

    Args:
        environment: the environment variables.
    """
    home = environment.get("ASCEND_HOME_PATH", "")
    if not home:
        return [
            "ASCEND_HOME_PATH is not set: CANN's environment is missing. "
            "Run: source /usr/local/Ascend/ascend-toolkit/set_env.sh (or set_env.sh of wherever CANN is installed)"
        ]
    root = Path(home)
    if not root.is_dir():
        return [
            f"ASCEND_HOME_PATH is {home}, which is no folder: the environment is of a CANN that has gone. "
            "Run: ls -d /usr/local/Ascend/*/, then source set_env.sh of the one that is there"
        ]
    problems = []
    libraries = environment.get("LD_LIBRARY_PATH", "").split(":")
    if not environment.get("ASCEND_OPP_PATH") or not any(
        Path(entry).is_relative_to(root) for entry in libraries if entry
    ):
        problems.append(
            "ASCEND_HOME_PATH is set, but ASCEND_OPP_PATH or LD_LIBRARY_PATH don't go with it: set_env.sh was not sourced. "
            f"Run: source {_set_env(root)}"
        )
    if not any(
        (root / f"{folder}/tikcpp/ascendc_kernel_cmake/ascendc.cmake").exists() for folder in ("compiler", "tools")
    ):
        problems.append(
            f"{home} has no Ascend C compiler (tikcpp/ascendc_kernel_cmake): only CANN's runtime is installed. "
            "Run: ./Ascend-cann-toolkit_VERSION_linux-$(uname -m).run --install, then source its set_env.sh"
        )
    if not re.fullmatch(r"Ascend\w+", environment.get("HP_KERNELS_SOC", "")):
        problems.append(
            "HP_KERNELS_SOC doesn't name the NPU to compile for. "
            'Run: npu-smi info, and export HP_KERNELS_SOC=Ascend910B3, say, with the name it shows after "Ascend"'
        )
    if shutil.which("cmake", path=environment.get("PATH", "")) is None:
        problems.append("cmake is not on the PATH. Run: pip install cmake")
    return problems


def decide(environment: Mapping[str, str]) -> tuple[bool, str]:
    """Whether to build the CANN kernels, and why not.

    Args:
        environment: the environment variables, `HP_KERNELS_CANN` among them.

    Raises:
        ValueError: the switch has another value than auto, on and off; or it is on, and they can't be built.
    """
    switch = _switch(environment)
    if switch == "off":
        return False, f"{SWITCH}=off"
    problems = cann_problems(environment)
    if problems and switch == "on":
        lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
        raise ValueError(f"{SWITCH}=on, but the CANN kernels can't be built here:\n{lines}")
    return not problems, "; ".join(problems)


def cann_library() -> ctypes.CDLL | None:
    """The library of the CANN kernels, or None where they aren't used.

    Raises:
        ImportError: `HP_KERNELS_CANN=on`, and there is none that loads; or the variable has another value.
    """
    return _state()[0]


def why_not_cann() -> str:
    """Why `cann_library` gives None; empty where it gives the library."""
    return _state()[1]


def reload() -> None:
    """Forget the answer, so that a changed environment counts."""
    _loaded.clear()


def _state() -> tuple[ctypes.CDLL | None, str]:
    if not _loaded:
        _loaded.append(_load())
    return _loaded[0]


def _load() -> tuple[ctypes.CDLL | None, str]:
    try:
        switch = _switch(os.environ)
    except ValueError as error:
        raise ImportError(str(error)) from error
    if switch == "off":
        return None, f"{SWITCH}=off"
    try:
        return ctypes.CDLL(str(_LIBRARY)), ""
    except OSError as error:
        why = (
            f"built without CANN ({_LIBRARY.name} is not there)"
            if not _LIBRARY.exists()
            else f"it doesn't load: {error}"
        )
        if switch == "on":
            raise ImportError(
                f"{SWITCH}=on, but the CANN kernels are not available: {why}. Where CANN is: source its set_env.sh, export "
                f"HP_KERNELS_SOC, and {SWITCH}=on pip install packages/hp-kernels; or unset {SWITCH}."
            ) from error
        return None, why


def _switch(environment: Mapping[str, str]) -> str:
    switch = environment.get(SWITCH, "auto")
    if switch not in ("auto", "on", "off"):
        raise ValueError(f"{SWITCH} must be auto, on or off, not {switch!r}.")
    return switch


def _set_env(root: Path) -> Path:
    """set_env.sh of a CANN: beside its folder in older layouts (ascend-toolkit/latest), in it in newer ones."""
    inside, beside = root / "set_env.sh", root.parent / "set_env.sh"
    return beside if beside.exists() and not inside.exists() else inside


if __name__ == "__main__":
    try:
        build, reason = decide(os.environ)
    except ValueError as refusal:
        sys.exit(str(refusal))
    print("build" if build else f"left out: {reason}")
