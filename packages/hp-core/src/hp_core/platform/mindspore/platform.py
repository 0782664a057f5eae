"""The MindSpore platform, put together from its parts: CPU with torch's gloo, or Ascend with HCCL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
from mindspore import mint

from hp_core.errors import PlatformError
from hp_core.platform.mindspore.autograd import MindSporeAutograd
from hp_core.platform.mindspore.determinism import MindSporeDeterministicSwitches
from hp_core.platform.mindspore.device_tensors import DeviceTensorTools
from hp_core.platform.mindspore.dtensor import define_dtensor
from hp_core.platform.mindspore.hccl import HcclCollectives, HcclProcesses
from hp_core.platform.mindspore.modules import MindSporeModuleTools
from hp_core.platform.mindspore.ops import MindSporeOps
from hp_core.platform.mindspore.processes import HostProcesses, require_gloo
from hp_core.platform.mindspore.tensors import HostTensorTools
from hp_core.platform.mindspore.wrapper import new_dtensor
from hp_core.platform.protocol import OpSamples

__all__ = ["MindSporePlatform", "create_platform"]

_DEVICES = {"CPU": "cpu", "Ascend": "npu"}


class MindSporePlatform:
    """MindSpore on one kind of device: "cpu" (gloo, through torch) or "npu" (HCCL)."""

    name = "mindspore"

    def __init__(self, device_type: str = "cpu") -> None:
        self.autograd = MindSporeAutograd(on_host=device_type == "cpu")
        self.ops = MindSporeOps()
        self.modules = MindSporeModuleTools()
        self.new_dtensor = new_dtensor
        self._collectives: Any = None
        if device_type == "cpu":
            self.processes: Any = HostProcesses()
            self.tensors: HostTensorTools = HostTensorTools()
        else:
            self.processes = HcclProcesses(mint.distributed)
            self.tensors = DeviceTensorTools()
            self._collectives = HcclCollectives(mint.distributed)
        self.deterministic_switches = MindSporeDeterministicSwitches(self.processes)

    @property
    def collectives(self) -> Any:
        """The one door; on CPU made when first asked for, since it needs torch, which a single process does without."""
        if self._collectives is None:
            require_gloo()
            from hp_core.platform.mindspore.collectives import GlooCollectives

            self._collectives = GlooCollectives()
        return self._collectives

    def new_stream(self) -> Any:
        """A device stream, or a worker thread on the CPU."""
        if self.processes.device_type != "cpu":
            return ms.runtime.Stream()
        from hp_core.platform.torch.streams import CpuStream

        return CpuStream()

    def define_dtensor(self, dispatch: Callable[..., Any], methods: type) -> type:
        """The DTensor class, given the dispatcher and the framework-neutral methods."""
        return define_dtensor(dispatch, methods)

    def allow_in_files(self, functions: Sequence[Callable[..., Any]]) -> None:
        """Nothing to do: MindSpore's checkpoints hold arrays only."""

    def mesh_to_native(self, mesh: Any) -> Any:
        """Refused: MindSpore has no mesh of its own."""
        raise PlatformError("to_torch() makes PyTorch objects; this process works with MindSpore.")

    def dtensor_to_native(self, tensor: Any) -> Any:
        """Refused: MindSpore has no distributed tensor of its own."""
        raise PlatformError("to_torch() makes PyTorch objects; this process works with MindSpore. Use full_tensor().")

    def native_parts(self, tensor: Any) -> tuple[Any, Any, Any, Any]:
        """Refused: MindSpore has no distributed tensor of its own."""
        raise PlatformError("from_torch() takes PyTorch objects; this process works with MindSpore.")

    def fallback(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], wrap: Callable[..., Any]) -> Any:
        """Nothing: MindSpore has no distributed op library, so an op without a rule is an error."""
        return NotImplemented

    def op_samples(self) -> OpSamples:
        """The table of calls for the validator of rules, which only that loads."""
        from hp_core.platform.mindspore.op_samples import MindSporeOpSamples

        return MindSporeOpSamples()


def create_platform() -> MindSporePlatform:
    """The platform on this process' device.

    Raises:
        PlatformError: MindSpore is set to a device that this platform doesn't know.
    """
    target = ms.get_context("device_target")
    if target not in _DEVICES:
        raise PlatformError(
            f"MindSpore is set to {target!r}; hp-core works with it on CPU and Ascend: call mindspore.set_device()."
        )
    if target == "CPU":
        # Every collective waits for the ops before it. Handing ops to MindSpore's own threads makes that wait cost
        # milliseconds on a busy machine, and lets errors come late and somewhere else.
        ms.runtime.launch_blocking()
    return MindSporePlatform(_DEVICES[target])
