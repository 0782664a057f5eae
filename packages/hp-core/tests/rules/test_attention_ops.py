"""Attention in detail: dropout by the global index, causal masks of cut queries, and torch's multi-head attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hp_core import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh, manual_seed
from hp_core.errors import ShardingRuleError
from hp_core.testing import assert_same_error, record_collectives, run_ranks

RANKS = pytest.mark.parametrize("ranks", [2, 4])
CUTS = {2: [(0,), (1,), (2,), (None,)], 4: [(0, 1), (1, 2), (2, 2), (None, 2)]}


def qkv(cuts: tuple[int | None, ...], key_heads: int = 4) -> list[Any]:
    """Query, key and value [2, heads, 5, 4] in float64, cut alike."""
    mesh = init_device_mesh("cpu", (2,) * len(cuts), mesh_dim_names=("a", "b")[: len(cuts)])
    placements = [Replicate() if cut is None else Shard(cut) for cut in cuts]
    generator = torch.Generator().manual_seed(2)
    return [
        distribute_tensor(
            torch.randn(2, heads, 5, 4, generator=generator, dtype=torch.float64), mesh, placements, src_data_rank=None
        ).requires_grad_()
        for heads in (4, key_heads, key_heads)
    ]


def dropped(cuts: tuple[int | None, ...], options: dict[str, Any], key_heads: int) -> list[torch.Tensor]:
    """Attention with dropout and its gradients; and the same by hand, on dense tensors with the same mask."""
    tensors = qkv(cuts, key_heads)
    manual_seed(4)
    result = F.scaled_dot_product_attention(*tensors, dropout_p=0.4, **options)
    result.square().sum().backward()
    found = [result.detach().full_tensor(), *[tensor.grad.full_tensor() for tensor in tensors]]

    dense = [tensor.detach().full_tensor().requires_grad_() for tensor in tensors]
    manual_seed(4)
    uniform = torch.rand_like(
        distribute_tensor(torch.empty(2, 4, 5, 5), tensors[0].device_mesh, [Replicate()] * len(cuts))
    )
    key, value = (tensor.repeat_interleave(4 // key_heads, 1) for tensor in dense[1:])
    products = dense[0] @ key.mT * options.get("scale", 0.5)
    if options.get("is_causal"):
        products = products.masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), float("-inf"))
    weights = products.softmax(-1) * (uniform.to_local() >= 0.4) / 0.6
    by_hand = weights @ value
    by_hand.square().sum().backward()
    wanted = [by_hand.detach(), *[tensor.grad for tensor in dense]]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    return found


@RANKS
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True}], ids=str)
def test_dropout_of_attention_is_that_of_the_dense_matrix(ranks: int, options: dict[str, Any]) -> None:
    key_heads = 2 if options.get("enable_gqa") else 4
    everywhere = [run_ranks(ranks, dropped, cuts, options, key_heads)[0] for cuts in CUTS[ranks]]
    for found in everywhere[1:]:
        for one, other in zip(found, everywhere[0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@RANKS
def test_dropout_with_a_mask(check_ops: Callable[..., None], ranks: int) -> None:
    """A vanishing dropout takes the same way as any, and must give what attention without dropout gives."""

    def attention(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p=1e-12 if isinstance(q, DTensor) else 0.0)

    check_ops(
        ranks,
        [
            ("float mask", attention, "2x2x3x2 2x2x5x2 2x2x5x2 n:3x5"),
            ("mask of bools", attention, "2x2x3x2 2x2x5x2 2x2x5x2 b:2x1x3x5"),
        ],
        most=6,
    )


def test_causal_attention_of_cut_queries_gathers_keys_and_values_only() -> None:
    def kinds() -> list[str]:
        q, k, v = qkv((2,))
        with record_collectives() as log:
            result = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        assert result.layout is q.layout
        return [entry.kind for entry in log]

    assert run_ranks(2, kinds) == [["all_gather", "all_gather"]] * 2


def test_a_mask_beside_the_causal_one_is_refused() -> None:
    def refused() -> None:
        q, k, v = qkv((2,))
        mask = distribute_tensor(torch.ones(5, 5, dtype=torch.bool), q.device_mesh, [Replicate()])
        F.scaled_dot_product_attention(q, k, v, mask, is_causal=True)

    assert_same_error(2, refused, (RuntimeError, ShardingRuleError), "attn_mask")


def multi_head(ranks: int, need_weights: bool, average: bool, masks: bool, self_attention: bool) -> None:
    shape, names = ((2,), ("tp",)) if ranks == 2 else ((2, 2), ("dp", "tp"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(0)
    dense = nn.MultiheadAttention(8, 4, batch_first=True, dtype=torch.float64)
    sharded = nn.MultiheadAttention(8, 4, batch_first=True, dtype=torch.float64)
    for name, parameter in dense.named_parameters():
        # the packed projection cut over tp by rows, the output projection by columns
        cut = Shard(0) if name.startswith("in_proj") else Shard(1) if parameter.dim() == 2 else Replicate()
        placements = [Replicate()] * (mesh.ndim - 1) + [cut]
        owner, _, leaf = name.rpartition(".")
        setattr(
            sharded.get_submodule(owner),
            leaf,
            nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)),
        )
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(4, 5, 8, generator=generator, dtype=torch.float64)
    memory = query if self_attention else torch.randn(4, 3, 8, generator=generator, dtype=torch.float64)
    length = memory.shape[1]
    batch = [Shard(0), Replicate()][-ranks // 2 :] if ranks == 4 else [Replicate()]
    padding = torch.arange(length) >= torch.tensor([length, 2, 3, 1]).unsqueeze(1)
    causal = torch.ones(5, length, dtype=torch.bool).triu(1)

    def run(module: Any, place: Callable[[torch.Tensor, bool], Any]) -> tuple[Any, ...]:
        one = place(query, True).requires_grad_()
        other = one if self_attention else place(memory, True).requires_grad_()
        options = {"key_padding_mask": place(padding, True), "attn_mask": place(causal, False)} if masks else {}
        result, weights = module(one, other, other, need_weights=need_weights, average_attn_weights=average, **options)
        assert (weights is None) == (not need_weights)
        (result.square().sum() + (weights.square().sum() if need_weights else 0)).backward()
        gradients = [parameter.grad for _, parameter in sorted(module.named_parameters())]
        return (result, *([weights] if need_weights else []), one.grad, *gradients)

    def distributed(value: torch.Tensor, by_batch: bool) -> Any:
        placements = batch if by_batch else [Replicate()] * mesh.ndim
        return distribute_tensor(value, mesh, placements, src_data_rank=None)

    wanted = run(dense, lambda value, _: value.clone())
    for one, other in zip(run(sharded, distributed), wanted, strict=True):
        torch.testing.assert_close(one.detach().full_tensor(), other.detach(), rtol=1e-10, atol=1e-10)


@RANKS
@pytest.mark.parametrize(
    ("need_weights", "average", "masks", "self_attention"),
    [(False, True, False, True), (True, True, False, True), (True, False, True, True), (False, True, True, False)],
)
def test_multi_head_attention_of_torch(
    ranks: int, need_weights: bool, average: bool, masks: bool, self_attention: bool
) -> None:
    run_ranks(ranks, multi_head, ranks, need_weights, average, masks, self_attention)
