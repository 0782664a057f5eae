"""Reductions, normalisations, scans and orders along dims that may be cut, in every layout, against dense.

See `conftest.py` for how a case is read and what is compared. Values that only some ranks hold, and what is sent, are in
`test_cut_dim_values.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

RANKS = pytest.mark.parametrize("ranks", [2, 4])


@RANKS
def test_extrema_and_their_places(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            (
                "aminmax",
                lambda x: (*x.aminmax(), *torch.aminmax(x, dim=0), *x.aminmax(dim=-1, keepdim=True)),
                "5x3;1x4",
            ),
            ("max dim", lambda x: (*x.max(0), *x.min(-1), *torch.max(x, dim=1, keepdim=True)), "5x3;1x4;2x4x3"),
            ("max dim of int", lambda x: (*x.max(0), *x.min(-1)), "i3:5x4"),
            ("max dim of bool", lambda x: (*x.max(0), *x.min(-1), x.amax(0), x.amin()), "b:5x4"),
            ("argmax", lambda x: (x.argmax(), x.argmin(), x.argmax(0), x.argmin(-1, keepdim=True)), "5x3;1x4;i3:5x4"),
            ("argmax keepdim", lambda x: (torch.argmax(x, keepdim=True), torch.argmin(x, dim=1)), "5x3;2x4x3"),
            (
                "ties",
                lambda x: (x.round().amax(0), x.round().amin(1, True), x.round().max(), x.round().min()),
                "5x7;3x3x2",
            ),
            ("ties dim", lambda x: (*x.round().max(0), *x.round().min(1)), "5x7"),
            ("of a product", lambda x, y: ((x * y).amax(0), (x * y).max(), *(x * y).max(0)), "5x3 3"),
        ],
        most=32 if ranks == 2 else 10,
    )


@RANKS
def test_products_counts_and_flags(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("prod", lambda x: (x.prod(), x.prod(0), torch.prod(x, 1, keepdim=True)), "5x3;1x4;2x4x3"),
            ("prod of a scalar", lambda x: (x.prod(), x.nanmean(), x.amax(), x.logsumexp(0), x.softmax(0)), "-"),
            ("prod with zeros", lambda x: (x.round().prod(), x.round().prod(0)), "5x3"),
            ("prod of int", lambda x: (x.prod(), x.prod(0), x.prod(1, dtype=torch.float64)), "i4:5x3"),
            ("all and any", lambda x: (x.all(), x.any(), x.all(0), x.any(-1, keepdim=True)), "b:5x3;b:1x4"),
            ("all and any of numbers", lambda x: (torch.all(x), torch.any(x, dim=0), x.any((0, 1))), "i2:5x3"),
            ("nanmean", lambda x: (x.nanmean(), x.nanmean(0), torch.nanmean(x, 1, True)), "5x3;1x4"),
            ("nanmean with nan", lambda x: x.masked_fill(x > 0, float("nan")).nanmean(0), "5x3"),
            ("nansum with nan", lambda x: x.masked_fill(x > 0, float("nan")).nansum(1), "5x3"),
            ("count_nonzero", lambda x: (x.count_nonzero(), x.count_nonzero(dim=(0, 1))), "i3:5x3"),
        ],
    )


@RANKS
def test_deviations(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            (
                "var_mean",
                lambda x: (*torch.var_mean(x, 0), *torch.var_mean(x), *torch.std_mean(x, 1, keepdim=True)),
                "5x3",
            ),
            ("var of three", lambda x: (x.var((0, 2)), x.std((1, 2), keepdim=True)), "2x4x3"),
            (
                "correction",
                lambda x: (torch.var(x, dim=0, correction=0.5), *torch.std_mean(x, (0, 1), correction=2)),
                "5x3",
            ),
            ("unbiased", lambda x: (x.var(False), x.std(0, True), *torch.var_mean(x, False)), "5x3"),
            ("too few", lambda x: (x.var(0), x.std(0, correction=0)), "1x3"),
        ],
        most=32 if ranks == 2 else 10,
    )


@RANKS
def test_softmax_family(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("softmax", lambda x: (x.softmax(0), torch.softmax(x, dim=-1)), "5x3;1x4;2x4x3"),
            ("log_softmax", lambda x: (x.log_softmax(0), F.log_softmax(x, dim=-1)), "5x3;1x4"),
            ("softmin", lambda x: F.softmin(x, dim=0), "5x3"),
            ("dtype", lambda x: (F.softmax(x, dim=0, dtype=torch.float64), x.log_softmax(0, torch.float64)), "i9:5x3"),
            (
                "logsumexp",
                lambda x: (x.logsumexp(0), torch.logsumexp(x, (0, 1)), x.logsumexp(1, keepdim=True)),
                "5x3;1x4",
            ),
            ("far from zero", lambda x: ((x * 1e3).softmax(0), (x * 1e3 + 1e3).logsumexp(1)), "5x4"),
        ],
    )


@RANKS
def test_normalisations(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("layer_norm", lambda x, w, b: F.layer_norm(x, (5,), w, b), "3x5 5 5"),
            ("layer_norm of two dims", lambda x, w, b: F.layer_norm(x, (4, 3), w, b, 1e-3), "2x4x3 4x3 4x3"),
            ("layer_norm plain", lambda x: F.layer_norm(x, (1,)), "5x1"),
            ("rms_norm", lambda x, w: F.rms_norm(x, (5,), w, 1e-3), "3x5 5"),
            ("rms_norm plain", lambda x: F.rms_norm(x, (5,)), "3x5"),
            ("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), "3x4x5 4 4;3x6x1x2 6 6"),
            ("group_norm of rows", lambda x: F.group_norm(x, 3, eps=1e-3), "5x6"),
            ("batch_norm", lambda x, w, b: F.batch_norm(x, None, None, w, b, True), "5x3 3 3;3x2x5 2 2"),
            ("batch_norm of images", lambda x: F.batch_norm(x, None, None, training=True), "2x3x2x3"),
            ("batch_norm applied", lambda x, m, v, w, b: F.batch_norm(x, m, v * v + 0.5, w, b), "5x3 n:3 n:3 3 3"),
            ("instance_norm", lambda x, w, b: F.instance_norm(x, weight=w, bias=b), "3x2x5 2 2"),
            ("local_response_norm", lambda x: F.local_response_norm(x, 2), "3x4x5"),
        ],
        most=24 if ranks == 2 else 8,
    )


@RANKS
def test_running_statistics(check_ops: Callable[..., None], ranks: int) -> None:
    """They are updated in place, in their own layout, by what all ranks hold."""

    def tracked(norm: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, ...]]:
        def run(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> tuple[torch.Tensor, ...]:
            mean, var = mean.clone(), var.clone()
            return norm(x, mean, var, None, None, True, 0.3), mean, var

        return run

    check_ops(
        ranks,
        [
            ("batch_norm", tracked(F.batch_norm), "5x3 n:3 n:3"),
            ("batch_norm of images", tracked(F.batch_norm), "2x3x2x3 n:3 n:3"),
            ("instance_norm", tracked(F.instance_norm), "3x2x5 n:2 n:2"),
        ],
        most=24 if ranks == 2 else 8,
    )


@RANKS
def test_scans(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("cumsum", lambda x: (x.cumsum(0), torch.cumsum(x, dim=-1)), "5x3;1x4;2x7x2"),
            ("cumsum of int", lambda x: (x.cumsum(0), x.cumsum(1, dtype=torch.float64)), "i9:5x3;b:3x5"),
            ("in place", lambda x: (x.clone().cumsum_(0), x.clone().cumprod_(1)), "5x3"),
            ("cumprod", lambda x: (x.cumprod(0), x.cumprod(-1)), "5x3;1x4"),
            ("cumprod with zeros", lambda x: x.round().cumprod(0), "7x3"),
            ("logcumsumexp", lambda x: (x.logcumsumexp(0), x.logcumsumexp(1)), "5x3;1x4"),
            ("cummax", lambda x: (*x.cummax(0), *torch.cummin(x, 1)), "5x3;1x4;7x2"),
            ("cummax of ties", lambda x: (*x.round().cummax(0), *x.round().cummin(1)), "7x5"),
            ("cummax of int", lambda x: (*x.cummax(0), *x.cummin(1)), "i4:5x3"),
        ],
    )


@RANKS
def test_orders(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("topk", lambda x: (*x.topk(2, 0), *torch.topk(x, 3, dim=1, largest=False)), "5x3;4x6"),
            ("topk of one", lambda x: (*x.topk(1, 0), *x.topk(4)), "1x4"),
            ("topk of all", lambda x: x.topk(5, 0), "5x2"),
            ("sort", lambda x: (*x.sort(0), *torch.sort(x, dim=-1, descending=True), x.msort()), "5x3"),
            ("argsort", lambda x: (x.argsort(0), torch.argsort(x, dim=1, descending=True)), "5x3"),
            ("median", lambda x: (x.median(), *x.median(0), x.nanmedian(), *x.nanmedian(1, True)), "5x3"),
            ("mode", lambda x: (*x.mode(0), *x.mode()), "i3:5x3"),
            ("kthvalue", lambda x: (*x.kthvalue(2, 0), *torch.kthvalue(x, 1, keepdim=True)), "5x3"),
            (
                "quantile",
                lambda x: (x.quantile(0.3), torch.quantile(x, 0.5, dim=0), x.nanquantile(0.2, 1, True)),
                "5x3",
            ),
            ("quantiles", lambda x, q: (torch.quantile(x, q.sigmoid(), dim=0), x.quantile(q.sigmoid())), "5x3 n:2"),
        ],
        most=32 if ranks == 2 else 10,
    )


@RANKS
def test_norms_and_distances(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("vector_norm", lambda x: (torch.linalg.vector_norm(x, 3, 0), torch.linalg.vector_norm(x, 0, 1)), "5x3"),
            (
                "inf",
                lambda x: (torch.linalg.vector_norm(x, float("inf"), (0, 1)), x.norm(float("-inf"), 1, True)),
                "5x3",
            ),
            (
                "matrix_norm",
                lambda x: (
                    torch.linalg.matrix_norm(x),
                    *(torch.linalg.matrix_norm(x, p) for p in (1, -1, float("inf"))),
                ),
                "5x3;2x3x4",
            ),
            ("spectral", lambda x: (torch.linalg.matrix_norm(x, 2), torch.linalg.norm(x, "nuc"), x.norm("nuc")), "5x3"),
            (
                "linalg.norm",
                lambda x: (torch.linalg.norm(x), torch.linalg.norm(x, 2), torch.linalg.norm(x, 1, 0)),
                "5x3",
            ),
            (
                "linalg.norm keyword",
                lambda x: torch.linalg.norm(input=x, ord=float("inf"), dim=(1, 0), keepdim=True),
                "5x3",
            ),
            ("dist", lambda x, y: (torch.dist(x, y), x.dist(y, 1)), "5x3 5x3"),
            (
                "pairwise_distance",
                lambda x, y: (F.pairwise_distance(x, y), F.pairwise_distance(x, y, 1, 1e-3, True)),
                "5x3 5x3",
            ),
            (
                "cosine_similarity",
                lambda x, y: (F.cosine_similarity(x, y), torch.cosine_similarity(x, y, dim=0)),
                "5x3 5x3;5x3 3",
            ),
            ("cdist", lambda x, y: torch.cdist(x, y), "5x3 4x3;2x5x3 4x3"),
            ("pdist", lambda x: F.pdist(x), "5x3"),
            ("normalize", lambda x: (F.normalize(x), F.normalize(x, 3, 0), F.normalize(x, dim=(0, 1))), "5x3;1x4"),
            (
                "renorm",
                lambda x: (x.renorm(2, 0, 1.0), torch.renorm(x, 1, 1, 2.0), x.clone().renorm_(2, 0, 0.5)),
                "5x3",
            ),
        ],
        most=24 if ranks == 2 else 8,
    )
