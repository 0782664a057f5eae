"""What to do about a framework that can't be used here, in words that name the command.

Framework-free: it looks at versions of what is installed, and at the error that an import raised.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

__all__ = ["explain_failed_import", "explain_wrong_numpy", "how_to_install"]

_INSTALL = {"torch": "pip install 'torch>=2.7'", "mindspore": "pip install 'mindspore>=2.8' 'numpy<2'"}
_NEWEST_PYTHON = {"mindspore": (3, 12)}
"""The newest Python that there are wheels for, of frameworks that don't keep up with all that hp-core runs on."""


def how_to_install(framework: str, python: tuple[int, int] | None = None) -> str:
    """The command that installs a framework, or which Python it needs.

    Args:
        framework: its name.
        python: Python's version; default this one's.
    """
    python = python or sys.version_info[:2]
    newest = _NEWEST_PYTHON.get(framework)
    if newest is not None and python > newest:
        return (
            f"its wheels are for Python 3.10 to {newest[0]}.{newest[1]}, and this is {python[0]}.{python[1]}: make an "
            f"environment with one of those, then {_INSTALL[framework]}"
        )
    return _INSTALL[framework]


def explain_failed_import(
    framework: str, error: BaseException, numpy: str | None = None, python: tuple[int, int] | None = None
) -> str:
    """What to do about an import of a framework that failed: usually the wrong NumPy, the wrong Python, or no CANN.

    Args:
        framework: its name.
        error: what the import raised.
        numpy: NumPy's version; default that of this environment.
        python: Python's version; default this one's.
    """
    said = f"{framework} can't be imported: {str(error).splitlines()[0] if str(error) else type(error).__name__}."
    if isinstance(error, ModuleNotFoundError) and error.name == framework:
        return f"{said} Install it: {how_to_install(framework, python)}."
    if "torch_npu" in str(error):
        return (
            f"{said} PyTorch loads torch_npu by itself, which needs CANN: source its set_env.sh, or set "
            f"TORCH_DEVICE_BACKEND_AUTOLOAD=0 to do without the NPU."
        )
    numpy = numpy or _version("numpy")
    if framework == "mindspore" and numpy is not None and numpy.partition(".")[0] != "1":
        return f"{said} {explain_wrong_numpy(numpy)}"
    return f"{said} If its installation is broken: {how_to_install(framework, python)}."


def explain_wrong_numpy(numpy: str | None = None) -> str:
    """That MindSpore needs another NumPy than the one installed.

    Args:
        numpy: NumPy's version; default that of this environment.
    """
    return f"MindSpore needs NumPy below 2, and {numpy or _version('numpy')} is installed: pip install 'numpy<2'."


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
