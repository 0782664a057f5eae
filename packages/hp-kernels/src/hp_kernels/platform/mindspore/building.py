"""The MindSpore island: packing as an op of MindSpore's own, built and loaded by its CustomOpBuilder."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore import ops

from hp_kernels.build import BuildError, require_compiler, require_version
from hp_kernels.cann import cann_problems
from hp_kernels.islands import folder_of, left_out, sources, switch_of
from hp_kernels.loading import native, why_not_native

__all__ = ["build_island", "island"]

_NAME = "hp_kernels_mindspore"
_SOURCES = ("islands/mindspore_ops.cpp", "arrays.cpp", "pack.cpp", "threads.cpp")
_loaded: list[Any] = []


def build_island(backend: str = "CPU") -> Path:
    """Compile the island for the installed MindSpore.

    Args:
        backend: "CPU"; "Ascend" says what keeps it from being built.

    Returns:
        The shared object.

    Raises:
        BuildError: MindSpore is too old, a tool is missing, or the build fails; or the backend has no packing of ours.
    """
    require_version("mindspore", ms.__version__, (2, 8))
    require_compiler()
    # One that pip has installed lies beside the interpreter, which need not be on PATH.
    if shutil.which("ninja") is None and Path(sys.executable).with_name("ninja").exists():
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    if shutil.which("ninja") is None:
        raise BuildError("MindSpore's CustomOpBuilder needs ninja, which isn't on PATH: pip install ninja")
    if backend == "Ascend":
        problems = cann_problems(os.environ)
        if problems:
            raise BuildError("the Ascend backend can't be built here:\n  " + "\n  ".join(problems))
        raise BuildError(
            "packing has no body for the NPU: on Ascend, MindSpore's own ops pack there. The kernels that have one are built with "
            "HP_KERNELS_CANN=on pip install hp-kernels; build this island with --backend CPU"
        )
    target = _library()
    target.parent.mkdir(parents=True, exist_ok=True)
    builder = ops.CustomOpBuilder(
        _NAME,
        [str(sources() / name) for name in _SOURCES],
        backend=backend,
        cflags="-O3 -ffp-contract=off -fno-math-errno -fvisibility=hidden -Wno-attributes",
        ldflags="-pthread",
        build_dir=str(target.parent),
    )
    try:
        builder.build()
    except Exception as error:
        raise BuildError(f"MindSpore's CustomOpBuilder failed: {error}") from error
    if not target.exists():
        raise BuildError(f"MindSpore's CustomOpBuilder made no {target}; it made {os.listdir(target.parent)}")
    return target


def island() -> Any:
    """The module of the island, or None where it isn't there or wanted.

    Raises:
        ImportError: HP_KERNELS_MINDSPORE=on, and it isn't there or doesn't load.
    """
    if not _loaded:
        _loaded.append(_load())
    return _loaded[0]


def _load() -> Any:
    switch, library = switch_of("mindspore"), _library()
    if switch == "off":
        left_out("mindspore", "HP_KERNELS_MINDSPORE=off")
        return None
    if native() is None:
        left_out("mindspore", why_not_native())
        return None
    problem = "it wasn't built for this MindSpore: python -m hp_kernels.build mindspore"
    if library.exists():
        try:
            spec = importlib.util.spec_from_file_location(_NAME, library)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except ImportError as error:
            problem = f"{library} doesn't load: {error}. Build it again: python -m hp_kernels.build mindspore"
        else:
            left_out("mindspore", "")
            return module
    left_out("mindspore", problem)
    if switch == "on":
        raise ImportError(f"HP_KERNELS_MINDSPORE=on, but {problem}")
    return None


def _library() -> Path:
    return folder_of("mindspore", ms.__version__) / f"{_NAME}.so"
