"""The torch island: the ops that write to tensors, registered from C++; built here, loaded when the ops are."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import torch

from hp_kernels.build import BuildError, require_compiler, require_version
from hp_kernels.islands import folder_of, left_out, sources, switch_of
from hp_kernels.loading import native, why_not_native

__all__ = ["build_island", "load_island"]

_OLDEST = (2, 7)
_STABLE = (2, 10)
_SOURCES = ("islands/torch_ops.cpp", "arrays.cpp", "pack.cpp", "philox.cpp", "threads.cpp")
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden")


def build_island() -> Path:
    """Compile the island for the installed torch.

    Returns:
        The shared object.

    Raises:
        BuildError: torch is too old or of the old C++ ABI, there is no compiler, or it fails.
    """
    version = require_version("torch", torch.__version__, _OLDEST)
    if not torch.compiled_with_cxx11_abi():
        raise BuildError(
            f"torch {torch.__version__} was compiled with the old C++ ABI (_GLIBCXX_USE_CXX11_ABI=0), which no current compiler "
            f"gives by default: install the wheels of PyTorch itself, pip install --force-reinstall torch"
        )
    compiler = require_compiler()
    place = Path(torch.__file__).parent
    target = _library()
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(f".{os.getpid()}")
    stable = ["-DHP_TORCH_STABLE", "-DTORCH_TARGET_VERSION=0x020A000000000000"] if version >= _STABLE else []
    includes = [f"-I{place / 'include'}", f"-I{place / 'include/torch/csrc/api/include'}"]
    files = [str(sources() / name) for name in _SOURCES]
    libraries = [f"-L{place / 'lib'}", "-ltorch_cpu", "-ltorch", "-lc10", "-pthread"]
    command = [
        compiler,
        *_FLAGS,
        "-fPIC",
        "-shared",
        *stable,
        *includes,
        *files,
        "-o",
        str(unfinished),
        *libraries,
        "-s",
    ]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode != 0:
        raise BuildError(
            f"the compiler failed (status {completed.returncode}):\n{' '.join(command)}\n{completed.stderr[-4000:]}"
        )
    unfinished.replace(target)  # another process may be loading it
    return target


def load_island() -> None:
    """Load the island, which takes the place of the Python ops on the CPU, if it is there and wanted.

    Raises:
        ImportError: HP_KERNELS_TORCH=on, and it isn't there or doesn't load.
    """
    switch, library = switch_of("torch"), _library()
    if switch == "off":
        left_out("torch", "HP_KERNELS_TORCH=off")
        return
    if native() is None:
        left_out("torch", why_not_native())
        return
    problem = "it wasn't built for this torch: python -m hp_kernels.build torch"
    if library.exists():
        try:
            torch.ops.load_library(str(library))
        except OSError as error:
            problem = (
                f"{library} doesn't load: {error.__cause__ or error}. Build it again: python -m hp_kernels.build torch"
            )
        else:
            left_out("torch", "")
            return
    left_out("torch", problem)
    if switch == "on":
        raise ImportError(f"HP_KERNELS_TORCH=on, but {problem}")


def _library() -> Path:
    return folder_of("torch", torch.__version__) / "_torch.so"
