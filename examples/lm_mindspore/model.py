"""The model of `lm/model.py` as plain `nn.Cell` code: the same layers, matrix for matrix.

Nothing in it knows of meshes or ranks. Sizes are read from the tensors, so the same code runs on dense tensors and on
distributed ones, whose shapes are the global shapes. Only ops that MindSpore has on a CPU are used.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from lm.config import NORM_EPSILON, ROTARY_BASE, ModelSizes
from lm.weights import draw_matrices
from mindspore import Parameter, Tensor, mint, nn, ops


class RMSNorm(nn.Cell):
    """Root mean square normalisation of the last dim (Zhang and Sennrich 2019); MindSpore's own has no CPU kernel."""

    def __init__(self, width: int, dtype: Any) -> None:
        super().__init__()
        self.weight = Parameter(ops.ones((width,), dtype))

    def construct(self, x: Tensor) -> Tensor:
        """`[..., width]` to the same."""
        return x * mint.rsqrt(mint.mean(x * x, -1, True) + NORM_EPSILON) * self.weight


class Rotary(nn.Cell):
    """Rotary position embedding (Su et al. 2021, RoFormer).

    Turns pairs of a head's channels by an angle that grows with the position.
    """

    def __init__(self, head_width: int, sequence: int, dtype: Any) -> None:
        super().__init__()
        frequencies = ROTARY_BASE ** (-np.arange(0, head_width, 2, dtype=np.float64) / head_width)
        angles = np.outer(np.arange(sequence, dtype=np.float64), frequencies)
        self.register_buffer("cos", Tensor(np.cos(angles)).astype(dtype), persistent=False)
        self.register_buffer("sin", Tensor(np.sin(angles)).astype(dtype), persistent=False)

    def construct(self, x: Tensor) -> Tensor:
        """Turns queries or keys `[batch, heads, sequence, head_width]`."""
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        first, second = mint.chunk(x, 2, -1)
        return mint.cat([first * cos - second * sin, first * sin + second * cos], -1)


class Attention(nn.Cell):
    """Causal self-attention with separate query, key, value and output projections."""

    def __init__(self, sizes: ModelSizes, dtype: Any) -> None:
        super().__init__()
        self.head_width = sizes.head_width
        self.query = mint.nn.Linear(sizes.d_model, sizes.d_model, bias=False, dtype=dtype)
        self.key = mint.nn.Linear(sizes.d_model, sizes.d_model, bias=False, dtype=dtype)
        self.value = mint.nn.Linear(sizes.d_model, sizes.d_model, bias=False, dtype=dtype)
        self.output = mint.nn.Linear(sizes.d_model, sizes.d_model, bias=False, dtype=dtype)
        self.rotary = Rotary(sizes.head_width, sizes.sequence, dtype)
        future = np.triu(np.ones((sizes.sequence, sizes.sequence), np.bool_), 1)
        self.register_buffer("future", Tensor(future), persistent=False)

    def construct(self, x: Tensor) -> Tensor:
        """Mixes along the sequence: `[batch, sequence, d_model]` to the same."""
        batch, sequence, width = x.shape
        q, k, v = self._heads(self.query(x)), self._heads(self.key(x)), self._heads(self.value(x))
        scores = mint.matmul(self.rotary(q), self.rotary(k).transpose(2, 3)) * self.head_width**-0.5
        scores = scores.masked_fill(self.future[:sequence, :sequence], float("-inf"))
        mixed = mint.matmul(mint.nn.functional.softmax(scores, -1), v)
        return self.output(mixed.transpose(1, 2).reshape(batch, sequence, width))

    def _heads(self, x: Tensor) -> Tensor:
        """`[batch, sequence, d_model]` to `[batch, heads, sequence, head_width]`."""
        batch, sequence, _ = x.shape
        return x.reshape(batch, sequence, -1, self.head_width).transpose(1, 2)


class FeedForward(nn.Cell):
    """SwiGLU (Shazeer 2020, "GLU variants improve transformer"): a gated feed-forward layer."""

    def __init__(self, sizes: ModelSizes, dtype: Any) -> None:
        super().__init__()
        self.gate = mint.nn.Linear(sizes.d_model, sizes.d_hidden, bias=False, dtype=dtype)
        self.up = mint.nn.Linear(sizes.d_model, sizes.d_hidden, bias=False, dtype=dtype)
        self.down = mint.nn.Linear(sizes.d_hidden, sizes.d_model, bias=False, dtype=dtype)

    def construct(self, x: Tensor) -> Tensor:
        """Works on each position alone: `[batch, sequence, d_model]` to the same."""
        return self.down(mint.nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Cell):
    """One pre-norm layer: attention, then feed-forward, each added to the residual stream."""

    def __init__(self, sizes: ModelSizes, dtype: Any) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(sizes.d_model, dtype)
        self.attention = Attention(sizes, dtype)
        self.feed_forward_norm = RMSNorm(sizes.d_model, dtype)
        self.feed_forward = FeedForward(sizes, dtype)

    def construct(self, x: Tensor) -> Tensor:
        """`[batch, sequence, d_model]` to the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class LanguageModel(nn.Cell):
    """Bytes in, scores of the next byte out."""

    def __init__(self, sizes: ModelSizes, dtype: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.d_model, embedding_table="zeros", dtype=dtype)
        self.blocks = nn.CellList([Block(sizes, dtype) for _ in range(sizes.layers)])
        self.norm = RMSNorm(sizes.d_model, dtype)
        self.head = mint.nn.Linear(sizes.d_model, sizes.vocabulary, bias=False, dtype=dtype)

    def construct(self, tokens: Tensor) -> Tensor:
        """Scores `[batch, sequence, vocabulary]` of int64 tokens `[batch, sequence]`."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_model(sizes: ModelSizes, dtype: Any, seed: int) -> LanguageModel:
    """A fresh model whose weights depend only on its sizes, the dtype and the seed: those that `lm/model.py` starts from."""
    model = LanguageModel(sizes, dtype)
    matrices = {name: parameter for name, parameter in model.parameters_and_names() if parameter.ndim == 2}
    shapes = [(name, tuple(parameter.shape)) for name, parameter in matrices.items()]
    for name, values in draw_matrices(shapes, sizes.layers, dtype, seed):
        matrices[name].set_data(values)
    return model


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats per byte: `[batch, sequence, vocabulary]` scores, `[batch, sequence]` targets.

    Where the scores are sharded by vocabulary they stay so: what is exchanged has the shape of the targets.
    """
    log_probabilities = ops.log_softmax(logits, -1)
    return -mint.gather(log_probabilities, -1, targets.unsqueeze(-1)).mean()
