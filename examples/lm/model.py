"""The model: a byte-level decoder (pre-norm, RMSNorm, rotary positions, SwiGLU), as plain `nn.Module` code.

Nothing in it knows of meshes or ranks. Sizes are read from the tensors, so the same forward runs on dense tensors and
on distributed ones, whose shapes are the global shapes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import NORM_EPSILON, ROTARY_BASE, ModelSizes
from .weights import draw_matrices


class Rotary(nn.Module):
    """Rotary position embedding (Su et al. 2021, RoFormer).

    Turns pairs of a head's channels by an angle that grows with the position.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_width: int, sequence: int, dtype: torch.dtype) -> None:
        super().__init__()
        frequencies = ROTARY_BASE ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
        angles = torch.outer(torch.arange(sequence, dtype=torch.float64), frequencies)
        # Recomputed, not learned: kept out of the checkpoint.
        self.register_buffer("cos", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Turns queries or keys `[batch, heads, sequence, head_width]`."""
        cos, sin = self.cos[: x.shape[-2]].to(x.dtype), self.sin[: x.shape[-2]].to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Attention(nn.Module):
    """Causal self-attention with separate query, key, value and output projections."""

    def __init__(self, sizes: ModelSizes, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_width = sizes.head_width
        self.query = nn.Linear(sizes.d_model, sizes.d_model, bias=False, dtype=dtype)
        self.key = nn.Linear(sizes.d_model, sizes.d_model, bias=False, dtype=dtype)
        self.value = nn.Linear(sizes.d_model, sizes.d_model, bias=False, dtype=dtype)
        self.output = nn.Linear(sizes.d_model, sizes.d_model, bias=False, dtype=dtype)
        self.rotary = Rotary(sizes.head_width, sizes.sequence, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Mixes along the sequence: `[batch, sequence, d_model]` to the same."""
        q, k, v = self._heads(self.query(x)), self._heads(self.key(x)), self._heads(self.value(x))
        mixed = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output

    def _heads(self, x: Tensor) -> Tensor:
        """`[batch, sequence, d_model]` to `[batch, heads, sequence, head_width]`."""
        batch, sequence, _ = x.shape
        return x.view(batch, sequence, -1, self.head_width).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, "GLU variants improve transformer"): a gated feed-forward layer."""

    def __init__(self, sizes: ModelSizes, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.d_model, sizes.d_hidden, bias=False, dtype=dtype)
        self.up = nn.Linear(sizes.d_model, sizes.d_hidden, bias=False, dtype=dtype)
        self.down = nn.Linear(sizes.d_hidden, sizes.d_model, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Works on each position alone: `[batch, sequence, d_model]` to the same."""
        output: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return output


class Block(nn.Module):
    """One pre-norm layer: attention, then feed-forward, each added to the residual stream."""

    def __init__(self, sizes: ModelSizes, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.d_model, eps=NORM_EPSILON, dtype=dtype)
        self.attention = Attention(sizes, dtype)
        self.feed_forward_norm = nn.RMSNorm(sizes.d_model, eps=NORM_EPSILON, dtype=dtype)
        self.feed_forward = FeedForward(sizes, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, sequence, d_model]` to the same."""
        x = x + self.attention(self.attention_norm(x))
        output: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return output


class LanguageModel(nn.Module):
    """Bytes in, scores of the next byte out."""

    def __init__(self, sizes: ModelSizes, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.d_model, dtype=dtype)
        self.blocks = nn.ModuleList(Block(sizes, dtype) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.d_model, eps=NORM_EPSILON, dtype=dtype)
        self.head = nn.Linear(sizes.d_model, sizes.vocabulary, bias=False, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores `[batch, sequence, vocabulary]` of int64 tokens `[batch, sequence]`."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def build_model(sizes: ModelSizes, dtype: torch.dtype, seed: int) -> LanguageModel:
    """A fresh model whose weights depend only on its sizes, the dtype and the seed."""
    with torch.device("cpu"):
        model = LanguageModel(sizes, dtype)
    matrices = {name: parameter for name, parameter in model.named_parameters() if parameter.ndim == 2}
    shapes = [(name, tuple(parameter.shape)) for name, parameter in matrices.items()]
    with torch.no_grad():
        for name, values in draw_matrices(shapes, sizes.layers, dtype, seed):
            matrices[name].copy_(values)
    return model


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats per byte: `[batch, sequence, vocabulary]` scores, `[batch, sequence]` targets.

    Half-precision scores are summed in float32.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
