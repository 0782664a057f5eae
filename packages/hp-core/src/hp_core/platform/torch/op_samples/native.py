"""What torch's own DTensor has ops for, by canonical name, and how each may be called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from hp_core.platform.torch.ops import TorchOps

__all__ = ["native_calls"]

_TABLES = ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs")
"""Attributes of torch's sharding propagator that hold its rules; which there are depends on torch's version."""

_WHERE = (F, torch, torch.linalg, torch.special, torch.Tensor)
"""Where the Python functions are, the first that has one is meant."""

_OF_PYTHON = {
    "_fused_rms_norm": "rms_norm", "_linalg_det": "det", "_linalg_eigh": "eigh", "_linalg_slogdet": "slogdet",
    "_linalg_solve_ex": "solve", "_linalg_svd": "svd", "_log_softmax": "log_softmax", "_softmax": "softmax",
    "_to_copy": "to", "_unsafe_view": "view", "_adaptive_avg_pool2d": "adaptive_avg_pool2d",
    "_adaptive_avg_pool3d": "adaptive_avg_pool3d", "constant_pad_nd": "pad", "convolution": "conv2d",
    "grid_sampler_2d": "grid_sample", "grid_sampler_3d": "grid_sample", "index": "getitem",
    "linalg_cholesky_ex": "cholesky", "linalg_inv_ex": "inv", "linalg_lu_factor_ex": "lu_factor",
    "linalg_ldl_factor_ex": "ldl_factor", "max_pool1d_with_indices": "max_pool1d",
    "max_pool2d_with_indices": "max_pool2d", "max_pool3d_with_indices": "max_pool3d", "native_batch_norm": "batch_norm",
    "native_dropout": "dropout", "native_group_norm": "group_norm", "native_layer_norm": "layer_norm",
    "nll_loss_forward": "nll_loss", "nll_loss2d_forward": "nll_loss", "slice": "getitem",
    "_scaled_dot_product_flash_attention": "scaled_dot_product_attention",
    "_scaled_dot_product_efficient_attention": "scaled_dot_product_attention",
    **dict.fromkeys(
        "upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d "
        "upsample_trilinear3d".split(),
        "interpolate",
    ),
}  # fmt: skip
"""Ops below the Python functions, and the function that calls each."""

_OF_NO_VALUES = frozenset(
    "item is_same_size size numel stride copy_to new_empty new_empty_strided new_full new_ones new_zeros empty eye".split()
)
"""Metadata and factories: what answers them is no rule."""

_GENERIC: tuple[Callable[..., tuple[Any, ...]], ...] = (
    lambda x, y, z: (x,),
    lambda x, y, z: (x, y),
    lambda x, y, z: (x, y, z),
    lambda x, y, z: (x, 1),
    lambda x, y, z: (x, 2, 0),
    lambda x, y, z: (x, 0, 1),
    lambda x, y, z: (1, x),
    lambda x, y, z: (x[None], 2),
    lambda x, y, z: (x[None, None], 2),
    lambda x, y, z: (x[None, None, None], 2),
    lambda x, y, z: (x, 0, (y > 1).long(), z),
    lambda x, y, z: (x, 0, (y[0] > 1).long(), z),
    lambda x, y, z: (x, y[0], 0, 1),
    lambda x, y, z: ([x, y],),
    lambda x, y, z: ([x, y], [y, z]),
    lambda x, y, z: ([x, y], 2),
    lambda x, y, z: (x, (4, 4)),
    lambda x, y, z: (x, y[0]),
    lambda x, y, z: (x, [1, 3]),
)
"""Arguments to try, made of three matrices."""


def native_calls() -> dict[str, tuple[Callable[..., Any], ...]]:
    """Ops of torch's own DTensor that a Python function calls, by canonical name.

    Left out are the halves that no function calls by themselves (backward formulas) and what has no values.
    """
    from torch.distributed.tensor import DTensor

    propagator = DTensor._op_dispatcher.sharding_propagator
    aten = {op.overloadpacket.__name__ for table in _TABLES for op in getattr(propagator, table, {})}
    found: dict[str, tuple[Callable[..., Any], ...]] = {}
    for name in sorted(aten):
        python = _OF_PYTHON.get(name, name)
        if name.endswith("_backward") or (python.startswith("_") and not python.startswith(("_foreach_", "_fused_"))):
            continue
        functions = list(_functions(python))
        canonical = TorchOps().canonical(SimpleNamespace(__name__=python))
        if canonical is None or canonical[0] in _OF_NO_VALUES or not functions:
            continue
        # the variants in place come after the others
        found.setdefault(canonical[0], tuple(_call(functions[0], arguments) for arguments in _GENERIC))
    return found


def _functions(name: str) -> Iterator[Any]:
    plain = name.removeprefix("linalg_").removeprefix("special_")
    for spelling in dict.fromkeys((name, plain)):
        for module in _WHERE:
            function = getattr(module, spelling, None)
            if callable(function):
                yield function


def _call(function: Callable[..., Any], arguments: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    return lambda x, y, z: function(*arguments(x, y, z))
