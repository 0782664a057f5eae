"""Elementwise ops, broadcasting, scalars, casts and in-place writes, in every layout, against dense.

See `conftest.py` for how a case is read and what is compared.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

RANKS = pytest.mark.parametrize("ranks", [2, 4])

UNARY = {
    F: "relu relu6 gelu silu mish logsigmoid hardsigmoid hardswish hardtanh tanhshrink softplus softsign elu selu celu leaky_relu",
    torch: (
        "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square abs reciprocal sin cos tan asin acos atan sinh cosh asinh "
        "atanh erf erfc erfinv lgamma digamma sign sgn floor ceil round trunc frac isnan isinf isfinite signbit sigmoid "
        "tanh logical_not deg2rad rad2deg sinc logit neg positive clone absolute"
    ),
}
BINARY = "add sub mul div pow maximum minimum fmax fmin atan2 hypot copysign xlogy logaddexp eq ne lt le gt ge remainder fmod"
SPECIAL = {
    "u:5x3": "entr erfcx i0 i0e i1 i1e ndtr ndtri log_ndtr gammaln psi expit log1p exp2",
    "n:5x3": "airy_ai bessel_j0 bessel_j1 modified_bessel_i0 modified_bessel_i1 spherical_bessel_j0",
    "p:5x3 n:3": "xlog1py xlogy",
    "n:5x3 i4:3": "chebyshev_polynomial_t hermite_polynomial_h laguerre_polynomial_l legendre_polynomial_p",
}
SHAPES = "p:5x3 p:5x3;p:5x3 p:3;p:3 p:4x3;p:5x1 p:1x3;p:2x1x3 p:4x1;p:5x3 p:-;p:1 p:5x3"


def named(module: object, names: str, operands: str) -> list[tuple[str, Callable[..., object], str]]:
    return [(name, getattr(module, name), operands) for name in names.split()]


@RANKS
def test_unary(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(ranks, [*named(F, UNARY[F], "5x3"), *named(torch, UNARY[torch], "u:5x3")], most=4)


@RANKS
def test_unary_on_scalars_and_other_sizes(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("relu", lambda x: x.relu(), "-;1;4;5;1x3;2x4x3"),
            ("neg", lambda x: -x, "-;1;4;5;1x3;2x4x3"),
            ("abs", lambda x: abs(x), "5x3"),
            ("clamp", lambda x: x.clamp(-0.3, 0.4), "5x3"),
            ("clamp keywords", lambda x: x.clamp(min=-0.3), "5x3"),
            ("clamp by tensors", lambda x, low, high: torch.clamp(x, low, high), "5x3 f:3 p:5x3"),
            ("clip", lambda x: x.clip(max=0.2), "5x3"),
            ("gelu tanh", lambda x: F.gelu(x, approximate="tanh"), "5x3"),
            ("round decimals", lambda x: x.round(decimals=1), "5x3"),
            ("nan_to_num", lambda x: x.log().nan_to_num(0.5), "p:5x3"),
            ("threshold", lambda x: F.threshold(x, 0.1, 0.5), "5x3"),
            ("softplus", lambda x: F.softplus(x, beta=2.0), "5x3"),
            ("contiguous", lambda x: x.contiguous(), "5x3"),
        ],
    )


@RANKS
def test_special_functions(check_ops: Callable[..., None], ranks: int) -> None:
    for operands, names in SPECIAL.items():
        check_ops(ranks, named(torch.special, names, operands), most=4)
    check_ops(
        ranks,
        [
            ("polygamma", lambda x: torch.polygamma(1, x), "p:5x3"),
            ("multigammaln", lambda x: torch.special.multigammaln(x + 2, 2), "p:5x3"),
            ("zeta", lambda x, y: torch.special.zeta(x.detach() + 2, y.detach()), "p:5x3 p:3"),
            ("zeta of a number", lambda y: torch.special.zeta(2.0, y.detach()), "p:5x3"),
            ("gammainc", lambda x, y: torch.special.gammainc(x.detach(), y), "p:5x3 p:3"),
            ("ldexp", lambda x, y: torch.ldexp(x, y), "5x3 i4:3"),
            ("float_power", lambda x: (torch.float_power(x, 2), torch.float_power(2, x)), "p:5x3"),
            ("gcd and lcm", lambda x, y: (torch.gcd(x, y), torch.lcm(x, y)), "i9:5x3 i9:3"),
            ("frexp", lambda x: torch.frexp(x), "n:5x3"),
            ("isreal", lambda x: (torch.isreal(x), x.isposinf(), x.isneginf()), "n:5x3"),
            ("prelu", lambda x, w: F.prelu(x, w), "4x3x2 3;4x3 1;5 1;4x3x2 -"),
            ("isin", lambda x, y: torch.isin(x, y), "i9:5x3 i9:4"),
            ("isin a number", lambda x: torch.isin(x, 3, invert=True), "i9:5x3"),
        ],
        most=10,
    )


@RANKS
def test_complex_numbers(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("complex", lambda x, y: torch.view_as_real(torch.complex(x, y) * 2), "5x3 5x3"),
            ("polar", lambda x, y: torch.view_as_real(torch.polar(x, y)), "p:5x3 5x3"),
            ("parts", lambda x, y: (torch.complex(x, y).real, torch.complex(x, y).imag), "5x3 5x3"),
            ("conj", lambda x, y: torch.view_as_real(torch.complex(x, y).conj().resolve_conj()), "5x3 5x3"),
            ("abs and angle", lambda x, y: (torch.complex(x, y).abs(), torch.complex(x, y).angle()), "p:5x3 p:5x3"),
            ("view_as_complex", lambda x: torch.view_as_complex(x).abs(), "5x3x2"),
        ],
        most=24 if ranks == 2 else 10,
    )


@RANKS
def test_binary_and_broadcasting(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(ranks, named(operator, "add sub mul truediv", SHAPES))
    check_ops(ranks, named(torch, BINARY, "p:5x3 p:3;p:5x1 p:1x3"), most=6)


@RANKS
def test_operators(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("pow", lambda x, y: x**y, "p:5x3 p:3"),
            ("add alpha", lambda x, y: torch.add(x, y, alpha=3), "5x3 3"),
            ("sub alpha", lambda x, y: torch.sub(x, y, alpha=0.5), "5x3 3"),
            ("rsub", lambda x, y: torch.rsub(x, y, alpha=2), "5x3 5x3"),
            ("same operand twice", lambda x: x * x + x, "5x3"),
            ("three terms", lambda x, y, z: x * y + z, "5x3 3 5x3"),
            ("div rounded", lambda x, y: torch.div(x, y, rounding_mode="floor"), "5x3 p:5x3"),
            ("floor_divide", lambda x, y: x // y, "n:5x3 n:5x3"),
            ("remainder", lambda x, y: x % y, "n:5x3 p:5x3"),
            ("isclose", lambda x, y: torch.isclose(x, y, rtol=0.5), "5x3 5x3"),
            ("compare", lambda x, y: (x > y, x <= y, x == y, x != y), "5x3 3"),
        ],
    )


@RANKS
def test_numbers_on_both_sides(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("x+2", lambda x: x + 2, "5x3;-"),
            ("2+x", lambda x: 2 + x, "5x3"),
            ("x-1.5", lambda x: x - 1.5, "5x3"),
            ("1.5-x", lambda x: 1.5 - x, "5x3"),
            ("x*2.5", lambda x: x * 2.5, "5x3;-"),
            ("2.5*x", lambda x: 2.5 * x, "5x3"),
            ("x/3", lambda x: x / 3, "5x3"),
            ("3/x", lambda x: 3 / x, "p:5x3"),
            ("x//0.3", lambda x: x // 0.3, "n:5x3"),
            ("1//x", lambda x: 1 // x, "n:5x3"),
            ("x%0.3", lambda x: x % 0.3, "n:5x3"),
            ("1%x", lambda x: 1 % x, "n:5x3"),
            ("x**2", lambda x: x**2, "5x3"),
            ("2**x", lambda x: 2**x, "5x3"),
            ("x>0", lambda x: (x > 0, x < 0, x == 0), "5x3"),
            ("0-d plain tensor", lambda x: x * torch.tensor(2.0, dtype=torch.float64), "5x3"),
            ("numbers by keyword", lambda x: torch.mul(input=x, other=3.0), "5x3"),
        ],
    )


@RANKS
def test_ternary(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("where", lambda c, x, y: torch.where(c, x, y), "b:5x3 5x3 3"),
            ("where broadcast", lambda c, x, y: torch.where(c, x, y), "b:5x1 1x3 5x3"),
            ("where number", lambda c, x: torch.where(c, x, 0.5), "b:5x3 5x3"),
            ("where number first", lambda c, x: torch.where(c, 0.5, x), "b:5x3 5x3"),
            ("where method", lambda x, c, y: x.where(c, y), "5x3 b:5x3 5x3"),
            ("masked_fill", lambda x, m: x.masked_fill(m, 0.5), "5x3 b:5x3;5x3 b:3;4x6 b:4x1"),
            ("masked_fill -inf", lambda x, m: x.masked_fill(m, float("-inf")).exp(), "5x3 b:5x3"),
            ("addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=0.5), "5x3 5x3 3"),
            ("addcdiv", lambda x, y, z: torch.addcdiv(x, y, z, value=0.5), "5x3 5x3 p:3"),
            ("lerp", lambda x, y: torch.lerp(x, y, 0.3), "5x3 3"),
            ("lerp weight", lambda x, y, w: torch.lerp(x, y, w), "5x3 5x3 3"),
        ],
    )


@RANKS
def test_integers_and_bools(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("bitwise", lambda x, y: (x & y, x | y, x ^ y, ~x), "i9:5x3 i9:3"),
            ("shift", lambda x, y: (x << y, x >> y), "i9:5x3 i3:3"),
            ("bool", lambda x, y: (x & y, x | y, ~x, torch.logical_xor(x, y)), "b:5x3 b:3"),
            ("integers", lambda x, y: (x + y, x * y, x - 2, x // 2, x / 2), "i9:5x3 i9:3"),
            ("mixed", lambda x, y: x * y, "5x3 i9:3"),
            ("mask", lambda x, m: x * m, "5x3 b:5x3"),
        ],
    )


@RANKS
def test_casts(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("to same", lambda x: x.to(torch.float64), "5x3"),
            ("to keyword", lambda x: x.to(dtype=torch.float64), "5x3"),
            ("double", lambda x: x.double(), "5x3"),
            ("float and back", lambda x: x.float().double(), "n:5x3"),
            ("bytes", lambda x: (x.byte(), x.char(), x.short(), x.half().double()), "i9:5x3"),
            ("to complex", lambda x: torch.view_as_real(x.cdouble()), "5x3"),
            ("cpu", lambda x: x.cpu(), "5x3"),
            ("double of int", lambda x: x.double(), "i9:5x3"),
            ("long", lambda x: x.long(), "n:5x3"),
            ("int", lambda x: (x * 10).int(), "n:5x3"),
            ("bool", lambda x: x.bool(), "i2:5x3"),
            ("type", lambda x: x.type(torch.int64), "n:5x3"),
            ("type_as", lambda x, y: x.type_as(y), "i9:5x3 5x3"),
            ("to other", lambda x, y: x.to(y), "i9:5x3 5x3"),
            ("to device", lambda x: x.to("cpu"), "5x3"),
            ("to device and dtype", lambda x: x.to("cpu", torch.int64), "n:5x3"),
            ("long of float", lambda x: x.to(torch.int64, copy=True), "n:5x3"),
        ],
    )


@RANKS
def test_new_tensors(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("zeros_like", lambda x: torch.zeros_like(x), "5x3"),
            ("ones_like", lambda x: torch.ones_like(x, dtype=torch.int64), "5x3"),
            ("full_like", lambda x: torch.full_like(x, 2.5), "5x3"),
            ("used", lambda x: x + torch.ones_like(x), "5x3"),
        ],
    )


@RANKS
def test_in_place(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("add_", lambda x, y: x.clone().add_(y), "5x3 5x3;5x3 3"),
            ("add_ number", lambda x: x.clone().add_(2), "5x3"),
            ("add_ alpha", lambda x, y: x.clone().add_(y, alpha=-0.5), "5x3 5x3"),
            ("sub_", lambda x, y: x.clone().sub_(y), "5x3 3"),
            ("mul_", lambda x, y: x.clone().mul_(y), "5x3 5x3;5x3 3"),
            ("mul_ number", lambda x: x.clone().mul_(2.5), "5x3"),
            ("div_", lambda x, y: x.clone().div_(y), "5x3 p:3"),
            ("relu_", lambda x: x.clone().relu_(), "5x3"),
            ("clamp_", lambda x: x.clone().clamp_(min=0.1), "5x3"),
            ("exp_", lambda x: x.clone().exp_(), "5x3"),
            ("zero_", lambda x: x.clone().zero_(), "5x3"),
            ("fill_", lambda x: x.clone().fill_(2.5), "5x3"),
            ("copy_", lambda x, y: x.clone().copy_(y), "5x3 5x3;5x3 3"),
            ("masked_fill_", lambda x, m: x.clone().masked_fill_(m, 0.5), "5x3 b:5x3"),
            ("lerp_", lambda x, y: x.clone().lerp_(y, 0.3), "5x3 5x3"),
            ("addcmul_", lambda x, y, z: x.clone().addcmul_(y, z, value=0.5), "5x3 5x3 5x3"),
            ("addcdiv_", lambda x, y, z: x.clone().addcdiv_(y, z, value=0.5), "5x3 5x3 p:5x3"),
            ("pow_", lambda x: x.clone().pow_(2), "5x3"),
            ("clamp_ by tensors", lambda x, low: x.clone().clamp_(min=low), "5x3 f:3"),
            ("logical_and_", lambda x, y: x.clone().logical_and_(y), "b:5x3 b:3"),
            ("bitwise in place", _bitwise, "i9:5x3 i9:3"),
            ("add_ a tensor as factor", lambda x, y, z: x.clone().add_(y, alpha=z.detach()), "5x3 5x3 n:-"),
            ("out=", lambda x, y: torch.add(x, y, out=torch.zeros_like(x)).clone(), "n:5x3 n:5x3"),
            ("inplace relu", lambda x: F.relu(x.clone(), inplace=True), "5x3"),
            ("+=", _augmented, "5x3 5x3"),
        ],
    )


def _augmented(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    result = x.clone()
    result += y
    result *= 2
    result -= 0 * y
    return result


def _bitwise(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    result = x.clone()
    result &= y
    result |= 4
    result ^= y
    result <<= 2
    result >>= 1
    return result
