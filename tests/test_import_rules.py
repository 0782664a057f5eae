"""The import rules of the workspace hold, and would be noticed when broken.

The contracts themselves are made in `build/import_rules.py`. What no static look can tell, whether importing a package
loads a framework, is asked of a fresh interpreter.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import import_rules
from workspace import Package, discover

PACKAGES = discover()
HEAVY = ("torch", "torch_npu", "mindspore", "numpy")


def test_workspace_keeps_its_contracts() -> None:
    assert import_rules.check(PACKAGES), "the report above names the import and the rule"


@pytest.mark.parametrize("package", PACKAGES.values(), ids=lambda package: package.name)
def test_import_loads_no_framework(package: Package) -> None:
    code = f"import sys, {package.import_name}; print([name for name in {HEAVY} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"


# A small workspace with one import each that must be refused: name of the file, the import, and what the report says.
BROKEN = {
    "the core imports a component": ("hp_core/layout.py", "import hp_one", "Packages import downwards"),
    "one component imports another": ("hp_one/api.py", "from hp_two import api", "Packages import downwards"),
    "a component imports the umbrella": ("hp_two/api.py", "import hyper_parallel", "Packages import downwards"),
    "a framework outside the platform": ("hp_core/mesh.py", "import torch", "of hp_core import a framework"),
    "a framework in a new component": ("hp_one/api.py", "import torch.nn", "of hp_one import a framework"),
    "a framework in a function": ("hp_one/api.py", "def f():\n    import torch_npu", "of hp_one import a framework"),
    "a lower floor imports a higher one": ("hp_core/mesh.py", "from hp_core import layout", "floor by floor"),
    "a module on no floor": ("hp_core/stray.py", "x = 1", "floor by floor"),
    "a circle between neighbours": ("hp_core/process_group.py", "import hp_core.mesh", "form no circle"),
    "a module imports the lazy front": ("hp_core/mesh.py", "from hp_core import Anything", "not from its front"),
}
KEPT = {
    "hp_core/mesh.py": "import hp_core.process_group",
    "hp_core/process_group.py": "",
    "hp_core/layout.py": "import hp_core.mesh",
    "hp_core/platform/__init__.py": "",
    "hp_core/platform/torch/__init__.py": "",
    "hp_core/platform/torch/ops.py": "import torch",
    "hp_one/api.py": "from hp_core import layout",
    "hp_two/api.py": "import hp_core.mesh",
    "hyper_parallel/exports.py": "import hp_one.api, hp_two.api, hp_core.mesh",
}


def small_workspace(folder: Path, files: dict[str, str]) -> dict[str, Package]:
    """Write a workspace of a core, two components and an umbrella."""
    found = {}
    for import_name in sorted({path.split("/")[0] for path in files}):
        package = folder / import_name
        for path, text in files.items():
            if path.startswith(import_name + "/"):
                file = package / "src" / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text + "\n", "utf-8")
        (package / "src" / import_name / "__init__.py").touch()
        floors = (("layout",), ("mesh", "process_group"), ("platform",)) if import_name == "hp_core" else ()
        found[import_name] = Package(import_name, "1", package, import_name, floors=floors)
    return found


def report(folder: Path, packages: dict[str, Package]) -> tuple[bool, str]:
    """Check a small workspace in an interpreter of its own, where the real packages are not in the way."""
    build = Path(import_rules.__file__).parent
    code = f"""
        import sys
        sys.path[:0] = {[str(build), *(str(package.folder / "src") for package in packages.values())]}
        from pathlib import Path, PosixPath
        from workspace import Package
        import import_rules
        sys.exit(not import_rules.check({packages}))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=folder)
    return run.returncode == 0, run.stdout + run.stderr


def test_a_workspace_without_offence_is_kept(tmp_path: Path) -> None:
    kept, text = report(tmp_path, small_workspace(tmp_path, KEPT))
    assert kept, text


@pytest.mark.parametrize(("path", "line", "rule"), BROKEN.values(), ids=BROKEN)
def test_each_rule_is_noticed_when_broken(tmp_path: Path, path: str, line: str, rule: str) -> None:
    files = {**KEPT, path: "\n".join([KEPT.get(path, ""), line])}
    kept, text = report(tmp_path, small_workspace(tmp_path, files))
    assert not kept
    broken = [entry for entry in text.splitlines() if " BROKEN" in entry]
    assert any(rule in entry for entry in broken), text
