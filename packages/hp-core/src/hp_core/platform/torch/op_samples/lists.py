"""Samples of ops on lists of tensors, as optimizers use them."""

from __future__ import annotations

from hp_core.platform.protocol import OpSample
from hp_core.platform.torch.op_samples.calls import calls, each

__all__ = ["SAMPLES"]

TWO, FOUR = "u:5x3 u:4", "n:5x3 n:4 n:5x3 n:4"
UNARY = """
    _foreach_abs _foreach_exp _foreach_log _foreach_sqrt _foreach_rsqrt _foreach_reciprocal _foreach_sign _foreach_neg
    _foreach_round _foreach_floor _foreach_ceil _foreach_trunc _foreach_sigmoid _foreach_tanh _foreach_erf _foreach_erfc
    _foreach_expm1 _foreach_log10 _foreach_log1p _foreach_log2 _foreach_frac _foreach_lgamma _foreach_acos _foreach_asin
    _foreach_atan _foreach_cos _foreach_cosh _foreach_sin _foreach_sinh _foreach_tan
"""
BINARY = """
    _foreach_add _foreach_sub _foreach_mul _foreach_div _foreach_maximum _foreach_minimum _foreach_clamp_max _foreach_clamp_min
"""

SAMPLES: list[OpSample] = [
    *each(UNARY, "torch.OP([x, y])", TWO),
    *each(UNARY + " _foreach_zero", "changed(torch.OP_, [x, y])", TWO, inplace=True),
    *each(BINARY, "torch.OP([x, y], [z, w])", FOUR),
    *each(BINARY, "torch.OP([x, y], 0.5)", TWO),
    *each(BINARY, "changed(torch.OP_, [x, y], [z, w])", FOUR, inplace=True),
    *calls("_foreach_add", "torch._foreach_add([x, y], [z, w], alpha=0.5)", FOUR),
    *calls("_foreach_mul", "changed(torch._foreach_mul_, [x, y], 0.5)", TWO, inplace=True),
    *calls("_foreach_mul", "changed(torch._foreach_mul_, [x, y], [0.5, 2.0])", TWO, inplace=True),
    *calls("_foreach_mul", "changed(torch._foreach_mul_, [x, y], z.detach())", TWO + " n:-", inplace=True),
    *calls("_foreach_pow", "torch._foreach_pow([x, y], 2.0); torch._foreach_pow([x, y], [y, y])", "p:5x3 p:3"),
    *calls("_foreach_pow", "changed(torch._foreach_pow_, [x, y], 2.0)", TWO, inplace=True),
    *calls("_foreach_copy", "changed(torch._foreach_copy_, [x, y], [z, w])", FOUR, inplace=True),
    *calls("_foreach_lerp", "torch._foreach_lerp([x, y], [z, w], 0.3)", FOUR),
    *calls("_foreach_lerp", "changed(torch._foreach_lerp_, [x, y], [z, w], 0.3)", FOUR, inplace=True),
    *each("_foreach_addcmul _foreach_addcdiv", "torch.OP([x, y], [z, w], [z, w], 0.3)", FOUR),
    *each(
        "_foreach_addcmul _foreach_addcdiv",
        "changed(torch.OP_, [x, y], [z, w], [z, w], 0.3)",
        FOUR,
        inplace=True,
    ),
    *each("_foreach_clone _foreach_max", "torch.OP([x, y])", TWO),
    *calls("_foreach_mm", "torch._foreach_mm([x, y], [z, w])", "5x3 2x4 3x2 4x3"),
    *calls("_fused_adagrad", "adagrad_step(x, y)", "n:5x3 n:5x3", inplace=True),
    *calls("_foreach_norm", "torch._foreach_norm([x, y]); torch._foreach_norm([x, y], 1)", TWO),
    *each("_fused_adam _fused_adamw", "adam_step(torch.OP_, x, y)", "n:5x3 n:5x3", inplace=True),
    *calls("_fused_sgd", "sgd_step(x, y)", "n:5x3 n:5x3", inplace=True),
]
