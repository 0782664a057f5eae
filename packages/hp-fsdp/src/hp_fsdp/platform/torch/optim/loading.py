"""Optimizer states that were saved in another layout, made to fit the parameters when they are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hp_core import distribute_tensor
from hp_core.dtensor.api import DTensorMethods
from hp_core.errors import LayoutError

__all__ = ["fitted"]


def fitted(state_dict: Mapping[str, Any], param_groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state dict with states laid out like their parameters: whole plain tensors are cut, other layouts moved.

    Args:
        state_dict: as `torch.optim.Optimizer.state_dict` gives it.
        param_groups: of the optimizer that is to take it.

    Raises:
        LayoutError: a state has another shape than its parameter.
    """
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    params = dict(zip(numbers, [param for group in param_groups for param in group["params"]], strict=False))
    states = {
        number: {key: _fit(value, params[number], key) for key, value in table.items()} if number in params else table
        for number, table in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def _fit(value: Any, param: Any, key: str) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if key == "step":
        return value.clone()  # torch would share it with the optimizer that it comes from, and both would count on it
    is_distributed = isinstance(value, DTensorMethods)
    if tuple(value.shape) != tuple(param.shape):
        local = f", of which this rank holds {tuple(param.local_shape)}" if isinstance(param, DTensorMethods) else ""
        raise LayoutError(
            f"state {key!r} has shape {tuple(value.shape)}, but its parameter has {tuple(param.shape)}{local}. Load a state dict "
            f"of the same parameters in the same order, with whole tensors or distributed ones."
        )
    if not isinstance(param, DTensorMethods):
        return value.full_tensor() if is_distributed else value  # type: ignore[attr-defined]
    if is_distributed:
        return value.redistribute(param.layout)  # type: ignore[attr-defined]
    return distribute_tensor(value, param.layout, src_data_rank=None)
