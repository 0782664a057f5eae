"""Samples of random ops; what one process draws is the reference."""

from __future__ import annotations

from hp_core.platform.protocol import OpSample
from hp_core.platform.torch.op_samples.calls import calls, each

__all__ = ["SAMPLES"]

SAMPLES: list[OpSample] = [
    *calls("dropout", "F.dropout(x, 0.4); F.dropout(x, 0.4, training=False)", "5x3; 4x6; -", draws=True),
    *calls("dropout", "F.dropout(x.clone(), 0.4, inplace=True)", "5x3", inplace=True, draws=True),
    *calls("bernoulli", "torch.bernoulli(x.detach())", "u:5x3", draws=True),
    *each("rand_like randn_like", "torch.OP(x)", "5x3; h:5x3", draws=True),
    *each("rand_like randn_like", "torch.OP(x, dtype=torch.float64)", "s:5x3", draws=True),
    *calls("uniform", "filled(x, 'uniform_', -1, 2)", "5x3", inplace=True, draws=True),
    *calls("dropout", "torch.dropout_(x.clone(), 0.4, True)", "5x3", inplace=True, draws=True),
    *calls("alpha_dropout", "F.alpha_dropout(x, 0.4, training=True)", "5x3", draws=True),
    *calls("alpha_dropout", "F.alpha_dropout(x.clone(), 0.4, True, inplace=True)", "5x3", inplace=True, draws=True),
    *calls("feature_dropout", "F.dropout2d(x, 0.4)", "3x4x2x2", draws=True),
    *calls("feature_dropout", "torch.feature_dropout_(x.clone(), 0.4, True)", "3x4x2", inplace=True, draws=True),
    *calls("feature_alpha_dropout", "F.feature_alpha_dropout(x, 0.4, training=True)", "3x4x2", draws=True),
    *calls(
        "feature_alpha_dropout",
        "torch.feature_alpha_dropout_(x.clone(), 0.4, True)",
        "3x4x2",
        inplace=True,
        draws=True,
    ),
    *calls("rrelu", "F.rrelu(x, 0.1, 0.3, training=True); F.rrelu(x, 0.1, 0.3)", "5x3", draws=True),
    *calls("rrelu", "F.rrelu(x.clone(), 0.1, 0.3, True, inplace=True)", "5x3", inplace=True, draws=True),
    *calls("bernoulli", "filled(x, 'bernoulli_', 0.3)", "5x3", inplace=True, draws=True),
    *calls("randint_like", "torch.randint_like(x, 9); torch.randint_like(x, -3, 9)", "5x3", draws=True),
    *calls("multinomial", "torch.multinomial(x.detach(), 3)", "u:5x4", draws=True),
    *calls("fill_normal", "filled(x, 'normal_', 3, 0.5)", "5x3", inplace=True, draws=True),
    *calls("normal", "torch.normal(x.detach(), 0.5); torch.normal(2.0, x.detach())", "p:5x3", draws=True),
    *calls("exponential", "filled(x, 'exponential_', 2.0)", "5x3", inplace=True, draws=True),
    *calls("cauchy", "filled(x, 'cauchy_', 1.0, 0.5)", "5x3", inplace=True, draws=True),
    *calls("log_normal", "filled(x, 'log_normal_', 0.5, 0.25)", "5x3", inplace=True, draws=True),
    *calls("geometric", "filled(x, 'geometric_', 0.2)", "5x3", inplace=True, draws=True),
    *calls("random", "filled(x, 'random_', -3, 6)", "i9:5x3", inplace=True, draws=True),
    # refused
    *calls("poisson", "torch.poisson(x)", "p:5x3", draws=True),
    *calls("binomial", "torch.binomial(x, x)", "u:5x3", draws=True),
    *each("fractional_max_pool2d", "F.OP(x, 2, output_size=2)", "2x3x4x4", draws=True),
    *each("fractional_max_pool3d", "F.OP(x, 2, output_size=2)", "1x2x4x4x4", draws=True),
    *calls(
        "fractional_max_pool2d_with_indices",
        "F.fractional_max_pool2d(x, 2, output_size=2, return_indices=True)",
        "2x3x4x4",
        draws=True,
    ),
    *calls(
        "fractional_max_pool3d_with_indices",
        "F.fractional_max_pool3d(x, 2, output_size=2, return_indices=True)",
        "1x2x4x4x4",
        draws=True,
    ),
]
