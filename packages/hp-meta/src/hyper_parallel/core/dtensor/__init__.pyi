"""Names of `hyper_parallel.core.dtensor` for type checkers. Written by build/stubs.py: edit the table, not this file."""

from hp_core import DTensor as DTensor
from hp_core import DeviceMesh as DeviceMesh
from hp_core import FlatShard as FlatShard
from hp_core import Layout as Layout
from hp_core import Partial as Partial
from hp_core import Placement as Placement
from hp_core import RaggedShard as RaggedShard
from hp_core import Replicate as Replicate
from hp_core import Shard as Shard
from hp_core import SkipDTensorDispatch as SkipDTensorDispatch
from hp_core import distribute_module as distribute_module
from hp_core import distribute_tensor as distribute_tensor
from hp_core import empty as empty
from hp_core import full as full
from hp_core import get_current_mesh as get_current_mesh
from hp_core import init_device_mesh as init_device_mesh
from hp_core import init_empty_weights as init_empty_weights
from hp_core import init_on_device as init_on_device
from hp_core import init_parameters as init_parameters
from hp_core import ones as ones
from hp_core import rand as rand
from hp_core import randint as randint
from hp_core import randn as randn
from hp_core import zeros as zeros

__all__ = [
    "DTensor",
    "DeviceMesh",
    "FlatShard",
    "Layout",
    "Partial",
    "Placement",
    "RaggedShard",
    "Replicate",
    "Shard",
    "SkipDTensorDispatch",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "full",
    "get_current_mesh",
    "init_device_mesh",
    "init_empty_weights",
    "init_on_device",
    "init_parameters",
    "ones",
    "rand",
    "randint",
    "randn",
    "zeros",
]
