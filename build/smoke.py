"""What a wheel must do in a clean environment: import, say its version, bring its types and licence, load no framework.

Run by `nox -s wheel_smoke` with the clean environment's interpreter: `smoke.py IMPORT_NAME DISTRIBUTION VERSION`. It
imports nothing but the standard library and the package itself.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import files
from pathlib import Path

HEAVY = ("torch", "torch_npu", "mindspore", "numpy")


def main(import_name: str, distribution: str, version: str) -> None:
    """Check the installed package; an AssertionError says what is wrong."""
    package = import_module(import_name)
    loaded = [name for name in HEAVY if name in sys.modules]
    assert not loaded, f"import {import_name} loads {loaded}"
    assert package.__version__ == version, (
        f"{import_name}.__version__ is {package.__version__}, the wheel says {version}"
    )

    assert package.__file__ is not None
    assert "site-packages" in Path(package.__file__).parts, (
        f"{import_name} came from {package.__file__}, not from its wheel"
    )
    shipped = {str(path) for path in files(distribution) or ()}
    assert f"{import_name}/py.typed" in shipped, "py.typed is missing: type checkers would ignore the package"
    assert any(path.endswith("licenses/LICENSE") for path in shipped), "the licence is missing"
    assert not any("tests/" in path for path in shipped), "tests are in the wheel"
    print(f"{distribution} {version}: imported alone, {len(shipped)} files, no framework loaded")


if __name__ == "__main__":
    main(*sys.argv[1:])
