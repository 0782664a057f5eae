"""Samples of what models are made of: normalisations, embedding, attention, losses."""

from __future__ import annotations

from hp_core.platform.protocol import OpSample
from hp_core.platform.torch.op_samples.calls import calls, each

__all__ = ["SAMPLES"]

SAMPLES: list[OpSample] = [
    *calls("layer_norm", "F.layer_norm(x, (3,), y, z)", "5x3 3 3; 1x3 3 3"),
    *calls("layer_norm", "F.layer_norm(x, (3,))", "5x3"),
    *calls("layer_norm", "F.layer_norm(x, (3,), weight=y, eps=1e-3)", "2x4x3 3"),
    *calls("layer_norm", "F.layer_norm(x, (4, 3), y, z)", "2x4x3 4x3 4x3"),
    *calls("rms_norm", "F.rms_norm(x, (3,), y)", "5x3 3; 2x4x3 3"),
    *calls("rms_norm", "F.rms_norm(x, [3], eps=1e-3)", "5x3"),
    *calls("rsqrt", "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * y", "2x4x3 3"),
    *calls("group_norm", "F.group_norm(x, 2, y, z)", "3x4x2 4 4"),
    *calls("group_norm", "F.group_norm(x, 2)", "3x4x2"),
    # embedding
    *calls("embedding", "F.embedding(x, y)", "i7:4x5 7x3; i3:5 3x4; i8:2x3 8x2; i1:3 1x4; i5:- 5x3"),
    *calls("embedding", "F.embedding(x, y, padding_idx=2)", "i7:4x5 7x3; i3:9 3x4"),
    *calls("embedding", "F.embedding(x, y, padding_idx=-1)", "i3:9 3x4"),
    *calls("embedding", "F.linear(F.embedding(x, y), y)", "i5:2x3 5x4"),
    *calls("one_hot", "F.one_hot(x, 7)", "i7:4x5; i3:5"),
    # attention
    *calls(
        "scaled_dot_product_attention",
        "F.scaled_dot_product_attention(x, y, z)",
        "2x4x5x2 2x4x3x2 2x4x3x4; 1x2x3x2 1x2x3x2 1x2x3x2",
    ),
    *calls(
        "scaled_dot_product_attention",
        "F.scaled_dot_product_attention(x, y, z, is_causal=True)",
        "2x4x5x2 2x4x5x2 2x4x5x2; 3x5x2 3x5x2 3x5x2",
    ),
    *calls(
        "scaled_dot_product_attention",
        "F.scaled_dot_product_attention(x, y, z, scale=0.3)",
        "2x2x5x2 2x2x3x2 2x2x3x2",
    ),
    *calls(
        "scaled_dot_product_attention",
        "F.scaled_dot_product_attention(x, y, z, attn_mask=w.tril())",
        "2x2x3x2 2x2x3x2 2x2x3x2 n:3x3",
    ),
    *calls(
        "scaled_dot_product_attention",
        "F.scaled_dot_product_attention(x, y, z, w)",
        "2x2x3x2 2x2x5x2 2x2x5x2 n:2x2x3x5; 2x2x3x2 2x2x5x2 2x2x5x2 n:2x1x1x5",
    ),
    *calls(
        "scaled_dot_product_attention",
        "F.scaled_dot_product_attention(x, y, z, enable_gqa=True)",
        "2x4x3x2 2x2x3x2 2x2x3x2; 2x6x3x2 2x3x3x2 2x3x3x2",
    ),
    *calls(
        "scaled_dot_product_attention",
        "F.scaled_dot_product_attention(x, y, z, is_causal=True, enable_gqa=True)",
        "2x4x3x2 2x1x3x2 2x1x3x2",
    ),
    # losses
    *calls(
        "cross_entropy",
        "F.cross_entropy(x, y); F.cross_entropy(x, y, reduction='sum'); F.cross_entropy(x, y, reduction='none'); "
        "F.cross_entropy(x, y, label_smoothing=0.1)",
        "6x5 i5:6; 4x3 i3:4; 5x7 i7:5; 1x3 i3:1",
    ),
    *calls("cross_entropy", "F.cross_entropy(x, y, ignore_index=1)", "6x5 i5:6; 5x3 i3:5"),
    *calls(
        "cross_entropy",
        "F.cross_entropy(x, y, ignore_index=1, reduction='none'); "
        "F.cross_entropy(x, y, label_smoothing=0.1, reduction='sum', ignore_index=1); "
        "F.cross_entropy(x, y, label_smoothing=0.1, reduction='none', ignore_index=1)",
        "6x5 i5:6",
    ),
    *calls(
        "cross_entropy",
        "F.cross_entropy(x, y, z); F.cross_entropy(x, y, weight=z, ignore_index=2); "
        "F.cross_entropy(x, y, z, reduction='sum'); F.cross_entropy(x, y, z, label_smoothing=0.1, ignore_index=1)",
        "6x5 i5:6 n:5",
    ),
    *calls("cross_entropy", "F.cross_entropy(x, y)", "6x5 n:6x5; 5x3 n:5x3; 4x5x3 i5:4x3; 5 i5:-"),
    *calls(
        "cross_entropy",
        "F.cross_entropy(x, y, reduction='sum', label_smoothing=0.2); F.cross_entropy(x, y, reduction='none')",
        "6x5 n:6x5",
    ),
    *calls("cross_entropy", "F.cross_entropy(x, y, reduction='none')", "4x5x3 i5:4x3"),
    *calls("cross_entropy", "F.cross_entropy(x.flatten(0, 1), y.flatten(0, 1))", "4x3x5 i5:4x3"),
    *calls("nll_loss", "F.nll_loss(x.log_softmax(-1), y)", "6x5 i5:6; 5x3 i3:5"),
    *calls(
        "nll_loss", "F.nll_loss(x, y, reduction='sum', ignore_index=1); F.nll_loss(x, y, reduction='none')", "6x5 i5:6"
    ),
    *calls("nll_loss", "F.nll_loss(x, y, z)", "6x5 i5:6 n:5"),
    *each("mse_loss l1_loss smooth_l1_loss huber_loss", "F.OP(x, y)", "5x3 5x3"),
    *calls("mse_loss", "F.mse_loss(x, y); F.mse_loss(x, y, reduction='sum')", "5x3 5x3; 1x3 1x3"),
    *each("mse_loss l1_loss", "F.OP(x, y, reduction='none')", "5x3 5x3"),
    *calls("smooth_l1_loss", "F.smooth_l1_loss(x, y, beta=0.5)", "5x3 5x3"),
    *calls("huber_loss", "F.huber_loss(x, y, delta=0.5)", "5x3 5x3"),
    *calls("binary_cross_entropy", "F.binary_cross_entropy(x, y)", "u:5x3 u:5x3"),
    *calls("binary_cross_entropy", "F.binary_cross_entropy(x, y, z)", "u:5x3 u:5x3 n:5x3"),
    *calls("binary_cross_entropy_with_logits", "F.binary_cross_entropy_with_logits(x, y)", "5x3 u:5x3"),
    *calls(
        "binary_cross_entropy_with_logits",
        "F.binary_cross_entropy_with_logits(x, y, pos_weight=z)",
        "5x3 u:5x3 n:3",
    ),
    *calls("kl_div", "F.kl_div(x, y); F.kl_div(x, y, reduction='batchmean')", "5x3 u:5x3"),
    *calls("kl_div", "F.kl_div(x, y, reduction='sum', log_target=True)", "5x3 u:5x3"),
    # normalisations over what may be cut
    *calls("layer_norm", "F.layer_norm(x, (5,), y, z)", "3x5 5 5"),
    *calls("standardized", "F.layer_norm(x, (5,))", "3x5"),
    *calls("batch_norm", "F.batch_norm(x, None, None, y, z, True)", "5x3 3 3; 3x2x5 2 2"),
    *calls("batch_norm", "F.batch_norm(x, y, z * z + 0.5)", "5x3 n:3 n:3"),
    *calls("instance_norm", "F.instance_norm(x, weight=y, bias=z)", "3x2x5 2 2"),
    *calls("local_response_norm", "F.local_response_norm(x, 2)", "3x4x5"),
    *calls("embedding_bag", "F.embedding_bag(x, y); F.embedding_bag(x, y, mode='max')", "i7:4x5 7x3"),
    *calls("embedding_bag", "F.embedding_bag(x, y, mode='sum', padding_idx=1)", "i7:4x5 7x3"),
    *calls("embedding_bag", "F.embedding_bag(x, y, mode='sum', per_sample_weights=z)", "i7:4x5 7x3 4x5"),
    *calls("one_hot", "F.one_hot(x)", "i7:4x5"),
    # more losses
    *calls("linear_cross_entropy", "F.linear_cross_entropy(x, y, z, ignore_index=1)", "6x3 5x3 i5:6"),
    *calls("nll_loss", "F.nll_loss(x, y, ignore_index=1)", "4x5x3 i5:4x3"),
    *calls("soft_margin_loss", "F.soft_margin_loss(x, y); F.soft_margin_loss(x, y, reduction='none')", "5x3 n:5x3"),
    *calls("hinge_embedding_loss", "F.hinge_embedding_loss(x, y.sign(), margin=0.5)", "5x3 n:5x3"),
    *calls("margin_ranking_loss", "F.margin_ranking_loss(x, y, z.sign(), margin=0.1)", "5x3 5x3 n:5x3"),
    *calls("poisson_nll_loss", "F.poisson_nll_loss(x, y, full=True)", "5x3 p:5x3"),
    *calls("gaussian_nll_loss", "F.gaussian_nll_loss(x, y, z)", "5x3 5x3 p:5x3; 5x3 5x3 p:5x1"),
    *calls("cosine_embedding_loss", "F.cosine_embedding_loss(x, y, z.sign(), margin=0.1)", "5x3 5x3 n:5"),
    *calls("triplet_margin_loss", "F.triplet_margin_loss(x, y, z, swap=True)", "5x3 5x3 5x3"),
    *calls("multi_margin_loss", "F.multi_margin_loss(x, y)", "5x3 i3:5"),
    *calls("multilabel_margin_loss", "F.multilabel_margin_loss(x, y)", "5x3 i3:5x3"),
    *calls("ctc_loss", "F.ctc_loss(x.log_softmax(-1), y + 1, (4, 3), (2, 1))", "4x2x5 i4:2x2"),
]
