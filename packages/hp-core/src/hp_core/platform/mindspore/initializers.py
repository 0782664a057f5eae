"""MindSpore's initializers on DTensors: the same distributions, drawn from the layout-independent generator.

Fans are computed from global shapes, so that a parameter's initial value is the same for every layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mindspore.common import initializer as ms_initializer

from hp_core.errors import PlanError
from hp_core.platform.mindspore.op import MindSporeOp
from hp_core.platform.mindspore.special_calls import never_local
from hp_core.platform.select import get_platform

__all__ = ["initialize"]

_UNIFORM = MindSporeOp("uniform_", "uniform", never_local, inplace=True)
_NORMAL = MindSporeOp("normal_", "fill_normal", never_local, inplace=True)


def initialize(tensor: Any, initializer: Any) -> None:
    """Fill a DTensor with what the initializer would give of the global shape.

    Raises:
        PlanError: its values can't be drawn piece by piece.
    """
    fill = _FILL.get(type(initializer))
    if fill is None:
        known = ", ".join(sorted(kind.__name__ for kind in _FILL))
        raise PlanError(
            f"{type(initializer).__name__}() can't be drawn piece by piece; these can: {known}. Build the parameter of "
            f"shape {tuple(tensor.shape)} with its values and distribute it, or pass init_fn=."
        )
    fill(tensor, initializer)


def _uniform(tensor: Any, bound: float) -> None:
    tensor._dispatch(_UNIFORM, (tensor, -bound, bound), {})


def _normal(tensor: Any, mean: float, deviation: float) -> None:
    tensor._dispatch(_NORMAL, (tensor, mean, deviation), {})


def _constant(tensor: Any, value: float) -> None:
    shape, layout = tuple(tensor.shape), tensor.layout
    local = get_platform().tensors.full(layout.local_shape(shape), value, tensor.dtype, None)
    tensor.copy_(type(tensor).from_local(local, layout, shape=shape))


def _fans(tensor: Any) -> tuple[int, int]:
    """Inputs and outputs of one unit of a weight [outputs, inputs, ...]."""
    shape = tuple(tensor.shape)
    if len(shape) < 2:
        raise PlanError(f"Xavier's and He's initializers need a weight of at least two dims, not of shape {shape}.")
    window = math.prod(shape[2:])
    return shape[1] * window, shape[0] * window


def _xavier(tensor: Any, gain: float) -> float:
    fan_in, fan_out = _fans(tensor)
    return gain * math.sqrt(2.0 / (fan_in + fan_out))


def _he(tensor: Any, of: Any) -> float:
    """Deviation by He et al. 2015, for the nonlinearity that follows."""
    fan_in, fan_out = _fans(tensor)
    gains = {"relu": math.sqrt(2.0), "tanh": 5.0 / 3, "leaky_relu": math.sqrt(2.0 / (1 + of.negative_slope**2))}
    return gains.get(of.nonlinearity, 1.0) / math.sqrt(fan_in if of.mode == "fan_in" else fan_out)


_FILL: dict[type, Callable[[Any, Any], None]] = {
    ms_initializer.Zero: lambda t, _: _constant(t, 0.0),
    ms_initializer.One: lambda t, _: _constant(t, 1.0),
    ms_initializer.Constant: lambda t, of: _constant(t, of.value),
    ms_initializer.Uniform: lambda t, of: _uniform(t, of.scale),
    ms_initializer.Normal: lambda t, of: _normal(t, of.mean, of.sigma),
    ms_initializer.XavierUniform: lambda t, of: _uniform(t, math.sqrt(3.0) * _xavier(t, of.gain)),
    ms_initializer.XavierNormal: lambda t, of: _normal(t, 0.0, _xavier(t, of.gain)),
    ms_initializer.HeUniform: lambda t, of: _uniform(t, math.sqrt(3.0) * _he(t, of)),
    ms_initializer.HeNormal: lambda t, of: _normal(t, 0.0, _he(t, of)),
}
