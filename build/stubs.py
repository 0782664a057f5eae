"""Write the `.pyi` stubs of the packages that export lazily, so that type checkers and editors see every name.

Two kinds of module are lazy: a package's front with its own `EXPORTS` table (`hp_core`), and the modules of the
umbrella. `python build/stubs.py` writes all stubs; with `--check` it writes nothing and fails when one is out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from workspace import Package, discover

UMBRELLA = "hyper_parallel"
HEADER = '"""Names of `{module}` for type checkers. Written by build/stubs.py: edit the table, not this file."""\n\n'


def stubs(packages: dict[str, Package]) -> dict[Path, str]:
    """Every stub of the workspace: its path and what it must hold."""
    found = {}
    for package in packages.values():
        if package.import_name == UMBRELLA:
            found.update(_umbrella(package))
            continue
        exports = getattr(import_module(package.import_name), "EXPORTS", None)
        if exports is not None:
            origins = {name: f"{package.import_name}.{module}" for name, module in exports.items()}
            found[package.source / "__init__.pyi"] = _text(
                package.import_name, origins, "__version__: str\nEXPORTS: dict[str, str]\n"
            )
    return found


def _umbrella(package: Package) -> dict[Path, str]:
    exports = import_module(f"{UMBRELLA}.exports")
    found = {}
    for module in exports.NAMES:
        base = package.source.joinpath(*module.split(".")[1:])
        path = base / "__init__.pyi" if base.is_dir() else base.with_suffix(".pyi")
        origins = exports.available(module)
        # No stub for a module whose component doesn't exist yet: an empty one would claim that it has no names.
        if origins:
            found[path] = _text(module, origins, _front(exports.NAMES) if module == UMBRELLA else "")
    return found


def _front(modules: Iterable[str]) -> str:
    """What the umbrella itself has besides names of components: its version, and modules that are loaded when used."""
    below = sorted(module.split(".")[1] for module in modules if module.count(".") == 1)
    return "".join(f"from {UMBRELLA} import {name} as {name}\n" for name in below) + "\n__version__: str\n"


def _text(module: str, origins: dict[str, str], extra: str = "") -> str:
    """A stub that re-exports each name from its module; `X as X` is how a stub says that it means to."""
    lines = [
        f"from {origin} import {name} as {name}\n"
        for name, origin in sorted(origins.items(), key=lambda item: item[::-1])
    ]
    names = "".join(f'    "{name}",\n' for name in sorted(origins))
    return HEADER.format(module=module) + "".join(lines) + f"\n{extra}__all__ = [\n{names}]\n"


def main(arguments: list[str]) -> int:
    """Write the stubs, or check them; returns the exit status."""
    stale = [
        (path, text) for path, text in stubs(discover()).items() if not path.exists() or path.read_text("utf-8") != text
    ]
    if arguments == ["--check"]:
        for path, _ in stale:
            print(f"{path} is out of date: run `python build/stubs.py`")
        return bool(stale)
    for path, text in stale:
        path.write_text(text, "utf-8")
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
