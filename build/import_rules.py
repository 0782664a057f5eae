"""Who may import whom, as contracts for import-linter.

The contracts are made from the packages that the workspace holds, so they apply to a package added later without an
edit here. Run as a script it checks the workspace and prints what it found; `tests/test_import_rules.py` does the
same.
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Iterable
from configparser import ConfigParser
from pathlib import Path

from workspace import Package, discover

UMBRELLA = "hyper_parallel"
CORE = "hp_core"
KERNELS = "hp_kernels"
FRAMEWORKS = ("torch", "torch_npu", "mindspore")


def contracts(packages: dict[str, Package]) -> str:
    """The contracts that the packages must keep, in import-linter's INI format."""
    config = ConfigParser()
    roots = [package.import_name for package in packages.values()]
    config["importlinter"] = {"root_packages": _lines(roots), "include_external_packages": "True"}
    # Top down: the umbrella; the components, which don't know each other; the core; the kernels, which know nobody.
    components = sorted(set(roots) - {UMBRELLA, CORE, KERNELS})
    tiers = [UMBRELLA, " | ".join(components), CORE, KERNELS]
    if len(roots) > 1:
        config["importlinter:contract:tiers"] = {
            "name": "Packages import downwards, components never each other",
            "type": "layers",
            "layers": _lines([tier for tier in tiers if tier and set(tier.split(" | ")) <= set(roots)]),
        }
    for package in packages.values():
        root = package.import_name
        # hp_core.platform.torch.streams is a door to torch; hp_core.mesh is not.
        doors = [f"{root}.platform.{framework}" for framework in ("torch", "mindspore")]
        config[f"importlinter:contract:{root}-frameworks"] = {
            "name": f"Only platform/torch and platform/mindspore of {root} import a framework",
            "type": "forbidden",
            "source_modules": root,
            "forbidden_modules": _lines(FRAMEWORKS),
            "allow_indirect_imports": "True",
            "ignore_imports": _lines(
                f"{door}{rest} -> {framework}" for door in doors for rest in ("", ".**") for framework in FRAMEWORKS
            ),
            "unmatched_ignore_imports_alerting": "none",
        }
        config[f"importlinter:contract:{root}-facade"] = {
            "name": f"Modules of {root} import from each other, not from its front",
            "type": "forbidden",
            "source_modules": f"{root}.**",
            "forbidden_modules": root,
            "allow_indirect_imports": "True",
            "as_packages": "False",
        }
        if package.floors:
            config[f"importlinter:contract:{root}-floors"] = {
                "name": f"Modules of {root} import downwards, floor by floor",
                "type": "layers",
                "containers": root,
                "layers": _lines(_standing(package)),
                "exhaustive": "True",
            }
            config[f"importlinter:contract:{root}-circles"] = {
                "name": f"Neighbours on a floor of {root} form no circle",
                "type": "acyclic_siblings",
                "ancestors": root,
                "depth": "0",
            }
    text = io.StringIO()
    config.write(text)
    return text.getvalue()


def check(packages: dict[str, Package], *, verbose: bool = False) -> bool:
    """Check all contracts on the installed (editable) packages; prints the report, and says whether all are kept."""
    from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "importlinter.ini"
        path.write_text(contracts(packages), "utf-8")
        status = lint_imports(config_filename=str(path), no_cache=True, no_logo=True, verbose=verbose)
    return bool(status == EXIT_STATUS_SUCCESS)


def _standing(package: Package) -> list[str]:
    """The floors that have modules yet; neighbours may use each other, and the contract on circles watches them."""
    floors = []
    for floor in package.floors:
        here = [
            name
            for name in floor
            if any((package.source / path).exists() for path in (f"{name}.py", f"{name}/__init__.py"))
        ]
        if here:
            floors.append(" : ".join(here))
    return floors


def _lines(values: Iterable[str]) -> str:
    return "\n" + "\n".join(values)


if __name__ == "__main__":
    sys.exit(not check(discover()))
