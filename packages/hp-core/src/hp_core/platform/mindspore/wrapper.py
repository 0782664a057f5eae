"""A local tensor in its DTensor: the hot end of every op."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor

from hp_core.platform.mindspore.arrays import as_tensor

__all__ = ["new_dtensor"]

_make_subclass: Any = Tensor._make_subclass


def new_dtensor(cls: type, local: Any, spec: Any) -> Any:
    """A DTensor on the local tensor's own storage and place in the graph.

    So `mindspore.value_and_grad` may be given DTensors, and a function that it differentiates may return one.
    """
    if type(local) is np.ndarray:
        local = as_tensor(local)
    tensor = _make_subclass(cls, local)
    tensor._local = local
    tensor._spec = spec
    return tensor
