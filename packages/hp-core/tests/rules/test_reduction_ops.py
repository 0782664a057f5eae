"""Reductions, norms and normalisations, in every layout, against dense.

See `conftest.py` for how a case is read and what is compared.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

RANKS = pytest.mark.parametrize("ranks", [2, 4])
SHAPES = "5x3;4x6;1x3;2x4x3;-"


@RANKS
def test_sums_and_means(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("sum", lambda x: x.sum(), SHAPES),
            ("sum dim", lambda x: (x.sum(0), x.sum(-1), x.sum(0, keepdim=True), x.sum((0, 1))), "5x3;4x6;1x3"),
            ("sum keyword", lambda x: torch.sum(x, dim=1), "5x3"),
            ("sum axis", lambda x: x.sum(axis=1), "5x3"),
            ("sum of int", lambda x: (x.sum(), x.sum(0)), "i9:5x3"),
            ("sum of bool", lambda x: x.sum(), "b:5x3"),
            ("sum dtype", lambda x: x.sum(dtype=torch.float64), "i9:5x3"),
            ("nansum", lambda x: x.nansum(), "5x3"),
            ("mean", lambda x: x.mean(), SHAPES),
            ("mean dim", lambda x: (x.mean(0), x.mean(-1), x.mean(0, keepdim=True), x.mean((0, 1))), "5x3;4x6;1x3"),
            ("mean keyword", lambda x: torch.mean(x, dim=(0,)), "5x3"),
            ("mean dtype", lambda x: x.mean(dtype=torch.float64), "i9:5x3"),
            ("count_nonzero", lambda x: (x.count_nonzero(), torch.count_nonzero(x, dim=0)), "i3:5x3"),
            ("loss", lambda x, y: (x - y).pow(2).mean(), "5x3 5x3"),
        ],
    )


@RANKS
def test_extrema(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("amax", lambda x: (x.amax(), x.amax(0), x.amax(-1, keepdim=True), x.amin((0, 1))), "5x3;4x6;1x3;2x4x3"),
            ("amax scalar", lambda x: torch.amax(x), "-"),
            ("max", lambda x: (x.max(), x.min()), "5x3;4x6;1x3;-"),
            ("max dim", lambda x: (*x.max(0), *x.min(-1), *torch.max(x, dim=1, keepdim=True)), "5x3;4x6"),
            ("max of two", lambda x, y: (torch.max(x, y), torch.min(x, y)), "5x3 3"),
            ("max of int", lambda x: (x.max(), x.amin(0)), "i9:5x3"),
            ("argmax", lambda x: (x.argmax(), x.argmin(), x.argmax(0), x.argmin(-1, keepdim=True)), "5x3"),
            ("median", lambda x: (x.median(), *x.median(0)), "5x3"),
            ("ties", lambda x: x.round().amax(), "5x3"),
            ("all and any", lambda x: (x.all(), x.any(), x.all(0), x.any(-1)), "b:5x3"),
        ],
    )


@RANKS
def test_other_reductions(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("prod", lambda x: (x.prod(), x.prod(0), x.prod(-1, keepdim=True)), "p:5x3"),
            ("var", lambda x: (x.var(), x.var(0), x.var(-1, keepdim=True), torch.var(x, dim=(0, 1))), "5x3"),
            ("var correction", lambda x: (x.var(0, correction=0), x.var(unbiased=False), x.var(0, False)), "5x3"),
            ("std unbiased", lambda x: (x.std(False), x.std(0, True), x.std(-1, False, True)), "5x3"),
            ("std", lambda x: (x.std(), x.std(0), torch.std(x, dim=-1, correction=0)), "5x3"),
            (
                "logsumexp",
                lambda x: (x.logsumexp(0), torch.logsumexp(x, dim=-1, keepdim=True), x.logsumexp((0, 1))),
                "5x3",
            ),
        ],
    )


@RANKS
def test_norms(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("norm", lambda x: x.norm(), SHAPES),
            ("norm p", lambda x: (x.norm(1), x.norm(3), x.norm(float("inf")), x.norm(2.0, 0)), "5x3"),
            ("norm dim", lambda x: (x.norm(dim=-1), torch.norm(x, 2, dim=0, keepdim=True)), "5x3"),
            ("vector_norm", lambda x: torch.linalg.vector_norm(x), "5x3;4x6"),
            (
                "vector_norm ord",
                lambda x: (torch.linalg.vector_norm(x, 1), torch.linalg.vector_norm(x, float("inf"))),
                "5x3",
            ),
            ("vector_norm dim", lambda x: torch.linalg.vector_norm(x, ord=3, dim=(0,), keepdim=True), "5x3"),
            ("vector_norm -inf, 0", lambda x: torch.linalg.vector_norm(x, float("-inf")), "5x3"),
            (
                "linalg norm",
                lambda x: (torch.linalg.norm(x), torch.linalg.norm(x, dim=-1), torch.linalg.norm(x, 2, 0)),
                "5x3",
            ),
            ("fro", lambda x: torch.norm(x, p="fro"), "5x3"),
            ("normalize", lambda x: F.normalize(x, dim=-1), "5x3"),
        ],
    )


@RANKS
def test_softmax(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("softmax", lambda x: (x.softmax(0), torch.softmax(x, dim=-1), F.softmax(x, dim=1)), "5x3;4x6;1x3"),
            ("softmax dtype", lambda x: F.softmax(x, dim=-1, dtype=torch.float64), "5x3"),
            ("log_softmax", lambda x: (x.log_softmax(0), F.log_softmax(x, dim=-1)), "5x3"),
            ("softmin", lambda x: F.softmin(x, dim=-1), "5x3"),
            ("glu", lambda x: F.glu(x), "5x4"),
            ("glu dim", lambda x: F.glu(x, dim=0), "4x3"),
        ],
    )


@RANKS
def test_normalisation(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("layer_norm", lambda x, w, b: F.layer_norm(x, (3,), w, b), "5x3 3 3;1x3 3 3"),
            ("layer_norm plain", lambda x: F.layer_norm(x, (3,)), "5x3"),
            ("layer_norm weight", lambda x, w: F.layer_norm(x, (3,), weight=w, eps=1e-3), "2x4x3 3"),
            ("layer_norm two dims", lambda x, w, b: F.layer_norm(x, (4, 3), w, b), "2x4x3 4x3 4x3"),
            ("rms_norm", lambda x, w: F.rms_norm(x, (3,), w), "5x3 3;2x4x3 3"),
            ("rms_norm plain", lambda x: F.rms_norm(x, [3], eps=1e-3), "5x3"),
            ("rms_norm by hand", lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w, "2x4x3 3"),
            ("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), "3x4x2 4 4"),
            ("group_norm plain", lambda x: F.group_norm(x, 2), "3x4x2"),
        ],
        most=32 if ranks == 2 else 10,
    )
