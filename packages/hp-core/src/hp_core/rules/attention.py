"""Scaled dot-product attention: batch and heads may be cut; a cut of the query's sequence only where no position matters."""

from __future__ import annotations

from typing import Any

from hp_core.errors import ShardingRuleError
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
    if call.get("dropout_p"):
        raise ShardingRuleError(
            f"attention with dropout_p={call.get('dropout_p')} has no rule: its mask would differ from the dense one; apply "
            f"dropout outside of attention, or set dropout_p=0."
        )
    query, key, value = call.spec("query"), call.spec("key"), call.spec("value")
    batch: tuple[Any, ...] = tuple(range(query.ndim - 3))
    heads: tuple[Any, ...] = ("heads",) if query.ndim > 2 else ()
    queries = None if call.get("is_causal") else "queries"
    operands = [
        Operand(query, (*batch, *heads, queries, None), PLAIN),
        Operand(key, (*batch, *heads, None, None), PLAIN),
        Operand(value, (*batch, *heads, None, None), PLAIN),
    ]
    mask = call.get("attn_mask")
    if isinstance(mask, TensorSpec):
        full = (*batch, *heads, queries, None)
        sizes = (*query.shape[:-1], key.shape[-2])
        offset = len(full) - mask.ndim
        labels = tuple(full[offset + d] if size == sizes[offset + d] else None for d, size in enumerate(mask.shape))
        operands.append(Operand(mask, labels, PLAIN))

    mesh = query.layout.mesh
    grouped = bool(heads) and query.shape[-3] != key.shape[-3]

    def aligned(label: Any, axes: tuple[int, ...]) -> bool:
        if label != "heads" or not grouped:
            return True
        parts = 1
        for axis in axes:
            parts *= mesh.shape[axis]
        return bool(key.shape[-3] % parts == 0)

    result = Output((*batch, *heads, queries, None), (*query.shape[:-1], value.shape[-1]))
    return solve(operands, [result], aligned=aligned, unequal=frozenset({"heads"} if grouped else ()))
