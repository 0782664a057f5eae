"""Random ops: the same global values for every layout, from Philox by global index (`hp_core.random`).

An op whose random numbers can't be told element by element is refused: torch's own distributed ops draw them per rank,
so replicas or shards would silently disagree with the dense op.
"""

from __future__ import annotations

from typing import Any

from hp_core.errors import ShardingRuleError
from hp_core.platform import get_platform
from hp_core.random import random_like
from hp_core.rules.registry import rule

__all__: list[str] = []

_REFUSED = """
    multinomial poisson binomial exponential cauchy geometric log_normal random randint_like rrelu alpha_dropout
    feature_alpha_dropout feature_dropout dropout1d dropout2d dropout3d gumbel_softmax fractional_max_pool2d
"""


@rule("dropout", "input p training inplace", decomposed=True)
def _dropout(x, p=0.5, training=True, inplace=False):  # type: ignore[no-untyped-def]
    """Elements are kept with probability 1 - p and scaled by 1 / (1 - p), as the dense tensor's would be."""
    if not 0.0 <= p <= 1.0:
        raise ShardingRuleError(f"dropout: p={p} is not a probability.")
    if not training or p == 0.0:
        return x
    x = x.reduce_partial()
    keep = _random(x, "uniform", "float32") >= p
    factor = keep.to(x.dtype) * (0.0 if p == 1.0 else 1.0 / (1.0 - p))
    return x.mul_(factor) if inplace else x * factor


@rule("bernoulli", "input p generator", decomposed=True)
def _bernoulli(x, p=None, generator=None):  # type: ignore[no-untyped-def]
    """One with the probability that `x` (or `p`) says, else zero."""
    _refuse_generator(generator)
    x = x.reduce_partial()
    return (_random(x, "uniform", "float32") < (x if p is None else p)).to(x.dtype)


@rule("rand_like", "input dtype generator", decomposed=True)
def _rand_like(x, dtype=None, generator=None):  # type: ignore[no-untyped-def]
    """Uniform in [0, 1), of the shape and layout of `x`."""
    _refuse_generator(generator)
    return _random(x if dtype is None else x.to(dtype), "uniform")


@rule("randn_like", "input dtype generator", decomposed=True)
def _randn_like(x, dtype=None, generator=None):  # type: ignore[no-untyped-def]
    """Standard normal, of the shape and layout of `x`."""
    _refuse_generator(generator)
    return _random(x if dtype is None else x.to(dtype), "normal")


@rule("uniform", "input low high generator", decomposed=True, inplace=True)
def _uniform(x, low=0.0, high=1.0, generator=None):  # type: ignore[no-untyped-def]
    """Fill with numbers uniform in [low, high)."""
    _refuse_generator(generator)
    return x.copy_(_random(_writable(x), "uniform") * (high - low) + low)


@rule("normal", "input mean std generator", decomposed=True, inplace=True)
def _normal(x, mean=0.0, std=1.0, generator=None):  # type: ignore[no-untyped-def]
    """Fill with normal numbers."""
    _refuse_generator(generator)
    return x.copy_(_random(_writable(x), "normal") * std + mean)


@rule(_REFUSED, "input", decomposed=True, inplace=None)
def _refused(x, **_):  # type: ignore[no-untyped-def]
    raise ShardingRuleError(
        "this random op has no layout-independent rule: its numbers would differ from the dense op's and between replicas. "
        "Build it from dropout, bernoulli, rand_like or randn_like, or draw on .full_tensor() with one seed on all ranks."
    )


def _random(x: Any, kind: str, dtype: str | None = None) -> Any:
    """A random DTensor of the shape and layout of `x`."""
    tensors = get_platform().tensors
    element_type = x.dtype if dtype is None else tensors.dtype_of_name(dtype)
    layout, shape = x.layout.gradient, tuple(x.shape)
    device = tensors.device_type_of(x.to_local())
    local = random_like(tensors.full(layout.local_shape(shape), None, element_type, device), layout, shape, kind)
    return type(x).from_local(local, layout, shape=shape)


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
