"""What installed wheels must do in a clean environment, run by `build/try_wheels.py` with that environment's interpreter.

`smoke.py alone IMPORT_NAME DISTRIBUTION VERSION`: import, say the version, bring types and licence, load no framework, and no
module asks a sibling for what it lacks. `smoke.py umbrella [MISSING...]`: the umbrella gives every name of the components that are
there, and says what to install for those that are missing. Standard library only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import files
from importlib.util import find_spec
from pathlib import Path
from pkgutil import walk_packages

HEAVY = ("torch", "torch_npu", "mindspore", "numpy")
OURS = ("hp_", "hyper_parallel")


def alone(import_name: str, distribution: str, version: str) -> None:
    """Check one installed package; an AssertionError says what is wrong."""
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
    imported, left = _import_all(import_name, list(package.__path__))
    print(f"{distribution} {version}: {imported} modules imported; {left} more need what only an extra brings")


def umbrella(missing: list[str]) -> None:
    """Check what the umbrella says of components that are there, and of those that aren't; `missing` are gone for sure."""
    exports = import_module("hyper_parallel.exports")
    absent = {component for names in exports.NAMES.values() for component in names if find_spec(component) is None}
    assert set(missing) <= absent | {"hp_kernels"}, f"{sorted(set(missing) - absent)} should be gone"
    given = 0
    for module, components in exports.NAMES.items():
        front = import_module(module)
        for component, names in components.items():
            distribution = component.replace("_", "-")
            offered = () if component in absent else import_module(component).__all__
            for name in names:
                problem = _problem(lambda: getattr(front, name))  # noqa: B023 # called at once
                if name in offered:
                    assert problem is None or _needs_more(problem), f"{module}.{name} can't be had: {problem!r}"
                    given += problem is None
                else:
                    assert isinstance(problem, ImportError), f"{module}.{name} without {distribution}: {problem!r}"
                    remedies = (f"pip install {distribution}", f"pip install --upgrade {distribution}")
                    assert any(remedy in str(problem) for remedy in remedies), problem
    print(f"hyper-parallel: {given} names; missing, each with what to install: {', '.join(sorted(absent)) or 'none'}")


def _import_all(import_name: str, path: list[str]) -> tuple[int, int]:
    """Import every module; those that need a library that only an extra brings are counted apart."""
    imported = left = 0
    for found in walk_packages(path, f"{import_name}.", onerror=lambda _: None):
        if found.name.rpartition(".")[2] == "__main__":
            continue
        problem = _problem(lambda: import_module(found.name))  # noqa: B023 # called at once
        assert problem is None or _needs_more(problem), f"{found.name} can't be imported: {problem!r}"
        imported += problem is None
        left += problem is not None
    return imported, left


def _problem(action: Callable[[], object]) -> Exception | None:
    try:
        action()
    except Exception as error:
        return error
    return None


def _needs_more(error: Exception) -> bool:
    """Whether what is missing is a library of others or a framework, and not one of our modules or a name in one."""
    if isinstance(error, ModuleNotFoundError):
        return not (error.name or "").startswith(OURS)
    return type(error).__name__ == "PlatformError" and "no framework is installed" in str(error)


if __name__ == "__main__":
    if sys.argv[1] == "alone":
        alone(*sys.argv[2:])
    else:
        umbrella(sys.argv[2:])
