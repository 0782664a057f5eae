"""Ops of the framework's own distributed library that have no rule here and can't run by falling back on that library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_core.dtensor.api import DTensorMethods
from hp_core.layout import Layout
from hp_core.mesh import init_device_mesh
from hp_core.placement import Replicate, Shard
from hp_core.platform import get_platform
from hp_core.platform.protocol import Tensor
from hp_core.rules.registry import rule_names
from hp_core.testing.ranks import run_ranks

__all__ = ["find_missing", "why_not"]

_OPERANDS = "p:4x4 p:4x4 p:4x4"
"""What the calls get: positive square matrices, which nearly every op takes."""


def find_missing() -> dict[str, str]:
    """Names of such ops, and why they can't run. Ops refused by their rule (random ones) are covered: that is by design."""
    names = sorted(set(get_platform().op_samples().native_calls()) - set(rule_names()))
    reasons = run_ranks(2, _try_all, names, timeout=170.0)
    return {name: why for name, why in zip(names, reasons[0], strict=True) if why}


def _try_all(names: list[str]) -> list[str]:
    native = get_platform().op_samples().native_calls()
    return [why_not(native[name]) for name in names]


def why_not(calls: tuple[Callable[..., Any], ...]) -> str:
    """Why none of the calls runs on DTensors; empty if one that runs on dense tensors does."""
    tensors = [operand.tensor for operand in get_platform().op_samples().values(_OPERANDS, 0)]
    mesh = init_device_mesh(get_platform().processes.device_type, (2,), mesh_dim_names=("tp",))
    base = Layout.from_device_mesh(mesh)
    why = "no call of it is known to try"
    for call in calls:
        try:
            wanted = call(*tensors)
        except Exception:
            continue
        for layout in (base(Replicate()), base(Shard(0))):
            try:
                found = call(*[_laid_out(tensor, layout) for tensor in tensors])
            except Exception as error:
                why = " ".join(str(error).split()) or type(error).__name__
                break
            if not _same(found, wanted):
                why = f"{layout.compact_str}: differs from dense"
                break
        else:
            return ""
    return why


def _laid_out(tensor: Tensor, layout: Layout) -> Any:
    tools = get_platform().tensors
    return DTensorMethods.from_local(
        tools.clone(tools.crop(tensor, layout.bounds(tuple(tensor.shape)))), layout, shape=tuple(tensor.shape)
    )


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, (tuple, list)):
        return len(found) == len(wanted) and all(map(_same, found, wanted))
    if not get_platform().tensors.is_tensor(wanted):
        return bool(found == wanted)
    if not isinstance(found, DTensorMethods):
        return False
    return not get_platform().op_samples().differing([(found.full_tensor(), wanted)])
