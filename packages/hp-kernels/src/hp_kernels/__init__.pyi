"""Names of `hp_kernels` for type checkers. Written by build/stubs.py: edit the table, not this file."""

from hp_kernels.built import build_info as build_info
from hp_kernels.errors import KernelArgumentError as KernelArgumentError
from hp_kernels.loading import native as native
from hp_kernels.loading import why_not_native as why_not_native
from hp_kernels.lse_merging import lse_merge as lse_merge
from hp_kernels.lse_merging import lse_merge_ as lse_merge_
from hp_kernels.packing import cast_into as cast_into
from hp_kernels.packing import pack as pack
from hp_kernels.packing import pack_into as pack_into
from hp_kernels.packing import unpack as unpack
from hp_kernels.packing import unpack_into as unpack_into
from hp_kernels.permute import Permuted as Permuted
from hp_kernels.permute import moe_permute as moe_permute
from hp_kernels.permute import moe_unpermute as moe_unpermute
from hp_kernels.philox import fill_random as fill_random

__version__: str
EXPORTS: dict[str, str]
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
    "native",
    "pack",
    "pack_into",
    "unpack",
    "unpack_into",
    "why_not_native",
]
