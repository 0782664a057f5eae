"""Softmax and normalisations. With the normalised dims whole: one local call. With one of them cut: sums over the ranks.

What is sent has the shape of the statistics, never of the input: two all-reduces forward and one backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

from hp_core.layout import intern
from hp_core.platform import get_platform
from hp_core.rules.pieces import has_empty_piece, is_cut
from hp_core.rules.reduce import central_moments, is_narrow, reduced_together, widened
from hp_core.rules.registry import rule
from hp_core.rules.rule import PLAIN, Composite, OpCall, Operand, Output, Strategy, solve
from hp_core.rules.spec import TensorSpec, spec_of

__all__: list[str] = []

_EPSILON = {2: 2.0**-10, 4: 2.0**-23, 8: 2.0**-52}


# -- softmax --------------------------------------------------------------------------------------------------------


@rule("softmax log_softmax softmin", "input dim dtype _stacklevel")
def _softmax(call: OpCall) -> Strategy | Composite:
    dim = call.dim()
    if is_cut(call.specs[0], (dim,)):
        return Composite(partial(_softmax_of_cut, name=call.name))
    return _normalised(call, (dim,))


def _softmax_of_cut(x: Any, dim: int, dtype: Any = None, _stacklevel: int = 3, *, name: str) -> Any:
    """Of x - max(x), which changes nothing but keeps the exponentials finite; the maximum needs no gradient."""
    given = x if dtype is None else x.to(dtype)
    x = widened(given).reduce_partial()
    if name == "softmin":
        x = -x
    shifted = x - x.detach().amax(dim, True)
    exponentials = shifted.exp()
    total = exponentials.sum(dim, True)
    result = shifted - total.log() if name == "log_softmax" else exponentials / total
    return result.to(given.dtype) if is_narrow(given) else result


@rule("glu", "input dim")
def _glu(call: OpCall) -> Strategy:
    """Halves of one dim meet, so it must be whole."""
    return _normalised(call, (call.dim(default=-1),))


# -- layer, RMS and group normalisation -------------------------------------------------------------------------------


@rule("layer_norm", "input normalized_shape weight bias eps")
@rule("rms_norm", "input normalized_shape weight eps")
def _layer_norm(call: OpCall) -> Strategy | Composite:
    """Weight and bias have the normalised dims only, so they are cut as these are."""
    ndim = call.specs[0].ndim
    dims = tuple(range(ndim - len(call.get("normalized_shape")), ndim))
    if not is_cut(call.specs[0], dims):
        return _normalised(call, dims)
    return Composite(_layer_norm_of_cut if call.name == "layer_norm" else _rms_norm_of_cut)


def _layer_norm_of_cut(
    x: Any, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    dims = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    return _scaled(_standardized(x, dims, eps)[0], weight, bias).to(x.dtype)


def _rms_norm_of_cut(x: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Any:
    dims = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    wide = widened(x).reduce_partial()
    if eps is None:
        eps = _EPSILON[get_platform().tensors.itemsize(wide.dtype)]
    return _scaled(wide * ((wide * wide).mean(dims, True) + eps).rsqrt(), weight, None).to(x.dtype)


@rule("group_norm", "input num_groups weight bias eps")
def _group_norm(call: OpCall) -> Strategy | Composite:
    dims = tuple(range(1, call.specs[0].ndim))
    return Composite(_group_norm_of_cut) if is_cut(call.specs[0], dims) else _normalised(call, dims)


def _group_norm_of_cut(x: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    """Sums per channel first; only these, [batch, channels], are put together to groups."""
    wide = widened(x).reduce_partial()
    batch, channels = wide.shape[:2]
    rest = tuple(range(2, x.ndim))
    size = channels // num_groups
    column = (batch, channels, *(1 for _ in rest))
    count = size * prod(wide.shape[d] for d in rest)

    def of_group(totals: Any) -> Any:
        """The sum of each channel's group, at each channel."""
        grouped = totals.reshape((batch, num_groups, size)).sum(2, True)
        return grouped.expand((batch, num_groups, size)).reshape(column)

    def per_channel(values: Any) -> Any:
        return values.sum(rest) if rest else values

    mean = of_group(per_channel(wide).reduce_partial()) / count
    deviation = wide - mean.detach()
    squares, excess = (
        of_group(total) for total in reduced_together(per_channel(deviation * deviation), per_channel(deviation))
    )
    variance = (squares - excess * excess / count) / count
    result = _with_statistics(wide, mean, (variance + eps).rsqrt())
    return _scaled(result, _per_channel(weight, x.ndim), _per_channel(bias, x.ndim)).to(x.dtype)


# -- batch and instance normalisation ---------------------------------------------------------------------------------


@rule("batch_norm", "input running_mean running_var weight bias training momentum eps", flat="as is")
def _batch_norm(call: OpCall) -> Strategy | Composite:
    """Statistics over all samples of all ranks; the running ones are updated alike."""
    if not call.get("training", False):
        return _per_channel_strategy(call, ())
    # with the channels cut the local op would update a cut copy of the running statistics
    if any(spec.layout.active_axes for spec in call.specs):
        return Composite(_batch_norm_of_cut)
    return _per_channel_strategy(call, tuple(d for d in range(call.specs[0].ndim) if d != 1))


def _batch_norm_of_cut(
    x: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    dims = tuple(d for d in range(x.ndim) if d != 1)
    result, mean, squares, count = _standardized(x, dims, eps)
    _update(running_mean, mean.detach().reshape((x.shape[1],)), momentum)
    _update(running_var, squares.detach().reshape((x.shape[1],)) / max(count - 1, 1), momentum)
    return _scaled(result, _per_channel(weight, x.ndim), _per_channel(bias, x.ndim)).to(x.dtype)


@rule("instance_norm", "input running_mean running_var weight bias use_input_stats momentum eps", flat="as is")
def _instance_norm(call: OpCall) -> Strategy | Composite:
    """Statistics of each channel of each sample; the running ones are their means over the samples."""
    spec = call.specs[0]
    if not call.get("use_input_stats", True):
        return _per_channel_strategy(call, ())
    dims = tuple(range(2, spec.ndim))
    tracked = isinstance(call.get("running_mean"), TensorSpec)
    if is_cut(spec, dims) or (tracked and any(other.layout.active_axes for other in call.specs)):
        return Composite(_instance_norm_of_cut)
    return _per_channel_strategy(call, dims)


def _instance_norm_of_cut(
    x: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    dims = tuple(range(2, x.ndim))
    result, mean, squares, count = _standardized(x, dims, eps)
    samples = tuple(x.shape[:2])
    _update(running_mean, mean.detach().reshape(samples).mean(0), momentum)
    _update(running_var, squares.detach().reshape(samples).mean(0) / max(count - 1, 1), momentum)
    return _scaled(result, _per_channel(weight, x.ndim), _per_channel(bias, x.ndim)).to(x.dtype)


@rule("local_response_norm", "input size alpha beta k", sees_floats=True)
def _local_response_norm(call: OpCall) -> Strategy:
    """Neighbouring channels meet, so these must be whole."""
    return _normalised(call, (1,))


# -- shared -----------------------------------------------------------------------------------------------------------


def _standardized(x: Any, dims: tuple[int, ...], eps: float) -> tuple[Any, Any, Any, int]:
    """(x - mean) / sqrt(variance + eps); with it the mean, the sum of squared deviations, and how many these are of."""
    wide = widened(x).reduce_partial()
    mean, squares, count = central_moments(wide, dims, True)
    return _with_statistics(wide, mean, (squares / max(count, 1) + eps).rsqrt()), mean, squares, count


def _with_statistics(x: Any, mean: Any, scale: Any) -> Any:
    platform_op = get_platform().ops.local
    return platform_op("standardized")(x, platform_op("stack")([mean, scale], 0))


@rule("standardized", "input statistics")
def _with_statistics_rule(call: OpCall) -> Strategy:
    """Of x and two statistics, stacked, that broadcast to it."""
    spec, statistics = call.specs
    labels = tuple(range(spec.ndim))
    own = (d if size == spec.shape[d] else None for d, size in enumerate(statistics.shape[1:]))
    return solve([Operand(spec, labels, PLAIN), Operand(statistics, (None, *own), PLAIN)], [Output(labels)])


def _scaled(x: Any, weight: Any, bias: Any) -> Any:
    if weight is not None:
        x = x * weight
    return x if bias is None else x + bias


def _per_channel(values: Any, ndim: int) -> Any:
    return None if values is None else values.reshape((1, values.shape[0], *(1 for _ in range(ndim - 2))))


def _update(running: Any, value: Any, momentum: float) -> None:
    if running is not None:
        running.mul_(1 - momentum).add_((value * momentum).to(running.dtype))


def _normalised(call: OpCall, dims: tuple[int, ...]) -> Strategy:
    spec: TensorSpec = call.specs[0]
    labels = tuple(None if d in dims else d for d in range(spec.ndim))
    operands = [Operand(spec, labels, PLAIN)]
    operands += [Operand(other, (None,) * other.ndim, PLAIN) for other in call.specs[1:]]
    return solve(operands, [Output(labels)])


def _per_channel_strategy(call: OpCall, dims: tuple[int, ...]) -> Strategy:
    """The op itself, with `dims` whole; weights and statistics have one element per channel (dim 1).

    torch's backward fails on pieces without samples or channels, so no rank may have an empty one.
    """
    spec: TensorSpec = call.specs[0]
    labels = tuple(None if d in dims or has_empty_piece(spec, d) else d for d in range(spec.ndim))
    operands = [Operand(spec, labels, PLAIN)]
    operands += [Operand(other, (labels[1],), PLAIN) for other in call.specs[1:]]

    def all_have_some(label: Any, axes: tuple[int, ...]) -> bool:
        one_dim = spec_of(intern(spec.layout.mesh, (axes,)), (spec.shape[label],), spec.dtype)
        return not has_empty_piece(one_dim, 0)

    return solve(operands, [Output(labels)], aligned=all_have_some)
