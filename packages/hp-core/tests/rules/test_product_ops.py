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
