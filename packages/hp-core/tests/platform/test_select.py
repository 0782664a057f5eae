"""Which framework a process works with: decided by what the environment says, and what can't work is told with its remedy.

The frameworks here are made up: packages without content in a folder, seen by an interpreter that sees no other packages.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hp_core.errors import PlatformError
from hp_core.platform.remedies import explain_failed_import, how_to_install
from hp_core.platform.select import choose

BOTH = {"torch", "mindspore"}
SOURCE = Path(__file__).parents[2] / "src"


@pytest.mark.parametrize(
    ("wanted", "imported", "installed", "expected"),
    [
        ("mindspore", {"torch"}, BOTH, "mindspore"),
        ("torch", {"mindspore"}, BOTH, "torch"),
        (None, {"mindspore"}, BOTH, "mindspore"),
        (None, {"torch"}, BOTH, "torch"),
        (None, set(), {"mindspore"}, "mindspore"),
        (None, set(), {"torch"}, "torch"),
        (None, set(), BOTH, "torch"),
        (None, BOTH, BOTH, "torch"),
        ("", {"mindspore"}, BOTH, "mindspore"),
    ],
)
def test_order_of_preference(wanted, imported, installed, expected):
    assert choose(wanted, imported, installed) == expected


@pytest.mark.parametrize(
    ("wanted", "installed", "message"),
    [
        (None, set(), "pip install 'torch>=2.7'; or "),
        ("jax", BOTH, "HYPER_PARALLEL_PLATFORM='jax'.*torch, mindspore"),
        ("MindSpore", BOTH, "HYPER_PARALLEL_PLATFORM='MindSpore'.*torch, mindspore"),
        ("torch", {"mindspore"}, "torch is not installed: pip install 'torch>=2.7'"),
        ("mindspore", {"torch"}, "mindspore is not installed: "),
    ],
)
def test_refusals_name_the_remedy(wanted, installed, message):
    with pytest.raises(PlatformError, match=message):
        choose(wanted, set(), installed)


def test_a_python_without_wheels_is_named():
    assert how_to_install("mindspore", (3, 11)) == "pip install 'mindspore>=2.8' 'numpy<2'"
    assert how_to_install("mindspore", (3, 13)).startswith("its wheels are for Python 3.10 to 3.12, and this is 3.13")
    assert how_to_install("torch", (3, 13)) == "pip install 'torch>=2.7'"


@pytest.mark.parametrize(
    ("framework", "error", "numpy", "message"),
    [
        (
            "mindspore",
            ImportError("numpy.core.multiarray failed"),
            "2.1.3",
            "needs NumPy below 2, and 2.1.3 is installed",
        ),
        (
            "mindspore",
            ImportError("numpy.core.multiarray failed"),
            "1.26.4",
            "If its installation is broken: pip install",
        ),
        (
            "mindspore",
            ModuleNotFoundError("No module", name="mindspore"),
            "2.1.3",
            "Install it: pip install 'mindspore",
        ),
        ("torch", ImportError("libhccl.so: needed by torch_npu"), "2.1.3", "TORCH_DEVICE_BACKEND_AUTOLOAD=0"),
        ("torch", OSError("libtorch.so: cannot open\nlong text"), "2.1.3", "libtorch.so: cannot open. If its"),
        ("torch", RuntimeError(), "2.1.3", "torch can't be imported: RuntimeError."),
    ],
)
def test_an_import_that_fails_is_explained(framework, error, numpy, message):
    assert message in explain_failed_import(framework, error, numpy, (3, 11))


CHOSEN = """
import sys, types
for name in ("torch", "mindspore"):
    ours = sys.modules[f"hp_core.platform.{name}"] = types.ModuleType(f"hp_core.platform.{name}")
    ours.create_platform = lambda name=name: types.SimpleNamespace(name=name)
for name in sys.argv[1:]:
    __import__(name)
from hp_core import HyperParallelError, get_platform
try:
    print(get_platform().name)
except HyperParallelError as error:
    print(type(error).__name__, error)
"""


def _chosen(folder: Path, *imported: str, wanted: str | None = None, **packages: str) -> str:
    """What a process chooses, or how it is refused, if these packages, with this content, are all that is installed."""
    for name, content in packages.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(content)
    environment = {name: value for name, value in os.environ.items() if name != "HYPER_PARALLEL_PLATFORM"}
    environment["PYTHONPATH"] = os.pathsep.join([str(SOURCE), str(folder)])
    if wanted is not None:
        environment["HYPER_PARALLEL_PLATFORM"] = wanted
    done = subprocess.run(
        [sys.executable, "-S", "-c", CHOSEN, *imported],
        env=environment, capture_output=True, text=True, timeout=60, check=False, cwd=folder,
    )  # fmt: skip
    assert not done.returncode, done.stderr
    return done.stdout.strip()


def test_what_is_installed_and_imported_decides(tmp_path):
    assert _chosen(tmp_path).startswith("PlatformError no framework is installed: pip install 'torch>=2.7'; or ")
    assert _chosen(tmp_path, mindspore="") == "mindspore"
    assert _chosen(tmp_path, wanted="torch").startswith("PlatformError HYPER_PARALLEL_PLATFORM=torch, but torch is not")
    assert _chosen(tmp_path, torch="") == "torch"
    assert _chosen(tmp_path, "mindspore") == "mindspore"
    assert _chosen(tmp_path, "mindspore", "torch") == "torch"
    assert _chosen(tmp_path, "torch", wanted="mindspore") == "mindspore"
    assert _chosen(tmp_path, wanted="minspore").startswith("PlatformError HYPER_PARALLEL_PLATFORM='minspore' is not a")


def test_a_folder_that_is_called_like_a_framework_is_none(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "README.md").touch()
    assert _chosen(tmp_path, mindspore="") == "mindspore"


def test_the_wrong_numpy_is_named_when_the_import_fails(tmp_path):
    metadata = tmp_path / "numpy-2.2.6.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 2.2.6\n")
    told = _chosen(tmp_path, mindspore="raise ImportError('numpy.core.multiarray failed to import')")
    assert told.startswith("PlatformError mindspore can't be imported: numpy.core.multiarray failed to import.")
    assert told.endswith("MindSpore needs NumPy below 2, and 2.2.6 is installed: pip install 'numpy<2'.")
