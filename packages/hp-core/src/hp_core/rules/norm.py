"""Softmax and normalisations: the dims that are normalised over must be whole, all others may be cut."""

from __future__ import annotations

from hp_core.rules.registry import rule
from hp_core.rules.rule import PLAIN, OpCall, Operand, Output, Strategy, solve
from hp_core.rules.spec import TensorSpec

__all__: list[str] = []


@rule("softmax log_softmax softmin", "input dim dtype")
def _softmax(call: OpCall) -> Strategy:
    return _normalised(call, (call.dim(),))


@rule("glu", "input dim")
def _glu(call: OpCall) -> Strategy:
    return _normalised(call, (call.dim(default=-1),))


@rule("layer_norm rms_norm", "input normalized_shape weight bias eps")
def _layer_norm(call: OpCall) -> Strategy:
    """Weight and bias have the normalised dims only, so they are whole, too."""
    ndim = call.specs[0].ndim
    return _normalised(call, tuple(range(ndim - len(call.get("normalized_shape")), ndim)))


@rule("group_norm", "input num_groups weight bias eps")
def _group_norm(call: OpCall) -> Strategy:
    return _normalised(call, tuple(range(1, call.specs[0].ndim)))


def _normalised(call: OpCall, dims: tuple[int, ...]) -> Strategy:
    spec: TensorSpec = call.specs[0]
    labels = tuple(None if d in dims else d for d in range(spec.ndim))
    operands = [Operand(spec, labels, PLAIN)]
    operands += [Operand(other, (None,) * other.ndim, PLAIN) for other in call.specs[1:]]
    return solve(operands, [Output(labels)])
