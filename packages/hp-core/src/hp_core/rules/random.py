"""Random ops: the same global values for every layout, from Philox by global index (`hp_core.random`).

Whatever is a function of uniform or normal numbers, one set for each element, is here. What isn't is refused: torch's own
distributed ops draw per rank, so that replicas or shards would silently disagree with the dense op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import sqrt
from typing import Any

from hp_core.errors import ShardingRuleError
from hp_core.layout import Layout, intern
from hp_core.platform import get_platform
from hp_core.random import random_integers, random_like, random_mask
from hp_core.rules.registry import rule
from hp_core.rules.rule import Composite, OpCall

__all__: list[str] = []

_REFUSED = """
    poisson binomial fractional_max_pool2d fractional_max_pool2d_with_indices fractional_max_pool3d
    fractional_max_pool3d_with_indices
"""

_WHERE = "device layout pin_memory memory_format"
"""What `*_like` ops also take, and DTensors have their own of."""

# Of alpha dropout (Klambauer et al. 2017, "Self-normalizing neural networks"): where selu goes for large negative numbers.
_SELU_LIMIT = -1.7580993408473766


def _op(names: str, parameters: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the function computes these ops, and their in-place variants, from other ops on DTensors."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        rule(names, parameters, flat="as is")(lambda _: Composite(function))
        return function

    return register


# -- dropout --------------------------------------------------------------------------------------------------------


@_op("dropout", "input p training inplace")
def _dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Elements are kept with probability 1 - p and scaled by 1 / (1 - p), as the dense tensor's would be."""
    _check_probability(p)
    if not training or p == 0.0:
        return x
    x = x.reduce_partial()
    factor = _scaled_mask(_kept(x, x.layout.gradient, tuple(x.shape), p), x, p)
    return x.mul_(factor) if inplace else x * factor


@_op("feature_dropout", "input p training inplace")
def _feature_dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """[batch, channels, ...]: whole channels are dropped."""
    _check_probability(p)
    if not training or p == 0.0:
        return x
    x = x.reduce_partial()
    factor = _scaled_mask(_kept(x, *_channels(x), p), x, p)
    return x.mul_(factor) if inplace else x * factor


@_op("alpha_dropout", "input p training inplace")
def _alpha_dropout(x: Any, p: float = 0.5, training: bool = False, inplace: bool = False) -> Any:
    """What is dropped becomes selu's limit; then all is scaled and shifted to keep mean and variance."""
    return _alpha(x, p, training, inplace, lambda y: (y.layout.gradient, tuple(y.shape)))


@_op("feature_alpha_dropout", "input p training inplace")
def _feature_alpha_dropout(x: Any, p: float = 0.5, training: bool = False, inplace: bool = False) -> Any:
    """Alpha dropout of whole channels."""
    return _alpha(x, p, training, inplace, _channels)


def _alpha(x: Any, p: float, training: bool, inplace: bool, region: Callable[[Any], Any]) -> Any:
    _check_probability(p)
    if not training or p == 0.0:
        return x
    x = x.reduce_partial()
    if p == 1.0:
        return x.mul_(0.0) if inplace else x * 0.0
    layout, shape = region(x)
    kept = _kept(x, layout, shape, p).to(x.dtype)
    scale = 1.0 / sqrt((_SELU_LIMIT**2 * p + 1.0) * (1.0 - p))
    shift = (kept - 1.0) * (-_SELU_LIMIT * scale) - _SELU_LIMIT * scale * p
    return x.mul_(kept * scale).add_(shift) if inplace else x * (kept * scale) + shift


@_op("rrelu", "input lower upper training inplace")
def _rrelu(
    x: Any, lower: float = 1.0 / 8, upper: float = 1.0 / 3, training: bool = False, inplace: bool = False
) -> Any:
    """A negative element is scaled by a slope of its own, uniform in [lower, upper); when not training by their mean."""
    x = x.reduce_partial()
    if training:
        slope = _random(x, "uniform") * (upper - lower) + lower
        slope = slope.masked_fill(x.detach() > 0, 1.0)
        return x.mul_(slope) if inplace else x * slope
    result = get_platform().ops.local("leaky_relu")(x, (lower + upper) / 2)
    return x.copy_(result) if inplace else result


# -- random tensors of another's shape ------------------------------------------------------------------------------


@rule("bernoulli", "input p generator", flat="as is")
def _bernoulli(call: OpCall) -> Composite:
    """In place, fill with ones of probability p; else ones of the probability that `x` (or p, for each element) says."""
    return Composite(_fill_bernoulli if call.inplace else _draw_bernoulli)


def _fill_bernoulli(x: Any, p: Any = 0.5, generator: Any = None) -> Any:
    _refuse_generator(generator)
    return (_random(_writable(x), "uniform", "float32") < p).to(x.dtype)


def _draw_bernoulli(x: Any, p: Any = None, generator: Any = None) -> Any:
    _refuse_generator(generator)
    x = x.reduce_partial()
    return (_random(x, "uniform", "float32") < (x if p is None else p)).to(x.dtype)


@rule("rand_like", f"input dtype generator {_WHERE}", decomposed=True, flat="as is")
def _rand_like(x: Any, dtype: Any = None, generator: Any = None, **_: Any) -> Any:
    """Uniform in [0, 1), of the shape and layout of `x`."""
    _refuse_generator(generator)
    return _random(x, "uniform", dtype)


@rule("randn_like", f"input dtype generator {_WHERE}", decomposed=True, flat="as is")
def _randn_like(x: Any, dtype: Any = None, generator: Any = None, **_: Any) -> Any:
    """Standard normal, of the shape and layout of `x`."""
    _refuse_generator(generator)
    return _random(x, "normal", dtype)


@rule("randint_like", f"input low high dtype generator {_WHERE}", decomposed=True, flat="as is")
def _randint_like(x: Any, low: Any = None, high: Any = None, dtype: Any = None, generator: Any = None, **_: Any) -> Any:
    """Integers in [low, high), or in [0, high) if one bound is given."""
    _refuse_generator(generator)
    if low is None or high is None:
        low, high = 0, low if high is None else high
    return _integers(x, int(low), int(high), dtype)


@rule("normal", "mean std generator", decomposed=True, flat="as is")
def _normal_around(mean: Any, std: Any = 1.0, generator: Any = None, **_: Any) -> Any:
    """Normal numbers whose mean, deviation or both are tensors."""
    _refuse_generator(generator)
    of = mean if hasattr(mean, "layout") else std
    if of is mean and hasattr(std, "layout") and tuple(std.shape) != tuple(mean.shape):
        raise ShardingRuleError(
            f"normal: mean {tuple(mean.shape)} and std {tuple(std.shape)} must have the same shape."
        )
    return _random(of, "normal") * std + mean


@rule("multinomial", "input num_samples replacement generator", decomposed=True)
def _multinomial(x: Any, num_samples: int, replacement: bool = False, generator: Any = None) -> Any:
    """Indices drawn with the probabilities that the rows say: of exponential races, or by the inverse distribution.

    Without replacement the `num_samples` smallest of exponential numbers divided by the weights win (Efraimidis and
    Spirakis 2006, "Weighted random sampling with a reservoir"), which is drawing one after the other.
    """
    _refuse_generator(generator)
    x = x.reduce_partial()
    if not replacement:
        return (x / _random(x, "exponential", None, 1.0)).topk(num_samples, -1)[1]
    cumulated = x.cumsum(-1)
    cumulated = cumulated / cumulated[..., -1:]
    rows = intern(cumulated.device_mesh, cumulated.layout.dim_axes[: x.ndim - 1], (), cumulated.layout.ragged)
    drawn = _filled(x, rows, (*x.shape[:-1], num_samples), None, partial(random_like, kind="uniform"))
    return get_platform().ops.local("searchsorted")(cumulated, drawn, right=True)


# -- filling in place -----------------------------------------------------------------------------------------------


@rule("uniform", "input low high generator", decomposed=True, inplace=True, flat="as is")
def _uniform(x: Any, low: float = 0.0, high: float = 1.0, generator: Any = None) -> Any:
    """Fill with numbers uniform in [low, high)."""
    _refuse_generator(generator)
    return x.copy_(_random(_writable(x), "uniform") * (high - low) + low)


@rule("fill_normal", "input mean std generator", decomposed=True, inplace=True, flat="as is")
def _normal(x: Any, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> Any:
    """Fill with normal numbers."""
    _refuse_generator(generator)
    return x.copy_(_random(_writable(x), "normal") * std + mean)


@rule("exponential", "input lambd generator", decomposed=True, inplace=True, flat="as is")
def _exponential(x: Any, lambd: float = 1.0, generator: Any = None) -> Any:
    """Fill with exponential numbers of rate `lambd`, never 0."""
    _refuse_generator(generator)
    if lambd <= 0:
        raise ShardingRuleError(f"exponential_: the rate must be positive, got {lambd}.")
    return x.copy_(_random(_writable(x), "exponential", None, lambd))


@rule("cauchy", "input median sigma generator", decomposed=True, inplace=True, flat="as is")
def _cauchy(x: Any, median: float = 0.0, sigma: float = 1.0, generator: Any = None) -> Any:
    """Fill with Cauchy numbers."""
    _refuse_generator(generator)
    return x.copy_(_random(_writable(x), "cauchy", None, median, sigma))


@rule("log_normal", "input mean std generator", decomposed=True, inplace=True, flat="as is")
def _log_normal(x: Any, mean: float = 1.0, std: float = 2.0, generator: Any = None) -> Any:
    """Fill with numbers whose logarithm is normal."""
    _refuse_generator(generator)
    return x.copy_(_random(_writable(x), "log_normal", None, mean, std))


@rule("geometric", "input p generator", decomposed=True, inplace=True, flat="as is")
def _geometric(x: Any, p: float, generator: Any = None) -> Any:
    """Fill with the number of trials to the first success."""
    _refuse_generator(generator)
    return x.copy_(_random(_writable(x), "geometric", None, p))


@rule("random", "input from to generator", decomposed=True, inplace=True, flat="as is")
def _random_in_place(x: Any, generator: Any = None, **bounds: Any) -> Any:
    """Fill with integers: `random_()`, `random_(to)` or `random_(from, to)`; exact in every element type."""
    _refuse_generator(generator)
    first, second = bounds.get("from"), bounds.get("to")
    tensors = get_platform().tensors
    low, high = (first, second) if second is not None else (0, first)
    if "to" in bounds and second is None and first is not None:  # random_(from, None): to the end
        low, high = first, None
    end = _end_of(tensors.dtype_name(x.dtype))
    return x.copy_(_integers(_writable(x), int(low or 0), end if high is None else int(high)))


@rule(_REFUSED, "input", decomposed=True, inplace=None)
def _refused(x: Any, **_: Any) -> Any:
    raise ShardingRuleError(
        "this random op has no layout-independent rule: how many numbers an element takes depends on its value, or torch draws "
        "them itself. Build it from dropout, bernoulli, rand_like or randn_like, or draw on .full_tensor() with one seed on all "
        "ranks."
    )


# -- what they share ------------------------------------------------------------------------------------------------


def _random(x: Any, kind: str, dtype: Any = None, *parameters: float) -> Any:
    """A random DTensor of the shape and layout of `x`."""
    draw = partial(_draw, kind, parameters)
    return _filled(x, x.layout.gradient, tuple(x.shape), dtype, draw)


def _draw(kind: str, parameters: Sequence[float], empty: Any, layout: Layout, shape: tuple[int, ...]) -> Any:
    return random_like(empty, layout, shape, kind, *parameters)


def _integers(x: Any, low: int, high: int, dtype: Any = None) -> Any:
    draw = partial(random_integers, low=low, high=high)
    return _filled(x, x.layout.gradient, tuple(x.shape), dtype, draw)


def _filled(x: Any, layout: Layout, shape: tuple[int, ...], dtype: Any, draw: Callable[..., Any]) -> Any:
    """A new DTensor like `x` in all that isn't said, filled by `draw`."""
    tensors = get_platform().tensors
    element_type = tensors.dtype_of_name(dtype) if isinstance(dtype, str) else dtype or x.dtype
    empty = tensors.full(layout.local_shape(shape), None, element_type, tensors.device_type_of(x.to_local()))
    return type(x).from_local(draw(empty, layout, shape), layout, shape=shape)


def _kept(x: Any, layout: Layout, shape: tuple[int, ...], p: float) -> Any:
    """Which elements (or channels) of x stay."""
    return _filled(x, layout, shape, "bool", partial(random_mask, p=p))


def _scaled_mask(kept: Any, x: Any, p: float) -> Any:
    return kept.to(x.dtype) * (0.0 if p == 1.0 else 1.0 / (1.0 - p))


def _channels(x: Any) -> tuple[Layout, tuple[int, ...]]:
    """Layout and shape of one number for each channel of [batch, channels, ...]."""
    if x.ndim < 2:
        raise ShardingRuleError(f"feature dropout takes [batch, channels, ...], got shape {tuple(x.shape)}.")
    layout = intern(x.device_mesh, x.layout.dim_axes[:2], (), x.layout.ragged)
    return layout, (*x.shape[:2], *[1] * (x.ndim - 2))


def _end_of(dtype: str) -> int:
    """One past the greatest integer that `random_()` draws: all that the type has, or that it holds exactly."""
    exact = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
    if dtype in exact:
        return (1 << exact[dtype]) + 1
    if dtype == "bool":
        return 2
    bits = int(dtype.removeprefix("u").removeprefix("int"))
    return 1 << (bits if dtype.startswith("u") else bits - 1)


def _check_probability(p: float) -> None:
    if not 0.0 <= p <= 1.0:
        raise ShardingRuleError(f"dropout: p={p} is not a probability.")


def _refuse_generator(generator: Any) -> None:
    if generator is not None:
        raise ShardingRuleError(
            "a framework's generator draws per rank, so it can't serve a DTensor; leave it out and use hp_core.manual_seed()."
        )


def _writable(x: Any) -> Any:
    if x.is_partial():
        raise ShardingRuleError(
            f"a tensor with a pending reduction ({x.layout}) can't be filled in place; redistribute it first."
        )
    return x
