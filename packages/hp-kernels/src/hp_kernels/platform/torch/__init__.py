"""The kernels as torch ops: importing this registers `torch.ops.hp_kernels.*`, with fake implementations and gradients."""

from hp_kernels.platform.torch import lse_merging, packing, permute, philox
from hp_kernels.platform.torch.building import load_island

__all__ = ["lse_merging", "packing", "permute", "philox"]

load_island()
