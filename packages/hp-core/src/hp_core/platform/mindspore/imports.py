"""Why MindSpore can't be imported, in words that help: usually the wrong NumPy, or the wrong Python."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

__all__ = ["explain_failed_import"]


def explain_failed_import(error: BaseException, numpy: str | None = None, python: tuple[int, int] | None = None) -> str:
    """What to do about an import of MindSpore that failed.

    Args:
        error: what the import raised.
        numpy: NumPy's version; default that of this environment.
        python: Python's version; default this one's.
    """
    numpy = numpy or _version("numpy")
    python = python or sys.version_info[:2]
    said = f"mindspore can't be imported: {str(error).splitlines()[0] if str(error) else type(error).__name__}."
    missing = isinstance(error, ModuleNotFoundError) and error.name == "mindspore"
    if not missing and numpy is not None and numpy.partition(".")[0] != "1":
        return f"{said} It needs NumPy below 2, and {numpy} is installed: pip install 'numpy<2'."
    if python >= (3, 12):
        return f"{said} Its wheels are for Python 3.10 and 3.11, and this is {python[0]}.{python[1]}."
    return f"{said} Install it with: pip install 'mindspore>=2.8' 'numpy<2'."


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
