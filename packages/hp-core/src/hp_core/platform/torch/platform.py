"""The PyTorch platform, put together from its parts.

The device is chosen once, here: npu if torch_npu is loaded and sees one, else cuda, else cpu.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hp_core.platform.protocol import OpSamples
from hp_core.platform.torch.autograd import TorchAutograd
from hp_core.platform.torch.collectives import TorchCollectives
from hp_core.platform.torch.determinism import TorchDeterministicSwitches
from hp_core.platform.torch.dtensor import define_dtensor
from hp_core.platform.torch.interop import fallback, mesh_to_native, native_parts, to_native
from hp_core.platform.torch.modules import TorchModuleTools
from hp_core.platform.torch.ops import TorchOps
from hp_core.platform.torch.processes import TorchProcesses
from hp_core.platform.torch.streams import CpuStream
from hp_core.platform.torch.tensors import TorchTensorTools
from hp_core.platform.torch.wrapper import new_dtensor

__all__ = ["TorchPlatform", "create_platform"]


class TorchPlatform:
    """PyTorch on one kind of device."""

    name = "torch"

    def __init__(self, device_type: str) -> None:
        self.processes = TorchProcesses(device_type)
        self.collectives = TorchCollectives()
        self.tensors = TorchTensorTools(device_type)
        self.autograd = TorchAutograd()
        self.ops = TorchOps()
        self.modules = TorchModuleTools()
        self.deterministic_switches = TorchDeterministicSwitches()
        self.new_dtensor = new_dtensor

    def new_stream(self) -> Any:
        """A device stream, or a worker thread on the CPU."""
        device = self.processes.device_type
        return CpuStream() if device == "cpu" else getattr(torch, device).Stream()

    def define_dtensor(self, dispatch: Callable[..., Any], methods: type) -> type:
        """The DTensor class, given the dispatcher and the framework-neutral methods."""
        return define_dtensor(dispatch, methods)

    def allow_in_files(self, functions: Sequence[Callable[..., Any]]) -> None:
        """Let `torch.load(weights_only=True)` make DTensors."""
        torch.serialization.add_safe_globals(list(functions))

    def mesh_to_native(self, mesh: Any) -> Any:
        """A `torch.distributed.DeviceMesh` on the same process groups."""
        return mesh_to_native(mesh, self.processes.device_type)

    def dtensor_to_native(self, tensor: Any) -> Any:
        """One of our DTensors as a `torch.distributed.tensor.DTensor`."""
        return to_native(tensor)

    def native_parts(self, tensor: Any) -> tuple[Any, Any, Any, Any]:
        """What a `torch.distributed.tensor.DTensor` is made of."""
        return native_parts(tensor)

    def fallback(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], wrap: Callable[..., Any]) -> Any:
        """Run an op through torch's own DTensor."""
        return fallback(function, args, kwargs, wrap)

    def op_samples(self) -> OpSamples:
        """The table of calls for the validator of rules, which only that loads."""
        from hp_core.platform.torch.op_samples import TorchOpSamples

        return TorchOpSamples()


def create_platform() -> TorchPlatform:
    """The platform on this process' device."""
    return TorchPlatform(_device_type())


def _device_type() -> str:
    npu = getattr(torch, "npu", None)  # torch_npu adds it
    if npu is not None and npu.is_available():
        return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"
