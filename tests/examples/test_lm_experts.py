"""The mixture of experts over a mesh equals the one that computes all experts on one process, alone and in a pipeline."""

from __future__ import annotations

import copy
import random
import time
from typing import Any

import pytest
import torch
from lm.experts import Experts, ExpertSizes, MixtureOfExperts, Splits, exchange, parallelize_experts
from torch import nn

from hp_core import init_device_mesh, record_collectives
from hp_core.process_group import get_rank
from hp_core.testing import run_ranks
from hp_fsdp import fully_shard
from hp_pipeline import CommComputeOverlap, PipelineStage, ScheduleDualPipeV

SIZES = ExpertSizes(d_model=6, d_hidden=10, experts=4, top_k=2)
TOKENS = 7
mse = nn.functional.mse_loss


def rows_of(rank: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(
        TOKENS, SIZES.d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * seed + rank)
    )


def made(sizes: ExpertSizes = SIZES, seed: int = 0) -> MixtureOfExperts:
    torch.manual_seed(seed)
    return MixtureOfExperts(sizes, torch.float64)


def all_experts(block: MixtureOfExperts, x: torch.Tensor) -> torch.Tensor:
    """The layer by its definition: every expert computes every token, and those that weren't picked count nothing."""
    sizes, experts = block.sizes, block.experts
    probabilities = torch.softmax(x @ block.router.weight.T, -1)
    smallest = probabilities.sort(-1, descending=True).values[:, sizes.top_k - 1 : sizes.top_k]
    weights = torch.where(probabilities >= smallest, probabilities, 0.0)
    if sizes.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    hidden = nn.functional.silu(torch.einsum("td,ehd->teh", x, experts.gate)) * torch.einsum(
        "td,ehd->teh", x, experts.up
    )
    return torch.einsum("te,teh,edh->td", weights, hidden, experts.down)


def whole(gradient: Any) -> torch.Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient  # type: ignore[no-any-return]


def beside_dense(sizes: ExpertSizes, bias: list[float]) -> tuple[list[int], dict[str, int]]:
    """Forward and backward beside dense; how many tokens each expert gets, and how often was communicated."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    rank = get_rank()
    dense = made(sizes)
    x = [rows_of(one).requires_grad_() for one in range(2)]
    with torch.no_grad():  # the last channel of tokens is 1: its weights are a bias of the scores
        for rows in x:
            rows[:, -1] = 1
        dense.router.weight[:, -1] += torch.tensor(bias, dtype=torch.float64)
    parallel = copy.deepcopy(dense)
    parallelize_experts(parallel, mesh)
    losses = [(all_experts(dense, rows) * rows_of(one, 5)).sum() for one, rows in enumerate(x)]
    sum(losses).backward()  # type: ignore[union-attr]
    own = x[rank].detach().clone().requires_grad_()
    torch.use_deterministic_algorithms(True)  # fills what is allocated without values with NaN
    try:
        with record_collectives() as log:
            loss = (parallel(own) * rows_of(rank, 5)).sum()
            loss.backward()
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(loss, losses[rank], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(own.grad, x[rank].grad, rtol=1e-12, atol=1e-12)
    for (name, mine), other in zip(parallel.named_parameters(), dense.parameters(), strict=True):
        assert mine.grad is not None, name
        torch.testing.assert_close(whole(mine.grad), other.grad, rtol=1e-12, atol=1e-12, msg=name)
    counts = torch.bincount(dense.router(torch.cat(x))[1].flatten(), minlength=sizes.experts).tolist()
    return counts, dict(log.counts)


@pytest.mark.parametrize("renormalize", [False, True])
def test_values_and_gradients_equal_dense(renormalize: bool) -> None:
    """Cases 78 and 80: gradients of the router come through the weights of both ranks' tokens, and nothing is left unset."""
    sizes = ExpertSizes(SIZES.d_model, SIZES.d_hidden, 4, 2, renormalize)
    for counts, calls in run_ranks(2, beside_dense, sizes, [0.0] * 4):
        assert min(counts) > 0
        assert calls == {
            "all_to_all": 5,
            "all_reduce": 1,
        }  # counts; dispatch and combine, there and back; the router's gradient


@pytest.mark.parametrize(("bias", "without"), [([50, 0, 0, 0], [1, 2, 3]), ([0, 0, 0, 50], [0, 1, 2])], ids=str)
def test_experts_without_tokens_get_zeros_by_the_same_collectives(bias: list[float], without: list[int]) -> None:
    """Case 79: all tokens go to one expert, so that a rank has none. Dense gradients of the others are zeros."""
    sizes = ExpertSizes(SIZES.d_model, SIZES.d_hidden, 4, 1, renormalize=False)
    for counts, calls in run_ranks(2, beside_dense, sizes, bias):
        assert [expert for expert, count in enumerate(counts) if not count] == without
        assert calls == {"all_to_all": 5, "all_reduce": 1}


@pytest.mark.parametrize("counts", [[0, 5, 0, 3], [0, 0, 0, 0], [8, 0, 0, 0]], ids=str)
def test_experts_take_any_number_of_rows(counts: list[int]) -> None:
    """Case 84."""
    torch.manual_seed(0)
    experts = Experts(SIZES, torch.float64)
    rows = torch.randn(sum(counts), SIZES.d_model, dtype=torch.float64)
    expected = rows.new_zeros(rows.shape)
    for row, expert in enumerate(number for number, count in enumerate(counts) for _ in range(count)):
        gate, up, down = (matrices[expert] for matrices in (experts.gate, experts.up, experts.down))
        expected[row] = down @ (nn.functional.silu(gate @ rows[row]) * (up @ rows[row]))
    found = experts(rows, counts)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    found.sum().backward()
    for expert, count in enumerate(counts):
        assert experts.gate.grad is not None
        assert bool(experts.gate.grad[expert].any()) == (count > 0)


def test_experts_that_cannot_be_shared_are_refused() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
    parallelize_experts(nn.Sequential(made()), mesh)

    class Three:
        def size(self) -> int:
            return 3

    with pytest.raises(ValueError, match=r"0: 4 experts can't be shared by ep=3 equally"):
        parallelize_experts(nn.Sequential(made()), Three())  # type: ignore[arg-type]


def gradcheck() -> bool:
    """Of an exchange on one rank of two, the other taking part."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    rank = get_rank()
    splits = (Splits((1, 2), (1, 0)), Splits((0, 3), (2, 3)))[rank]
    torch.manual_seed(rank)
    rows = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    arrived = exchange(rows, splits, mesh.get_group())
    factors = torch.randn(arrived.shape, dtype=torch.float64)
    (arrived * factors).sum().backward()
    back = exchange(factors, splits.back, mesh.get_group())
    return arrived.shape[0] == sum(splits.received) and torch.equal(rows.grad, back)  # type: ignore[arg-type]


def test_gradients_of_an_exchange_go_the_other_way() -> None:
    assert run_ranks(2, gradcheck) == [True, True]


# -- in a pipeline ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer with dropout, dense or with experts."""

    def __init__(self, experts: bool, seed: int) -> None:
        super().__init__()
        self.mix = nn.Sequential(
            nn.Linear(SIZES.d_model, SIZES.d_model, dtype=torch.float64), nn.Tanh(), nn.Dropout(0.2)
        )
        self.norm = nn.LayerNorm(SIZES.d_model, dtype=torch.float64)
        self.feed_forward = made(seed=seed) if experts else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(x)
        return x + self.feed_forward(self.norm(x))  # type: ignore[no-any-return]


def trained(layers: list[int], overlap: bool, pauses: int | None, sharded: bool) -> list[torch.Tensor]:
    """Losses and gradients of two runs on 2 x 2 ranks, and how many pairs there were.

    Args:
        layers: of each of the four stages, how many layers have experts.
        overlap: whether pairs run on two threads.
        pauses: seed of the pauses before and after modules; None for none.
        sharded: whether FSDP shards what isn't an expert, on the same ranks that share experts.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    pp, ep = mesh.get_coordinate()  # type: ignore[misc]
    hooks = CommComputeOverlap(20)
    stages = []
    for index in (pp, 3 - pp):
        torch.manual_seed(index)
        module = nn.Sequential(Block(False, 0), *(Block(True, 10 * index + number) for number in range(layers[index])))
        parallelize_experts(module, mesh["ep"], hooks)
        for block in module if sharded else ():
            fully_shard(block.mix, mesh=mesh["ep"])
        stages.append(PipelineStage(module, index, 4, mesh=mesh["pp"]))
    torch.manual_seed(100 + get_rank())
    schedule = ScheduleDualPipeV(stages, 6, mse, timeout=20, overlap=overlap)
    if pauses is not None:
        draws = random.Random(pauses + get_rank())
        for stage in stages:
            for part in stage.submodule.modules():
                part.register_forward_pre_hook(lambda *_: time.sleep(draws.choice((0, 0, 1e-3, 4e-3))))
                part.register_full_backward_hook(lambda *_: time.sleep(draws.choice((0, 0, 1e-3, 4e-3))))
    found: list[torch.Tensor] = []
    pairs, run_pair = [], hooks.run
    hooks.run = lambda *sides, **words: pairs.append(words) or run_pair(*sides, **words)  # type: ignore[method-assign, func-returns-value]
    for run in range(2):
        batch = torch.randn(
            2, 12, 3, SIZES.d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(run + 7 * ep)
        )
        found += schedule.run(batch[0], target=batch[1])
    found += [whole(one.grad) for stage in stages for one in stage.submodule.parameters()]
    wrapped = overlap and any(layers[stage.stage_index] for stage in stages)
    assert len(pairs) == (2 * sum(step.parts is not None for step in schedule.schedule.steps[pp]) if wrapped else 0)
    return [*found, torch.rand(2)]


@pytest.mark.parametrize(
    ("layers", "sharded"), [([1, 1, 1, 1], True), ([2, 0, 1, 3], False)], ids=["equal, with FSDP", "unequal"]
)
def test_pairs_in_a_pipeline_give_the_same_bits(layers: list[int], sharded: bool) -> None:
    """Exchanges of two threads meet those of the other rank, however the threads are delayed; and so do FSDP's."""
    plain = run_ranks(4, trained, layers, False, None, sharded)
    for mine, other in zip(run_ranks(4, trained, layers, True, 3, sharded), plain, strict=True):
        assert len(mine) == len(other)
        assert all(torch.equal(one, two) for one, two in zip(mine, other, strict=True))
