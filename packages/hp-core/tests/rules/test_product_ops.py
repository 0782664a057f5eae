"""Products that contract dims, in every layout, against dense.

See `conftest.py` for how a case is read and what is compared.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

RANKS = pytest.mark.parametrize("ranks", [2, 4])


@RANKS
def test_linear(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("linear", lambda x, w: F.linear(x, w), "5x3 6x3;2x4x6 4x6;3 5x3;1x3 5x3"),
            ("linear bias", lambda x, w, b: F.linear(x, w, b), "5x3 7x3 7;2x4x6 4x6 4;3 5x3 5"),
            ("linear keywords", lambda x, w, b: F.linear(input=x, weight=w, bias=b), "4x6 4x6 4"),
            ("linear vector weight", lambda x, w: F.linear(x, w), "5x3 3"),
        ],
    )


@RANKS
def test_matmul(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("@", lambda x, y: x @ y, "5x3 3x4;4x6 6x2;3 3x4;5x3 3;3 3;1x3 3x1"),
            (
                "batched",
                lambda x, y: torch.matmul(x, y),
                "2x5x3 2x3x4;2x5x3 3x4;5x3 2x3x4;2x1x5x3 3x3x4;2x5x3 3;3 2x3x4",
            ),
            ("mm", lambda x, y: torch.mm(x, y), "5x3 3x4"),
            ("mm keyword", lambda x, y: torch.mm(x, mat2=y), "5x3 3x4"),
            ("bmm", lambda x, y: torch.bmm(x, y), "3x5x2 3x2x4"),
            ("bmm keyword", lambda x, y: torch.bmm(x, mat2=y), "3x5x2 3x2x4"),
            ("mv", lambda x, y: torch.mv(x, y), "5x3 3"),
            ("dot", lambda x, y: torch.dot(x, y), "5 5"),
            ("outer", lambda x, y: torch.outer(x, y), "5 3"),
            ("x @ x.T", lambda x: x @ x.T, "5x3;4x6"),
            ("x.T @ x", lambda x: x.mT @ x, "5x3"),
            ("rmatmul", lambda x, y: torch.Tensor.__rmatmul__(x, y), "3x4 5x3"),
        ],
    )


@RANKS
def test_product_added(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("addmm", lambda b, x, y: torch.addmm(b, x, y), "4 5x3 3x4;5x4 5x3 3x4;5x1 5x3 3x4"),
            ("addmm scaled", lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=2.0), "4 5x3 3x4"),
            ("addmv", lambda b, x, y: torch.addmv(b, x, y), "5 5x3 3"),
            ("baddbmm", lambda b, x, y: torch.baddbmm(b, x, y), "2x5x4 2x5x3 2x3x4;4 2x5x3 2x3x4;5x1 2x5x3 2x3x4"),
            ("addmm_", lambda b, x, y: b.clone().addmm_(x, y), "5x4 5x3 3x4"),
            ("addr", lambda b, x, y: torch.addr(b, x, y, beta=0.5), "5x3 5 3;3 5 3"),
            ("addbmm", lambda b, x, y: torch.addbmm(b, x, y, alpha=0.5), "5x4 2x5x3 2x3x4;4 3x5x2 3x2x4"),
            ("baddbmm_", lambda b, x, y: b.clone().baddbmm_(x, y, beta=0.5), "2x5x4 2x5x3 2x3x4"),
        ],
        most=40 if ranks == 2 else 12,
    )


@RANKS
def test_einsum(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("einsum mm", lambda x, y: torch.einsum("ik,kj->ij", x, y), "5x3 3x4"),
            ("einsum implicit", lambda x, y: torch.einsum("ik,kj", x, y), "5x3 3x4"),
            ("einsum heads", lambda x, y: torch.einsum("bshd,bthd->bhst", x, y), "2x3x2x4 2x5x2x4"),
            ("einsum scalar", lambda x, y: torch.einsum("ij,ij->", x, y), "5x3 5x3"),
            ("einsum sum", lambda x: torch.einsum("ij->j", x), "5x3"),
            ("einsum permute", lambda x: torch.einsum("ijk->kij", x), "5x3x2"),
            ("einsum three", lambda x, y, z: torch.einsum("ab,bc,cd->ad", x, y, z), "5x3 3x4 4x2"),
            ("einsum diagonal", lambda x: torch.einsum("ii->i", x), "4x4"),
            ("einsum trace", lambda x: torch.einsum("ii->", x), "4x4"),
            ("einsum experts", lambda x, w: torch.einsum("ecd,edf->ecf", x, w), "4x3x2 4x2x5"),
            (
                "einsum dots",
                lambda x, y: torch.einsum("...ik,...kj->...ij", x, y),
                "2x5x3 2x3x4;2x1x5x3 4x3x2;5x3 2x3x4",
            ),
            ("einsum dots implicit", lambda x, y: torch.einsum("i...,ij", x, y), "3x2x5 3x4"),
            ("einsum dots summed", lambda x, y: torch.einsum("...i,i->", x, y), "2x5x3 3"),
            ("einsum dots between", lambda x, y: torch.einsum("b...d,bd->...b", x, y), "3x2x5x4 3x4"),
            ("einsum stretched", lambda x, y: torch.einsum("ij,ij->ij", x, y), "5x1 5x3"),
            ("einsum diagonal times", lambda x, y: torch.einsum("ii,i->i", x, y), "4x4 4"),
            ("einsum lists", lambda x, y: torch.einsum(x, [0, 1], y, [1, 2], [0, 2]), "5x3 3x4"),
            ("einsum sum one side", lambda x, y: torch.einsum("ij,k->ik", x, y), "5x3 4"),
        ],
    )


@RANKS
def test_mlp_and_attention_by_hand(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("mlp", lambda x, a, b: F.linear(F.gelu(F.linear(x, a)), b), "5x4 6x4 4x6"),
            ("attention", lambda x, a: torch.softmax((x @ a) @ x.mT, -1) @ x, "2x5x4 4x4"),
            ("gated", lambda x, a, b: F.silu(F.linear(x, a)) * F.linear(x, b), "5x4 6x4 6x4"),
        ],
        most=40 if ranks == 2 else 16,
    )


@RANKS
def test_other_products(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("inner", lambda x, y: torch.inner(x, y), "5x3 4x3;3 3;2x4x3 3;- 5x3"),
            ("vdot", lambda x, y: torch.vdot(x, y), "5 5"),
            ("vecdot", lambda x, y: torch.linalg.vecdot(x, y), "5x3 5x3;5x3 3"),
            ("vecdot dim", lambda x, y: torch.linalg.vecdot(x, y, dim=0), "5x3 5x3"),
            ("tensordot", lambda x, y: torch.tensordot(x, y, 1), "5x3 3x4;2x5x3 3x2"),
            ("tensordot all", lambda x, y: torch.tensordot(x, y), "5x3 5x3"),
            ("tensordot pairs", lambda x, y: torch.tensordot(x, y, dims=([0, -1], [1, 0])), "2x5x3 3x2x4"),
            ("tensordot none", lambda x, y: torch.tensordot(x, y, 0), "3 4"),
            ("kron", lambda x, y: torch.kron(x, y), "4x3 2x3;4 2x3;1x4 3x1;5 3"),
            ("cross", lambda x, y: torch.cross(x, y, dim=1), "5x3 5x3;2x3x4 2x3x4"),
            ("linalg.cross", lambda x, y: torch.linalg.cross(x, y), "3x3 3x3;5x3 1x3"),
            ("bilinear", lambda x, y, w, b: F.bilinear(x, y, w, b), "4x3 4x2 5x3x2 5;2x4x3 2x4x2 1x3x2 1"),
            ("bilinear without bias", lambda x, y, w: F.bilinear(x, y, w), "5x2 5x3 4x2x3"),
            ("multi_dot", lambda x, y, z: torch.linalg.multi_dot([x, y, z]), "5x3 3x4 4x2;3 3x4 4x2;5x3 3x4 4"),
            ("chain_matmul", lambda x, y, z: torch.chain_matmul(x, y, z), "5x3 3x4 4x2"),
            ("trace", lambda x: torch.trace(x), "4x4;5x3"),
            ("linalg.diagonal", lambda x: torch.linalg.diagonal(x), "2x4x4"),
            ("cov", lambda x: torch.cov(x), "4x5;6"),
            ("corrcoef", lambda x: torch.corrcoef(x), "4x5"),
        ],
        most=40 if ranks == 2 else 12,
    )


@RANKS
def test_whole_matrices(check_ops: Callable[..., None], ranks: int) -> None:
    linalg = torch.linalg
    check_ops(
        ranks,
        [
            ("inv", lambda x: linalg.inv(x), "5x3x3;4x4"),
            ("inverse", lambda x: torch.inverse(x), "2x3x3"),
            ("inv_ex", lambda x: linalg.inv_ex(x), "5x3x3"),
            ("pinv", lambda x: linalg.pinv(x), "5x3x2"),
            ("pinverse", lambda x: torch.pinverse(x), "3x2"),
            ("cholesky", lambda x: linalg.cholesky(x @ x.mT), "5x3x3;2x3x3"),
            ("torch.cholesky", lambda x: torch.cholesky(x @ x.mT, upper=True), "2x3x3"),
            ("cholesky_inverse", lambda x: torch.cholesky_inverse((x @ x.mT).tril()), "2x3x3"),
            ("matrix_exp", lambda x: torch.matrix_exp(x), "5x3x3"),
            ("matrix_power", lambda x: linalg.matrix_power(x, 3), "5x3x3"),
            ("qr", lambda x: linalg.qr(x), "5x4x3;2x3x3"),
            ("qr r", lambda x: linalg.qr(x, mode="r")[1], "n:5x3x4"),
            ("svd", lambda x: _recomposed(linalg.svd(x, full_matrices=False)), "5x4x3;3x3"),
            ("svdvals", lambda x: linalg.svdvals(x), "5x4x3"),
            ("eigh", lambda x: linalg.eigh(x + x.mT)[0], "5x3x3"),
            ("eigvalsh", lambda x: linalg.eigvalsh(x + x.mT), "5x3x3"),
            ("eigvals", lambda x: linalg.eigvals(x + 9 * x @ x.mT).abs().sum(-1), "2x3x3"),
            ("det", lambda x: torch.det(x), "5x3x3;3x3"),
            ("logdet", lambda x: (x @ x.mT).logdet(), "5x3x3"),
            ("slogdet", lambda x: linalg.slogdet(x), "5x3x3"),
            ("matrix_rank", lambda x: linalg.matrix_rank(x), "5x3x4"),
            ("cond", lambda x: linalg.cond(x), "5x3x3"),
            ("lu", lambda x: linalg.lu(x), "5x3x3"),
            ("torch.lu", lambda x: torch.lu(x), "5x3x3"),
            ("lu_factor", lambda x: linalg.lu_factor(x), "5x3x3"),
            ("lu_solve", lambda x, b: linalg.lu_solve(*linalg.lu_factor(x), b), "5x3x3 5x3x2"),
            ("lu_unpack", lambda x: torch.lu_unpack(*linalg.lu_factor(x)), "5x3x3"),
            ("householder", lambda x, t: linalg.householder_product(x, t), "5x4x3 p:5x3"),
            ("solve", lambda a, b: linalg.solve(a, b), "5x3x3 5x3x2;5x3x3 5x3;3x3 3;3x3 2x3x4"),
            (
                "solve_triangular",
                lambda a, b: linalg.solve_triangular(a.tril() + 9 * a @ a.mT, b, upper=False),
                "5x3x3 5x3x2",
            ),
            ("cholesky_solve", lambda b, a: torch.cholesky_solve(b, linalg.cholesky(a @ a.mT)), "5x3x2 5x3x3"),
            ("lstsq", lambda a, b: linalg.lstsq(a, b)[0], "5x4x3 5x4x2"),
            ("tensorinv", lambda a: linalg.tensorinv(a, ind=1), "4x2x2"),
            ("tensorsolve", lambda a, b: linalg.tensorsolve(a, b), "2x2x4 2x2"),
            ("vander", lambda x: linalg.vander(x, N=3), "5"),
        ],
        most=10 if ranks == 2 else 6,
    )


def _recomposed(parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The matrix again: the factors themselves are only known up to signs."""
    left, values, right = parts
    return (left * values.unsqueeze(-2)) @ right
