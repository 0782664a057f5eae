"""Names of `hyper_parallel.kernels` for type checkers. Written by build/stubs.py: edit the table, not this file."""

from hp_kernels import KernelArgumentError as KernelArgumentError
from hp_kernels import Permuted as Permuted
from hp_kernels import build_info as build_info
from hp_kernels import cast_into as cast_into
from hp_kernels import fill_random as fill_random
from hp_kernels import lse_merge as lse_merge
from hp_kernels import lse_merge_ as lse_merge_
from hp_kernels import moe_permute as moe_permute
from hp_kernels import moe_unpermute as moe_unpermute
from hp_kernels import pack as pack
from hp_kernels import pack_into as pack_into
from hp_kernels import unpack as unpack
from hp_kernels import unpack_into as unpack_into

__all__ = [
    "KernelArgumentError",
    "Permuted",
    "build_info",
    "cast_into",
    "fill_random",
    "lse_merge",
    "lse_merge_",
    "moe_permute",
    "moe_unpermute",
    "pack",
    "pack_into",
    "unpack",
    "unpack_into",
]
