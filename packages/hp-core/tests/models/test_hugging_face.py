"""Models of Hugging Face, unchanged, over tensor-parallel ranks: losses, all gradients and AdamW steps equal the dense ones.

Tiny Llama and Qwen3 with random weights; nothing is downloaded.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from hp_core import (
    ColwiseParallel,
    DTensor,
    Layout,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    ShardingPlan,
    distribute_tensor,
    init_device_mesh,
    init_empty_weights,
    init_parameters,
    loss_parallel,
    manual_seed,
    parallelize_module,
    record_collectives,
    shard_module,
)
from hp_core.testing import run_ranks

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers", reason="transformers needs Python 3.11")

LAYER = "model.layers.*"
IDS = torch.randint(0, 50, (4, 8), generator=torch.Generator().manual_seed(3))


class Case(NamedTuple):
    """A model and how it is cut."""

    kind: str
    plan: str
    ranks: int
    tied: bool = False

    def __str__(self) -> str:
        return f"{self.kind}-{self.plan}-{self.ranks}{'-tied' if self.tied else ''}"


def build(case: Case) -> Any:
    """Eight query heads share four (on two tensor-parallel ranks: two) key and value heads."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config, model = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}[case.kind]
    settings = config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=44,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4 if case.ranks == 4 else 2,
        head_dim=8,
        max_position_embeddings=32,
        tie_word_embeddings=case.tied,
        use_cache=False,
    )
    torch.manual_seed(0)
    return model(settings).double()


# -- plans ----------------------------------------------------------------------------------------------------------


def tensor_parallel(case: Case) -> dict[str, Any]:
    """Plain activations, cut inside of attention and MLP: the plan that torch's tutorials have."""
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        f"{LAYER}.self_attn.[qkv]_proj": ColwiseParallel(),
        f"{LAYER}.self_attn.o_proj": RowwiseParallel(),
        f"{LAYER}.mlp.gate_proj": ColwiseParallel(),
        f"{LAYER}.mlp.up_proj": ColwiseParallel(),
        f"{LAYER}.mlp.down_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    if case.kind == "qwen3":  # norms of each head, on [batch, sequence, heads, head_dim] with the heads cut
        plan[f"{LAYER}.self_attn.[qk]_norm"] = SequenceParallel(sequence_dim=2, use_local_output=True)
    return plan


def sequence_parallel(case: Case) -> dict[str, Any]:
    """Between the layers, activations are DTensors cut along the sequence; logits stay cut along the vocabulary."""
    sequence = Shard(1)
    return tensor_parallel(case) | {
        "model.embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=sequence, use_local_output=False
        ),
        f"{LAYER}.*_layernorm": SequenceParallel(),
        "model.norm": SequenceParallel(),
        f"{LAYER}.self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": sequence},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        f"{LAYER}.self_attn.o_proj": RowwiseParallel(output_layouts=sequence, use_local_output=False),
        f"{LAYER}.mlp": PrepareModuleInput(input_layouts=sequence, desired_input_layouts=Replicate()),
        f"{LAYER}.mlp.down_proj": RowwiseParallel(output_layouts=sequence, use_local_output=False),
        "lm_head": ColwiseParallel(input_layouts=sequence, use_local_output=False),
    }


def data_and_tensor_parallel(case: Case) -> ShardingPlan:
    """All activations are DTensors on (dp, tp); what the model computes of positions alone is whole on every rank."""
    batch = ("dp",)
    weights: dict[str, Any] = {
        "model.embed_tokens.weight": ("tp",),
        f"{LAYER}.self_attn.[qkv]_proj.weight": ("tp",),
        f"{LAYER}.self_attn.o_proj.weight": (None, "tp"),
        f"{LAYER}.mlp.gate_proj.weight": ("tp",),
        f"{LAYER}.mlp.up_proj.weight": ("tp",),
        f"{LAYER}.mlp.down_proj.weight": (None, "tp"),
    }
    if not case.tied:
        weights["lm_head.weight"] = ("tp",)
    return ShardingPlan(
        plan=weights,
        input_plan={"": {"input_ids": batch}, LAYER: {"attention_mask": batch}},
        output_plan={
            "model.embed_tokens": batch,
            "model.rotary_emb": [(), ()],
            f"{LAYER}.self_attn.o_proj": batch,
            f"{LAYER}.mlp.down_proj": batch,
        },
    )


# -- against the dense model ----------------------------------------------------------------------------------------


def distributed(case: Case, model: Any) -> Any:
    if case.plan == "dp-tp":
        mesh = init_device_mesh("cpu", (2, case.ranks // 2), mesh_dim_names=("dp", "tp"))
        return shard_module(model, mesh, data_and_tensor_parallel(case))
    mesh = init_device_mesh("cpu", (case.ranks,), mesh_dim_names=("tp",))
    return parallelize_module(model, mesh, {"tp": tensor_parallel, "sp": sequence_parallel}[case.plan](case))


def loss_of(logits: Any) -> Any:
    """Next-token cross entropy in float64 (the models' own is computed in float32)."""
    targets: Any = torch.cat([IDS[:, 1:], torch.full((4, 1), -100)], 1)
    if not isinstance(logits, DTensor):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    batch = logits.layout.axes_of(0)
    layout = Layout.from_device_mesh(logits.device_mesh)(
        *([logits.device_mesh.mesh_dim_names[batch[0]]] if batch else [])
    )
    targets = DTensor.from_local(targets, layout.replicated).redistribute(layout)
    with loss_parallel():  # the classes are cut over tp, and never gathered
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(case: Case) -> list[str]:
    dense = build(case)
    model = distributed(case, build(case))
    if case.tied:
        assert model.lm_head.weight is model.model.embed_tokens.weight
    cut = sum(isinstance(p, DTensor) and bool(p.layout.sharded_axes) for p in model.parameters())
    assert cut == 2 * 7 + (1 if case.tied else 2)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01, weight_decay=0.1) for one in (model, dense)]
    kinds: list[str] = []
    for step in range(3):
        with record_collectives() as log:
            loss = loss_of(model(input_ids=IDS).logits)
        kinds = [record.kind for record in log]
        expected = loss_of(dense(input_ids=IDS).logits)
        torch.testing.assert_close(full(loss), expected, rtol=1e-9, atol=1e-9)
        loss.backward()
        expected.backward()
        for (name, parameter), other in zip(model.named_parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(
                full(parameter.grad), other.grad, rtol=1e-9, atol=1e-9, msg=f"{name}, step {step}"
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, parameter), other in zip(model.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(full(parameter), other, rtol=1e-6, atol=1e-8, msg=name)
    own = model(input_ids=IDS, labels=IDS).loss if case.plan == "tp" else None  # with the models' own loss
    assert own is None or abs(own.item() - dense(input_ids=IDS, labels=IDS).loss.item()) < 1e-5
    return kinds


CASES = [
    Case("llama", "tp", 2),
    Case("llama", "tp", 4, tied=True),
    Case("qwen3", "tp", 2, tied=True),
    Case("qwen3", "tp", 4),
    Case("llama", "sp", 2),
    Case("qwen3", "sp", 4, tied=True),
    Case("llama", "dp-tp", 4, tied=True),
    Case("qwen3", "dp-tp", 4),
]


COLLECTIVES = {
    # the embedding, two sums for each of two layers, the logits
    "tp": ["all_reduce"] * 5 + ["all_gather"],
    # sums are scattered along the sequence, and gathered where they are used; the loss exchanges maximum and sum
    "sp": ["reduce_scatter", *["all_gather", "reduce_scatter"] * 4, "all_gather", "all_reduce", "all_reduce"],
    # as tp, without gathering the logits; the loss counts the targets over dp
    "dp-tp": ["all_reduce"] * 8,
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_equals_the_dense_model(case: Case) -> None:
    assert run_ranks(case.ranks, train, case)[0] == COLLECTIVES[case.plan]


def padded(case: Case) -> None:
    dense = build(case)
    model = distributed(case, build(case))
    mesh = model.lm_head.weight.device_mesh
    rows = Layout.from_device_mesh(mesh)("dp")
    mask = torch.ones(4, 8, dtype=torch.int64)
    mask[1, :3] = mask[2, :1] = 0
    weights = mask.double().unsqueeze(-1)
    ids = DTensor.from_local(IDS.chunk(2)[mesh.get_local_rank("dp")], rows)  # this rank's part of the batch
    logits = model(input_ids=ids, attention_mask=mask).logits
    expected = dense(input_ids=IDS, attention_mask=mask).logits
    torch.testing.assert_close(logits.full_tensor() * weights, expected * weights, rtol=1e-9, atol=1e-9)
    (logits.square() * distribute_tensor(weights, rows)).sum().backward()
    (expected.square() * weights).sum().backward()
    for (name, parameter), other in zip(model.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(full(parameter.grad), other.grad, rtol=1e-9, atol=1e-9, msg=name)


def test_padding_masks_over_data_and_tensor_parallel_ranks() -> None:
    run_ranks(4, padded, Case("llama", "dp-tp", 4))


# -- from nothing ---------------------------------------------------------------------------------------------------


def born(case: Case) -> dict[str, Any]:
    with init_empty_weights():
        model = build(case)
    manual_seed(11)
    if case.ranks:
        distributed(case, model)
    init_parameters(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not any(buffer.is_meta for buffer in model.buffers())
    return {name: full(parameter).tolist() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_model_built_without_memory_starts_alike_on_any_number_of_ranks(kind: str) -> None:
    alone = born(Case(kind, "tp", 0, tied=True))
    weights = torch.tensor(alone["model.embed_tokens.weight"])
    assert 0.01 < weights.std().item() < 0.03  # its config's initializer_range, not torch's default
    assert alone["model.norm.weight"] == [1.0] * 32
    for found in run_ranks(2, born, Case(kind, "tp", 2, tied=True)):
        assert found == alone
