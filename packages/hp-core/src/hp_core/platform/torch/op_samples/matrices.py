"""Samples of ops on whole matrices: inverses, solutions, decompositions."""

from __future__ import annotations

from hp_core.platform.protocol import OpSample
from hp_core.platform.torch.op_samples.calls import calls

__all__ = ["SAMPLES"]

SAMPLES: list[OpSample] = [
    *calls("inv", "torch.linalg.inv(x)", "5x3x3; 4x4"),
    *calls("inv_ex", "torch.linalg.inv_ex(x)", "5x3x3"),
    *calls("pinv", "torch.linalg.pinv(x)", "5x3x2"),
    *calls("cholesky", "torch.linalg.cholesky(x @ x.mT)", "5x3x3"),
    *calls("cholesky", "torch.cholesky(x @ x.mT, upper=True)", "2x3x3"),
    *calls("cholesky_ex", "torch.linalg.cholesky_ex(x @ x.mT)", "5x3x3"),
    *calls("cholesky_inverse", "torch.cholesky_inverse((x @ x.mT).tril())", "2x3x3"),
    *calls("cholesky_solve", "torch.cholesky_solve(x, torch.linalg.cholesky(y @ y.mT))", "5x3x2 5x3x3"),
    *calls("matrix_exp", "torch.matrix_exp(x)", "5x3x3"),
    *calls("matrix_power", "torch.linalg.matrix_power(x, 3)", "5x3x3"),
    *calls("qr", "torch.linalg.qr(x)", "5x4x3"),
    *calls("qr", "torch.linalg.qr(x, mode='r')[1]", "n:5x3x4"),
    *calls("svd", "torch.linalg.svd(x, full_matrices=False)[1]", "5x4x3; 3x3"),
    *calls("svdvals", "torch.linalg.svdvals(x)", "5x4x3"),
    *calls("eigh", "torch.linalg.eigh(x + x.mT)[0]", "5x3x3"),
    *calls("eigvalsh", "torch.linalg.eigvalsh(x + x.mT)", "5x3x3"),
    *calls("eigvals", "torch.linalg.eigvals(x + 9 * x @ x.mT).abs().sum(-1)", "2x3x3"),
    *calls("eig", "torch.linalg.eig(x + 9 * x @ x.mT)[0].abs().sum(-1)", "2x3x3"),
    *calls("det", "torch.det(x)", "5x3x3; 3x3"),
    *calls("logdet", "(x @ x.mT).logdet()", "5x3x3"),
    *calls("slogdet", "torch.linalg.slogdet(x)", "5x3x3"),
    *calls("matrix_rank", "torch.linalg.matrix_rank(x)", "5x3x4"),
    *calls("cond", "torch.linalg.cond(x)", "5x3x3"),
    *calls("lu", "torch.linalg.lu(x); torch.lu(x)", "5x3x3"),
    *calls("lu_factor", "torch.linalg.lu_factor(x)", "5x3x3"),
    *calls("lu_factor_ex", "torch.linalg.lu_factor_ex(x)", "5x3x3"),
    *calls("lu_solve", "torch.linalg.lu_solve(*torch.linalg.lu_factor(x), y)", "5x3x3 5x3x2"),
    *calls("lu_unpack", "torch.lu_unpack(*torch.linalg.lu_factor(x))", "5x3x3"),
    *calls("ldl_factor", "torch.linalg.ldl_factor(x + x.mT)", "n:5x3x3"),
    *calls("ldl_factor_ex", "torch.linalg.ldl_factor_ex(x + x.mT)", "n:5x3x3"),
    *calls("ldl_solve", "torch.linalg.ldl_solve(*torch.linalg.ldl_factor(x + x.mT), y)", "n:5x3x3 n:5x3x2"),
    *calls("geqrf", "torch.geqrf(x)", "n:5x4x3"),
    *calls("householder_product", "torch.linalg.householder_product(x, y)", "5x4x3 p:5x3"),
    *calls("ormqr", "torch.ormqr(x, y, z)", "n:5x4x3 n:5x3 n:5x4x2"),
    *calls("solve", "torch.linalg.solve(x, y)", "5x3x3 5x3x2; 5x3x3 5x3; 3x3 3; 3x3 2x3x4"),
    *calls("solve_ex", "torch.linalg.solve_ex(x, y)", "5x3x3 5x3x2"),
    *calls(
        "solve_triangular",
        "torch.linalg.solve_triangular(x.tril() + 9 * x @ x.mT, y, upper=False)",
        "5x3x3 5x3x2",
    ),
    *calls("triangular_solve", "torch.triangular_solve(x, y)", "5x3x2 5x3x3"),
    *calls("lstsq", "torch.linalg.lstsq(x, y)[0]", "5x4x3 5x4x2"),
    *calls("tensorinv", "torch.linalg.tensorinv(x, ind=1)", "4x2x2"),
    *calls("tensorsolve", "torch.linalg.tensorsolve(x, y)", "2x2x4 2x2"),
    *calls("vander", "torch.linalg.vander(x, N=3)", "5"),
]
