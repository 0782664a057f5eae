"""Scaled dot-product attention: batch, heads and queries may be cut; keys and values are whole.

A rank whose queries start late sees its own rows of the causal mask. Dropout is drawn by the global index in the attention
matrix, so that it is what dense attention drops, on any layout; such a call materialises this rank's rows of that matrix.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from hp_core.errors import ShardingRuleError
from hp_core.layout import Layout
from hp_core.platform import get_platform
from hp_core.platform.protocol import Tensor
from hp_core.random import random_like
from hp_core.rules.registry import rule
from hp_core.rules.rule import PLAIN, OpCall, Operand, Output, Strategy, solve
from hp_core.rules.spec import TensorSpec

__all__: list[str] = []


@rule(
    "scaled_dot_product_attention",
    "query key value attn_mask dropout_p is_causal scale enable_gqa",
    sees_floats=True,
)
def _attention(call: OpCall) -> Strategy:
    """[batch..., heads, queries, dim] x [batch..., heads, keys, dim] x [batch..., heads, keys, value dim].

    With grouped queries (`enable_gqa`) axes that cut the heads must divide the number of key heads, so that each rank
    has whole groups.
    """
    query, key, value = call.spec("query"), call.spec("key"), call.spec("value")
    dropout = call.get("dropout_p") or 0.0
    if not 0.0 <= dropout < 1.0:
        raise ShardingRuleError(f"attention: dropout_p must be at least 0 and below 1, got {dropout}.")
    heads: tuple[Any, ...] = ("heads",) if query.ndim > 2 else ()
    grouped = bool(heads) and query.shape[-3] != key.shape[-3]
    # batches broadcast: a dim of size 1 beside a longer one is whole
    batches = [tuple(spec.shape[:-3]) for spec in (query, key, value)]
    sizes = tuple(map(max, zip(*batches, strict=True)))
    rows: tuple[Any, ...] = (*range(len(sizes)), *heads, "queries", None)

    def labels(spec: TensorSpec, last: tuple[Any, ...]) -> tuple[Any, ...]:
        own = tuple(dim if spec.shape[dim] == size else None for dim, size in enumerate(sizes))
        return (*own, *heads, *last)

    operands = [
        Operand(query, labels(query, ("queries", None)), PLAIN),
        Operand(key, labels(key, (None, None)), PLAIN),
        Operand(value, labels(value, (None, None)), PLAIN),
    ]
    shape = (*sizes, *query.shape[len(sizes) : -1], key.shape[-2])
    mask = call.get("attn_mask")
    if isinstance(mask, TensorSpec):
        offset = len(rows) - mask.ndim
        own = tuple(rows[offset + d] if size == shape[offset + d] else None for d, size in enumerate(mask.shape))
        operands.append(Operand(mask, own, PLAIN))

    mesh = query.layout.mesh

    def aligned(label: Any, axes: tuple[int, ...]) -> bool:
        if label != "heads" or not grouped:
            return True
        parts = 1
        for axis in axes:
            parts *= mesh.shape[axis]
        return bool(key.shape[-3] % parts == 0)

    result = Output(rows, (*shape[:-1], value.shape[-1]))
    strategy = solve(
        operands,
        [result, Output(rows, shape)],
        aligned=aligned,
        unequal=frozenset({"heads"} if grouped else ()),
    )
    output, (matrix, _) = strategy.outputs
    strategy.outputs = (output,)
    causal = bool(call.get("is_causal")) and bool(matrix.axes_of(len(shape) - 2))
    if dropout or causal or len(set(batches)) > 1:
        strategy.local = "attention_rows"
        strategy.bound = {
            "first_query": matrix.bounds(shape)[-2][0] if call.get("is_causal") else None,
            "scale": call.get("scale"),
            "enable_gqa": bool(call.get("enable_gqa")),
            "dropout": dropout,
            "draw": partial(_uniform, matrix, shape) if dropout else None,
        }
    return strategy


def _uniform(layout: Layout, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """This rank's part of uniform numbers for the whole attention matrix."""
    tensors = get_platform().tensors
    empty = tensors.full(
        layout.local_shape(shape), None, tensors.dtype_of_name("float32"), tensors.device_type_of(like)
    )
    return random_like(empty, layout, shape, "uniform")
