"""On an NPU: torch_npu's fused ops where it has them, and the CANN kernels where they were built; else the twins run there.

Not verified on hardware. Tested as far as a CPU can: which op is called with what, and the kernels' host code on the shim.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch

from hp_kernels.cann import cann_library
from hp_kernels.dtypes import DTYPE_CODES

__all__ = ["fused_permute", "fused_unpermute", "lse_merge", "on_npu"]

_FAULTS = {
    1: "it has no kernel for this element type",
    2: "the shape can't be cut for its cores",
    3: "the launch failed",
}


def on_npu(tensor: torch.Tensor) -> bool:
    """Whether it is one of torch_npu's tensors."""
    return tensor.device.type == "npu"


def fused_permute(tokens: torch.Tensor, experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """torch_npu's own permutation, which has its gradient: rows by expert, and the row of every slot; None without it."""
    fused = _torch_npu("npu_moe_token_permute")
    if fused is None:
        return None
    permuted, rows = fused(tokens, experts)
    return permuted, rows.view(experts.shape).long()


def fused_unpermute(permuted: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor | None:
    """torch_npu's own weighted sum, which has its gradient; None without it.

    Without weights that op takes a token to have one row, so several are left to the twin.
    """
    fused = _torch_npu("npu_moe_token_unpermute")
    if fused is None or (weights is None and rows.shape[1] != 1):
        return None
    result: torch.Tensor = fused(permuted, rows.flatten().int(), weights)
    return result


def lse_merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor, swapped: bool
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The merge by the CANN kernel; None where it was not built, or has no variant for these element types."""
    library = cann_library()
    if library is None or out_a.dtype != out_b.dtype or out_a.dtype == torch.float64 or out_a.numel() == 0:
        return None
    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
    stream = torch.npu.current_stream(out_a.device).npu_stream  # type: ignore[attr-defined]
    launch_lse_merge(library, stream, out_a, lse_a, out_b, lse_b, out, lse, swapped)
    return out, lse


def launch_lse_merge(
    library: ctypes.CDLL,
    stream: int | None,
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    swapped: bool,
) -> None:
    """Launch the kernel on a stream; arguments as for `hp_kernels::lse_merge`, and its results.

    Raises:
        RuntimeError: the launch failed.
    """
    code = DTYPE_CODES[str(out_a.dtype).removeprefix("torch.")]
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (out_a, lse_a, out_b, lse_b, out, lse)]
    outer, middle, inner, dim = map(ctypes.c_uint64, out_a.shape)
    status = library.hp_cann_lse_merge(
        ctypes.c_void_p(stream), code, *pointers, outer, middle, inner, ctypes.c_int(swapped), dim
    )
    if status:
        raise RuntimeError(
            f"lse_merge of {list(out_a.shape)}, {out_a.dtype}, on the NPU: {_FAULTS.get(status, status)}."
        )


def _torch_npu(name: str) -> Any:
    # A tensor on an NPU means that torch_npu is loaded; it is never imported from here.
    return getattr(sys.modules.get("torch_npu"), name, None)
