"""A local tensor in the wrapper of global size: the hot end of every op."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["new_dtensor"]

_make_wrapper: Any = torch.Tensor._make_wrapper_subclass


def new_dtensor(cls: type, local: torch.Tensor, spec: Any) -> Any:
    """Wrap a local tensor. This is the hot end of every op: two attributes, nothing else."""
    tensor = _make_wrapper(cls, spec.shape, dtype=spec.dtype, device=local.device)
    tensor._local = local
    tensor._spec = spec
    return tensor
