"""Embedding, attention, losses and optimizer lists, in every layout, against dense.

See `conftest.py` for how a case is read and what is compared.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

RANKS = pytest.mark.parametrize("ranks", [2, 4])


@RANKS
def test_embedding(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("embedding", lambda i, w: F.embedding(i, w), "i7:4x5 7x3;i3:5 3x4;i8:2x3 8x2;i1:3 1x4;i5:- 5x3"),
            ("embedding padding", lambda i, w: F.embedding(i, w, padding_idx=2), "i7:4x5 7x3;i3:9 3x4"),
            ("embedding padding from the end", lambda i, w: F.embedding(i, w, padding_idx=-1), "i3:9 3x4"),
            ("one_hot of the largest", lambda i: F.one_hot(i), "i7:4x5;i3:5"),
            ("bags", lambda i, w: F.embedding_bag(i, w), "i7:4x5 7x3;i3:1x4 3x2"),
            ("bags summed", lambda i, w: F.embedding_bag(i, w, mode="sum", padding_idx=1), "i7:4x5 7x3"),
            ("bags padded", lambda i, w: F.embedding_bag(i, w, padding_idx=-1), "i3:4x5 3x2"),
            (
                "bags weighted",
                lambda i, w, p: F.embedding_bag(i, w, mode="sum", per_sample_weights=p),
                "i7:4x5 7x3 4x5",
            ),
            ("bags largest", lambda i, w: F.embedding_bag(i, w, mode="max"), "i7:4x5 7x3"),
            ("one_hot", lambda i: F.one_hot(i, 7), "i7:4x5;i3:5"),
            ("tied", lambda i, w: F.linear(F.embedding(i, w), w), "i5:2x3 5x4"),
        ],
        most=48 if ranks == 2 else 16,
    )


@RANKS
def test_attention(check_ops: Callable[..., None], ranks: int) -> None:
    attention = F.scaled_dot_product_attention
    check_ops(
        ranks,
        [
            ("sdpa", lambda q, k, v: attention(q, k, v), "2x4x5x2 2x4x3x2 2x4x3x4;1x2x3x2 1x2x3x2 1x2x3x2"),
            ("causal", lambda q, k, v: attention(q, k, v, is_causal=True), "2x4x5x2 2x4x5x2 2x4x5x2;3x5x2 3x5x2 3x5x2"),
            ("causal wide", lambda q, k, v: attention(q, k, v, is_causal=True), "2x2x5x2 2x2x3x2 2x2x3x2;4x2 3x2 3x2"),
            ("scale", lambda q, k, v: attention(q, k, v, scale=0.3), "2x2x5x2 2x2x3x2 2x2x3x2"),
            ("mask", lambda q, k, v, m: attention(q, k, v, attn_mask=m.tril()), "2x2x3x2 2x2x3x2 2x2x3x2 n:3x3"),
            ("mask per head", lambda q, k, v, m: attention(q, k, v, m), "2x2x3x2 2x2x5x2 2x2x5x2 n:2x2x3x5"),
            ("mask broadcast", lambda q, k, v, m: attention(q, k, v, m), "2x2x3x2 2x2x5x2 2x2x5x2 n:2x1x1x5"),
            ("mask of bools", lambda q, k, v, m: attention(q, k, v, m), "2x2x3x2 2x2x5x2 2x2x5x2 b:2x1x3x5"),
            ("batch stretched", lambda q, k, v: attention(q, k, v), "1x2x3x2 3x2x5x2 3x2x5x2"),
            (
                "grouped",
                lambda q, k, v: attention(q, k, v, enable_gqa=True),
                "2x4x3x2 2x2x3x2 2x2x3x2;2x6x3x2 2x3x3x2 2x3x3x2",
            ),
            (
                "multi query",
                lambda q, k, v: attention(q, k, v, is_causal=True, enable_gqa=True),
                "2x4x3x2 2x1x3x2 2x1x3x2",
            ),
        ],
        most=24 if ranks == 2 else 8,
    )


@RANKS
def test_cross_entropy(check_ops: Callable[..., None], ranks: int) -> None:
    loss = F.cross_entropy
    indices = "6x5 i5:6;4x3 i3:4;5x7 i7:5;1x3 i3:1"
    check_ops(
        ranks,
        [
            ("mean", lambda x, y: loss(x, y), indices),
            ("sum", lambda x, y: loss(x, y, reduction="sum"), indices),
            ("none", lambda x, y: loss(x, y, reduction="none"), indices),
            ("ignored", lambda x, y: loss(x, y, ignore_index=1), "6x5 i5:6;5x3 i3:5"),
            ("ignored none", lambda x, y: loss(x, y, ignore_index=1, reduction="none"), "6x5 i5:6"),
            ("weight", lambda x, y, w: loss(x, y, w), "6x5 i5:6 n:5"),
            ("weight ignored", lambda x, y, w: loss(x, y, weight=w, ignore_index=2), "6x5 i5:6 n:5"),
            ("weight sum", lambda x, y, w: loss(x, y, w, reduction="sum"), "6x5 i5:6 n:5"),
            ("smoothing", lambda x, y: loss(x, y, label_smoothing=0.1), indices),
            (
                "smoothing sum",
                lambda x, y: loss(x, y, label_smoothing=0.1, reduction="sum", ignore_index=1),
                "6x5 i5:6",
            ),
            (
                "smoothing none",
                lambda x, y: loss(x, y, label_smoothing=0.1, reduction="none", ignore_index=1),
                "6x5 i5:6",
            ),
            ("smoothing weight", lambda x, y, w: loss(x, y, w, label_smoothing=0.1, ignore_index=1), "6x5 i5:6 n:5"),
            ("probabilities", lambda x, y: loss(x, y), "6x5 n:6x5;5x3 n:5x3"),
            ("probabilities sum", lambda x, y: loss(x, y, reduction="sum", label_smoothing=0.2), "6x5 n:6x5"),
            ("probabilities none", lambda x, y: loss(x, y, reduction="none"), "6x5 n:6x5"),
            ("probabilities smoothing", lambda x, y, w: loss(x, y, w, label_smoothing=0.2), "6x5 n:6x5 n:5"),
            ("probabilities of one sample", lambda x, y: loss(x, y), "5 n:5"),
            ("probabilities of pixels", lambda x, y, w: loss(x, y, w), "4x5x3 n:4x5x3 n:5"),
            ("all ignored", lambda x, y: loss(x, y * 0 + 1, ignore_index=1), "6x5 i5:6"),
            ("pixels", lambda x, y: loss(x, y), "4x5x3 i5:4x3"),
            ("pixels none", lambda x, y: loss(x, y, reduction="none"), "4x5x3 i5:4x3"),
            ("one sample", lambda x, y: loss(x, y), "5 i5:-"),
            ("flattened", lambda x, y: loss(x.flatten(0, 1), y.flatten(0, 1)), "4x3x5 i5:4x3"),
        ],
        most=12 if ranks == 2 else 8,
    )


@RANKS
def test_other_losses(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("nll", lambda x, y: F.nll_loss(x.log_softmax(-1), y), "6x5 i5:6;5x3 i3:5"),
            ("nll sum", lambda x, y: F.nll_loss(x, y, reduction="sum", ignore_index=1), "6x5 i5:6"),
            ("nll all ignored", lambda x, y: F.nll_loss(x, y * 0 + 1, ignore_index=1), "6x5 i5:6"),
            ("nll of one sample", lambda x, y: F.nll_loss(x, y), "5 i5:-"),
            ("nll none", lambda x, y: F.nll_loss(x, y, reduction="none"), "6x5 i5:6"),
            ("nll weight", lambda x, y, w: F.nll_loss(x, y, w), "6x5 i5:6 n:5"),
            (
                "mse",
                lambda x, y: (F.mse_loss(x, y), F.mse_loss(x, y, reduction="sum"), F.mse_loss(x, y, reduction="none")),
                "5x3 5x3;1x3 1x3",
            ),
            ("l1", lambda x, y: (F.l1_loss(x, y), F.l1_loss(x, y, reduction="none")), "5x3 5x3"),
            ("smooth l1", lambda x, y: F.smooth_l1_loss(x, y, beta=0.5), "5x3 5x3"),
            ("huber", lambda x, y: F.huber_loss(x, y, delta=0.5), "5x3 5x3"),
            ("bce", lambda x, y: F.binary_cross_entropy(x, y), "u:5x3 u:5x3"),
            ("bce weight", lambda x, y, w: F.binary_cross_entropy(x, y, w), "u:5x3 u:5x3 n:5x3"),
            ("bce logits", lambda x, y: F.binary_cross_entropy_with_logits(x, y), "5x3 u:5x3"),
            (
                "bce logits weights",
                lambda x, y, w: F.binary_cross_entropy_with_logits(x, y, pos_weight=w),
                "5x3 u:5x3 n:3",
            ),
            ("nll wide", lambda x, y: F.nll_loss(x, y, ignore_index=1), "4x5x3 i5:4x3;3x2x1 i2:3x1"),
            (
                "soft margin",
                lambda x, y: (F.soft_margin_loss(x, y), F.soft_margin_loss(x, y, reduction="none")),
                "5x3 n:5x3",
            ),
            ("hinge", lambda x, y: F.hinge_embedding_loss(x, y.sign(), margin=0.5), "5x3 n:5x3"),
            ("ranking", lambda x, y, z: F.margin_ranking_loss(x, y, z.sign(), margin=0.1), "5 5 n:5;5x3 5x3 n:5x3"),
            ("poisson", lambda x, y: F.poisson_nll_loss(x, y, full=True), "5x3 p:5x3"),
            ("poisson sum", lambda x, y: F.poisson_nll_loss(x, y, log_input=False, reduction="sum"), "p:5x3 p:5x3"),
            ("gaussian", lambda x, y, v: F.gaussian_nll_loss(x, y, v), "5x3 5x3 p:5x3;5x3 5x3 p:5x1"),
            ("cosine", lambda x, y, t: F.cosine_embedding_loss(x, y, t.sign(), margin=0.1), "5x3 5x3 n:5;1x3 1x3 n:1"),
            ("cosine none", lambda x, y, t: F.cosine_embedding_loss(x, y, t.sign(), reduction="none"), "5x3 5x3 n:5"),
            ("triplet", lambda a, p, n: F.triplet_margin_loss(a, p, n, swap=True), "5x3 5x3 5x3;3 3 3"),
            ("triplet sum", lambda a, p, n: F.triplet_margin_loss(a, p, n, reduction="sum", p=1), "5x3 5x3 5x3"),
            ("triplet distance", lambda a, p, n: F.triplet_margin_with_distance_loss(a, p, n), "5x3 5x3 5x3"),
            ("multi margin", lambda x, y: F.multi_margin_loss(x, y), "5x3 i3:5;3 i3:-"),
            ("multi margin weight", lambda x, y, w: F.multi_margin_loss(x, y, p=2, weight=w), "5x3 i3:5 n:3"),
            ("multilabel margin", lambda x, y: F.multilabel_margin_loss(x, y), "5x3 i3:5x3;3 i3:3"),
            ("multilabel soft", lambda x, y: F.multilabel_soft_margin_loss(x, y), "5x3 u:5x3"),
            ("ctc", lambda x, y: F.ctc_loss(x.log_softmax(-1), y + 1, (4, 3), (2, 1)), "4x2x5 i4:2x2"),
            (
                "ctc none",
                lambda x, y: F.ctc_loss(x.log_softmax(-1), y + 1, (4, 3), (2, 1), reduction="none"),
                "4x2x5 i4:2x2",
            ),
            ("linear cross entropy", lambda x, w, y: F.linear_cross_entropy(x, w, y, ignore_index=1), "6x3 5x3 i5:6"),
            ("kl", lambda x, y: (F.kl_div(x, y), F.kl_div(x, y, reduction="batchmean")), "5x3 u:5x3"),
            ("kl log", lambda x, y: F.kl_div(x, y, reduction="sum", log_target=True), "5x3 u:5x3"),
        ],
        most=24 if ranks == 2 else 10,
    )


@RANKS
def test_lists_of_tensors(check_ops: Callable[..., None], ranks: int) -> None:
    def changed(name: str, *arguments: object) -> Callable[..., object]:
        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            half = len(tensors) // 2
            written = [tensor.detach().clone() for tensor in tensors[:half]]
            others = [tensor.detach().clone() for tensor in tensors[half:]]
            given = [others if argument == "others" else argument for argument in arguments]
            getattr(torch, name)(written, *given)
            return written

        return run

    def made(name: str, *arguments: object) -> Callable[..., object]:
        def run(*tensors: torch.Tensor) -> object:
            half = len(tensors) // 2
            given = [list(tensors[half:]) if argument == "others" else argument for argument in arguments]
            return getattr(torch, name)(list(tensors[:half]), *given)

        return run

    operands = "n:5x3 n:4 n:5x3 n:4"
    check_ops(
        ranks,
        [
            ("_foreach_add", made("_foreach_add", "others"), operands),
            ("_foreach_add number", made("_foreach_add", 2.0), operands),
            ("_foreach_add_ alpha", changed("_foreach_add_", "others"), operands),
            ("_foreach_mul", made("_foreach_mul", "others"), operands),
            ("_foreach_mul number", made("_foreach_mul", 0.5), operands),
            ("_foreach_mul_ numbers", changed("_foreach_mul_", [0.5, 2.0]), operands),
            ("_foreach_mul_", changed("_foreach_mul_", 0.5), operands),
            ("_foreach_div_", changed("_foreach_div_", "others"), operands),
            ("_foreach_sub", made("_foreach_sub", "others"), operands),
            ("_foreach_exp", made("_foreach_exp"), operands),
            ("_foreach_sqrt_", made("_foreach_abs"), operands),
            ("_foreach_neg", made("_foreach_neg"), operands),
            ("_foreach_zero_", changed("_foreach_zero_"), operands),
            ("_foreach_lerp_", changed("_foreach_lerp_", "others", 0.3), operands),
            ("_foreach_addcmul_", changed("_foreach_addcmul_", "others", "others", 0.3), operands),
            ("_foreach_addcdiv_", changed("_foreach_addcdiv_", "others", "others", 0.3), operands),
            ("_foreach_maximum", made("_foreach_maximum", "others"), operands),
            ("_foreach_norm", made("_foreach_norm"), operands),
            ("_foreach_cos", made("_foreach_cos"), operands),
            ("_foreach_pow", made("_foreach_pow", 2.0), operands),
            ("_foreach_clamp_max_", changed("_foreach_clamp_max_", 0.1), operands),
            ("_foreach_max", made("_foreach_max"), operands),
            ("_foreach_copy_", changed("_foreach_copy_", "others"), operands),
        ],
        most=10 if ranks == 2 else 4,
    )
