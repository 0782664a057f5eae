"""Samples of special functions, and of elementwise ops on complex numbers and integers."""

from __future__ import annotations

from hp_core.platform.protocol import OpSample
from hp_core.platform.torch.op_samples.calls import calls, each

__all__ = ["SAMPLES"]

WITH_GRADIENT = "entr erfcx i0e i1 i1e log_ndtr ndtri ndtr"
WITHOUT_GRADIENT = """
    airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1
    scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0
"""
POLYNOMIALS = """
    chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w hermite_polynomial_h
    hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p shifted_chebyshev_polynomial_t
    shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w
"""

SAMPLES: list[OpSample] = [
    *each(WITH_GRADIENT, "torch.special.OP(x)", "u:5x3"),
    *each(WITHOUT_GRADIENT, "torch.special.OP(x.detach())", "u:5x3"),
    *each(POLYNOMIALS, "torch.special.OP(x, y)", "n:5x3 i3:3"),
    *calls("xlog1py", "torch.special.xlog1py(x, y)", "p:5x3 p:3"),
    *calls("zeta", "torch.special.zeta(x.detach() + 1, y)", "p:5x3 p:3"),
    *calls("polygamma", "torch.polygamma(1, x)", "p:5x3"),
    *calls("polygamma", "x.clone().polygamma_(1)", "p:5x3", inplace=True),
    *calls("mvlgamma", "torch.mvlgamma(x + 1, 2)", "p:5x3"),
    *calls("mvlgamma", "(x + 1).mvlgamma_(2)", "p:5x3", inplace=True),
    *each("igamma igammac", "torch.OP(x.detach(), y)", "p:5x3 p:3"),
    *each("igamma igammac", "x.detach().clone().OP_(y)", "p:5x3 p:3", inplace=True),
    *calls("float_power", "torch.float_power(x, y); torch.float_power(x, 2)", "p:5x3 p:3"),
    *calls("float_power", "x.clone().float_power_(2)", "p:5x3", inplace=True),
    *calls("ldexp", "torch.ldexp(x, y)", "5x3 i3:3"),
    *calls("ldexp", "x.clone().ldexp_(y)", "5x3 i3:3", inplace=True),
    *calls("frexp", "torch.frexp(x)", "5x3"),
    *each("gcd lcm", "torch.OP(x, y)", "i9:5x3 i9:3"),
    *each("gcd lcm", "x.clone().OP_(y)", "i9:5x3 i9:3", inplace=True),
    *calls("isin", "torch.isin(x, y)", "i9:5x3 i9:4"),
    *calls("equal", "torch.equal(x, y); torch.equal(x, x)", "n:5x3 n:5x3"),
    *calls("isreal", "x.isreal()", "c:5x3"),
    *calls("prelu", "F.prelu(x, y)", "5x3 3; 5x3 1"),
    *calls("angle", "torch.angle(x)", "5x3; c:5x3"),
    *calls("abs", "x.abs()", "c:5x3"),
    *calls("mul", "x * y", "c:5x3 c:3; c:5x3 5x3"),
    *calls("complex", "torch.complex(x, y)", "5x3 5x3"),
    *calls("polar", "torch.polar(x.abs(), y)", "5x3 5x3"),
    *calls("view_as_real", "torch.view_as_real(x)", "c:5x3"),
    *calls("view_as_complex", "torch.view_as_complex(x)", "5x2"),
    *each("cdouble cfloat chalf byte char", "x.OP()", "n:5x3"),
    *calls("byte", "x.byte()", "i9:5x3"),
    *calls("cpu", "x.cpu()", "5x3"),
]
