"""The job that the launcher started, on MindSpore: its processes, their devices, and what they say of themselves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import mindspore as ms
from lm.config import ConfigError, RunConfig
from lm.parallel import build_mesh
from lm.report import Machinery, peak_resident_bytes

from hp_core import DeviceMesh, destroy_process_group, init_process_group

TARGETS = {"cpu": "CPU", "npu": "Ascend"}


def launched_world_size() -> int | None:
    """How many processes the launcher (msrun or torchrun) started; None when this is a plain process."""
    size = os.environ.get("WORLD_SIZE") or os.environ.get("MS_WORKER_NUM")
    return None if size is None else int(size)


def require_device(config: RunConfig) -> None:
    """Makes MindSpore use the run's device, if all that the run asks for is there on it.

    Raises:
        ConfigError: MindSpore knows no such device here, or not the element type on it; or the run asks for what only
            the example on PyTorch has.
    """
    if config.pipelined or config.fsdp or config.optimizer != "adamw":
        flag = f"--optimizer {config.optimizer}"
        if config.pipelined or config.fsdp:
            flag = "--fsdp" if config.fsdp else f"--mesh {config.mesh_text}: a pipeline"
        raise ConfigError(f"{flag}: only examples/train_lm.py, on PyTorch, has it; leave it out")
    if config.device not in TARGETS:
        raise ConfigError(f"--device {config.device}: on MindSpore this example runs on {' and '.join(TARGETS)}")
    if config.dtype != "float32" and config.device == "cpu":
        raise ConfigError(
            f"--dtype {config.dtype}: on a CPU MindSpore lacks ops of bfloat16, and computes some of float64 in single "
            "precision; use float32"
        )
    try:
        ms.set_device(TARGETS[config.device])
    except Exception as error:
        raise ConfigError(f"--device {config.device} can't be used: {str(error).splitlines()[0]}") from error


@contextmanager
def mesh_of_this_job(config: RunConfig) -> Iterator[DeviceMesh | None]:
    """The mesh of the launched job, with the process group open; None in a plain process, where everything is dense."""
    if launched_world_size() is None:
        yield None
        return
    init_process_group()
    try:
        yield build_mesh(config)
    finally:
        destroy_process_group()


def machinery(device: str) -> Machinery:
    """What the report says of MindSpore."""
    peak = peak_resident_bytes if device == "cpu" else ms.runtime.max_memory_allocated
    return Machinery({"mindspore": ms.__version__}, peak)
