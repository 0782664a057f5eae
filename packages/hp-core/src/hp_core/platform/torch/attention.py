"""Attention of some of the queries: their own rows of the causal mask, and dropout that is drawn from outside."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

__all__ = ["attention_rows"]


def attention_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    first_query: int | None,
    scale: float | None,
    enable_gqa: bool,
    dropout: float,
    draw: Callable[[torch.Tensor], torch.Tensor] | None,
) -> torch.Tensor:
    """Scaled dot-product attention of the queries that start at `first_query`.

    Args:
        query: [..., heads, queries, dim], this rank's queries.
        key: [..., key heads, keys, dim].
        value: [..., key heads, keys, value dim].
        mask: broadcasts to [..., heads, queries, keys]; True (or 0) where a query may look.
        first_query: position of the first query, for the causal mask; None without one.
        scale: of the products; default 1 / sqrt(dim).
        enable_gqa: whether groups of query heads share a key head.
        dropout: probability to drop an element of the attention matrix.
        draw: gives uniform numbers for this rank's rows of that matrix, on the device of its argument.
    """
    if first_query is not None:
        if mask is not None:
            raise RuntimeError(
                "attention: is_causal and attn_mask exclude each other; put the causal part into the mask."
            )
        last = torch.arange(first_query, first_query + query.shape[-2], device=query.device)
        mask = torch.arange(key.shape[-2], device=query.device) <= last.unsqueeze(-1)
    if query.shape[:-3] != key.shape[:-3] or key.shape[:-3] != value.shape[:-3]:
        # torch's own attention doesn't stretch the batch when another dim is empty
        batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
        query, key, value = (tensor.expand(*batch, *tensor.shape[-3:]) for tensor in (query, key, value))
    if draw is None:
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa and query.dim() > 2:
        groups = query.shape[-3] // max(key.shape[-3], 1)
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    products = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if mask is not None and mask.dtype == torch.bool:
        products = products.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        products = products + mask
    weights = products.softmax(-1)
    if mask is not None:
        # as torch has it: a query that may look nowhere gets zeros
        weights = weights.masked_fill((products == float("-inf")).all(-1, keepdim=True), 0)
    kept = (draw(weights) >= dropout).to(weights.dtype)
    return (weights * (kept / (1 - dropout))) @ value
