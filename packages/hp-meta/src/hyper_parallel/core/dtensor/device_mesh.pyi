"""Names of `hyper_parallel.core.dtensor.device_mesh` for type checkers. Written by build/stubs.py: edit the table, not this file."""

from hp_core import DeviceMesh as DeviceMesh
from hp_core import get_current_mesh as get_current_mesh
from hp_core import init_device_mesh as init_device_mesh

__all__ = [
    "DeviceMesh",
    "get_current_mesh",
    "init_device_mesh",
]
