"""The job that the launcher started, on PyTorch: its processes, their devices, and what they say of themselves."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hp_core import DeviceMesh, destroy_process_group, init_process_group

from .config import ConfigError, RunConfig
from .parallel import build_mesh
from .report import Machinery, peak_resident_bytes


def launched_world_size() -> int | None:
    """How many processes the launcher (torchrun) started; None when this is a plain process."""
    size = os.environ.get("WORLD_SIZE")
    return None if size is None else int(size)


def require_device(device: str) -> None:
    """Refuses a device that this process can't use.

    Raises:
        ConfigError: Its package is missing or fails, or it sees none.
    """
    if device == "cpu":
        return
    try:
        if device == "npu":
            importlib.import_module("torch_npu")
        available = torch.get_device_module(device).is_available()
    except Exception as error:  # torch_npu fails in many ways where CANN is missing
        raise ConfigError(
            f"--device {device} can't be used ({error}): npu needs the package torch_npu and CANN's set_env.sh sourced"
        ) from error
    if not available:
        raise ConfigError(f"--device {device}: PyTorch sees none in this process; use --device cpu")


@contextmanager
def mesh_of_this_job(config: RunConfig) -> Iterator[DeviceMesh | None]:
    """The mesh of the launched job, with the process group open; None in a plain process, where everything is dense."""
    if launched_world_size() is None:
        yield None
        return
    init_process_group({"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}[config.device])
    try:
        if config.device != "cpu":
            torch.get_device_module(config.device).set_device(int(os.environ.get("LOCAL_RANK", "0")))
        yield build_mesh(config)
    finally:
        destroy_process_group()


def machinery(device: str) -> Machinery:
    """What the report says of PyTorch."""
    on_device = device != "cpu"
    peak = (lambda: int(torch.get_device_module(device).max_memory_allocated())) if on_device else peak_resident_bytes
    return Machinery({"torch": torch.__version__}, peak)
