"""The law of gradients: what the backward pass communicates, how often, and what cuts a remembered alias off.

Counts and bytes are those of the collectives that really ran (`record_collectives`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from hp_core import DTensor, Layout, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_core.errors import LayoutError, ShardingRuleError
from hp_core.testing import assert_same_error, record_collectives, run_ranks

S, D = 4, 6  # sequence and features; float64, so an activation is S * D * 8 bytes
BYTES = S * D * 8


def mesh2() -> Any:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def lay(value: torch.Tensor, *placements: Any, grad: bool = True, mesh: Any = None) -> Any:
    return distribute_tensor(value, mesh or mesh2(), placements, src_data_rank=None).requires_grad_(grad)


def projections(x: Any, weights: Any, out: Any) -> Any:
    q, k, v = (F.linear(x, weight) for weight in weights)
    return F.linear(q * k + v, out)


def dense_gradients() -> list[torch.Tensor]:
    x = normal(S, D).requires_grad_()
    weights = [normal(D, D, seed=i).requires_grad_() for i in (1, 2, 3)]
    out = normal(D, D, seed=4).requires_grad_()
    projections(x, weights, out).square().sum().backward()
    tensors = [x, *weights, out]
    return [tensor.grad for tensor in tensors]  # type: ignore[misc]


def run_projections(x_placement: Any) -> tuple[dict[str, int], int, dict[str, int], int]:
    x = lay(normal(S, D), x_placement)
    weights = [lay(normal(D, D, seed=i), Shard(0)) for i in (1, 2, 3)]
    out = lay(normal(D, D, seed=4), Shard(1))
    with record_collectives() as forward:
        gathered = x.redistribute(placements=[Replicate()])
        result = projections(gathered, weights, out).redistribute(placements=[x_placement])
        loss = result.square().sum()
    with record_collectives() as backward:
        loss.backward()
    for tensor, expected in zip([x, *weights, out], dense_gradients(), strict=True):
        assert tensor.grad.layout is tensor.layout
        torch.testing.assert_close(tensor.grad.full_tensor(), expected)
    return dict(forward.counts), forward.nbytes, dict(backward.counts), backward.nbytes


def test_three_projections_of_a_replicated_input_cost_one_all_reduce_each_way() -> None:
    for forward, forward_bytes, backward, backward_bytes in run_ranks(2, run_projections, Replicate()):
        assert forward == {"all_reduce": 1}
        assert backward == {"all_reduce": 1}
        assert forward_bytes == backward_bytes == BYTES  # 2 (n - 1) / n of the activation, n = 2


def test_three_projections_of_a_cut_sequence_cost_a_gather_and_a_reduce_scatter_each_way() -> None:
    for forward, forward_bytes, backward, backward_bytes in run_ranks(2, run_projections, Shard(0)):
        assert forward == {"all_gather": 1, "reduce_scatter": 1}
        assert backward == {"all_gather": 1, "reduce_scatter": 1}
        assert forward_bytes == backward_bytes == BYTES  # half of the activation, twice


def second_step_costs_the_same() -> list[dict[str, int]]:
    x, weight = lay(normal(S, D), Replicate()), lay(normal(D, D, seed=1), Shard(0))
    counts = []
    for _ in range(3):
        with record_collectives() as log:
            (F.linear(x, weight) * 2).sum().redistribute(placements=[Replicate()]).backward()
        counts.append(dict(log.counts))
    expected = normal(S, D).requires_grad_()
    (F.linear(expected, normal(D, D, seed=1)) * 6).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), expected.grad)
    return counts


def test_each_step_and_micro_batch_reduces_anew_and_gradients_accumulate() -> None:
    for counts in run_ranks(2, second_step_costs_the_same):
        assert counts == [{"all_reduce": 2}] * 3


def written_between() -> None:
    x, weight = lay(normal(S, D), Replicate()), lay(normal(D, D, seed=1), Shard(0))
    dense, dense_weight = normal(S, D).requires_grad_(), normal(D, D, seed=1)
    inner, dense_inner = x * 1, dense * 1
    first, dense_first = F.linear(inner, weight).sum(), F.linear(dense_inner, dense_weight).sum()
    inner.mul_(3)
    dense_inner.mul_(3)
    second, dense_second = (F.linear(inner, weight) ** 2).sum(), (F.linear(dense_inner, dense_weight) ** 2).sum()
    torch.testing.assert_close(second.full_tensor(), dense_second)
    second.backward()
    dense_second.backward()
    torch.testing.assert_close(x.grad.full_tensor(), dense.grad)
    assert first.full_tensor().allclose(dense_first)


def test_a_write_makes_the_remembered_alias_invalid() -> None:
    run_ranks(2, written_between)


def written_through_a_view() -> None:
    value, weight = normal(S, D), normal(D, D, seed=1)
    leaf, w = value.clone().requires_grad_(), weight.clone()
    x = leaf * 1
    loss = F.linear(x, w).sum()
    x.view(-1).mul_(3)
    (loss + F.linear(x, w).square().sum()).backward()

    mine, cut = lay(value, Replicate()), lay(weight, Shard(0), grad=False)
    x = mine * 1
    loss = F.linear(x, cut).sum()
    x.view(-1).mul_(3)  # another DTensor object on the same storage
    (loss + F.linear(x, cut).square().sum()).backward()
    torch.testing.assert_close(mine.grad.full_tensor(), leaf.grad)


def test_a_write_through_a_view_makes_the_remembered_alias_invalid() -> None:
    """The alias must not outlive a write that only the storage's version tells of."""
    run_ranks(2, written_through_a_view)


def gathered_then_written() -> None:
    x, weight = lay(normal(S, D), Shard(0)), lay(normal(D, D, seed=1), Shard(0))
    dense = normal(S, D).requires_grad_()
    gathered = x.redistribute(placements=[Replicate()])
    gathered.mul_(2)
    loss = (F.linear(gathered, weight) ** 2).sum()
    (F.linear(dense * 2, normal(D, D, seed=1)) ** 2).sum().backward()
    loss.backward()
    torch.testing.assert_close(x.grad.full_tensor(), dense.grad)


def test_a_write_to_a_gathered_tensor_cuts_its_tie() -> None:
    run_ranks(2, gathered_then_written)


def frozen() -> int:
    x, weight = lay(normal(S, D), Replicate(), grad=False), lay(normal(D, D, seed=1), Shard(0))
    bias = lay(normal(D, seed=2), Replicate(), grad=False)
    with record_collectives() as log:
        F.linear(x, weight, bias).square().sum().backward()
    assert x.grad is None
    assert bias.grad is None
    return len(log)


def test_what_is_frozen_costs_nothing() -> None:
    assert run_ranks(2, frozen) == [0, 0]


def retained() -> None:
    x, weight = lay(normal(S, D), Replicate()), lay(normal(D, D, seed=1), Shard(0))
    dense = normal(S, D).requires_grad_()
    loss = F.linear(x, weight).square().sum()
    loss.backward(retain_graph=True)
    once = x.grad.full_tensor().clone()
    loss.backward()
    F.linear(dense, normal(D, D, seed=1)).square().sum().backward()
    torch.testing.assert_close(once, dense.grad)
    torch.testing.assert_close(x.grad.full_tensor(), 2 * once)


def test_a_second_backward_through_a_retained_graph() -> None:
    run_ranks(2, retained)


def forward_again_before_the_first_backward() -> None:
    x, weight = lay(normal(S, D), Replicate()), lay(normal(D, D, seed=1), Shard(0))
    dense, dense_weight = normal(S, D).requires_grad_(), normal(D, D, seed=1)
    first, second = F.linear(x, weight).square().sum(), F.linear(x, weight).exp().sum()
    first.backward()
    second.backward()
    F.linear(dense, dense_weight).square().sum().backward()
    F.linear(dense, dense_weight).exp().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), dense.grad)


def test_two_graphs_that_share_an_alias() -> None:
    """Their common vary node has no saved tensors, so the second backward may pass it as well."""
    run_ranks(2, forward_again_before_the_first_backward)


def asked_for() -> None:
    x, weight = lay(normal(S, D), Replicate()), lay(normal(D, D, seed=1), Shard(0))
    dense, dense_weight = normal(S, D).requires_grad_(), normal(D, D, seed=1).requires_grad_()
    loss, dense_loss = F.linear(x, weight).square().sum(), F.linear(dense, dense_weight).square().sum()
    got = torch.autograd.grad(loss, [x, weight])
    expected = torch.autograd.grad(dense_loss, [dense, dense_weight])
    for tensor, gradient, wanted in zip((x, weight), got, expected, strict=True):
        assert gradient.layout is tensor.layout
        torch.testing.assert_close(gradient.full_tensor(), wanted)
    assert x.grad is None
    (alone,) = torch.autograd.grad(F.linear(x, weight).sum(), x)
    torch.testing.assert_close(alone.full_tensor(), torch.autograd.grad(F.linear(dense, dense_weight).sum(), dense)[0])
    nothing = torch.autograd.grad(x.sum(), [x, weight], allow_unused=True)
    assert nothing[1] is None


def test_autograd_grad_gives_dtensors() -> None:
    run_ranks(2, asked_for)


def hooked() -> list[str]:
    x, weight = lay(normal(S, D), Shard(0)), lay(normal(D, D, seed=1), Shard(0))
    dense = normal(S, D).requires_grad_()
    seen: list[str] = []
    middle, dense_middle = x * 2, dense * 2
    middle.retain_grad()
    dense_middle.retain_grad()
    middle.register_hook(lambda gradient: seen.append(f"hook {gradient.layout.compact_str}"))
    x.register_hook(lambda gradient: gradient * 10)
    dense.register_hook(lambda gradient: gradient * 10)
    x.register_post_accumulate_grad_hook(lambda tensor: seen.append(f"after {tuple(tensor.grad.shape)} {tensor is x}"))
    gathered = middle.redistribute(placements=[Replicate()])
    gathered.retain_grad()
    F.linear(gathered, weight).square().sum().backward()
    F.linear(dense_middle, normal(D, D, seed=1)).square().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), dense.grad)
    torch.testing.assert_close(middle.grad.full_tensor(), dense_middle.grad)
    assert gathered.retains_grad
    assert gathered.grad.layout is gathered.layout
    torch.testing.assert_close(gathered.grad.full_tensor(), dense_middle.grad)
    return seen


def test_hooks_and_retained_gradients() -> None:
    assert run_ranks(2, hooked) == [["hook (tp)", f"after ({S}, {D}) True"]] * 2


def asked_too_late() -> None:
    x, weight = lay(normal(S, D), Shard(0)), lay(normal(D, D, seed=1), Shard(0))
    gathered = x.redistribute(placements=[Replicate()])
    torch.autograd.grad(F.linear(gathered, weight).sum(), gathered)


def hooked_too_late() -> None:
    x, weight = lay(normal(S, D), Shard(0)), lay(normal(D, D, seed=1), Shard(0))
    gathered = x.redistribute(placements=[Replicate()])
    F.linear(gathered, weight)
    gathered.register_hook(print)


def test_the_gradient_of_a_tied_gather_is_refused() -> None:
    assert_same_error(2, asked_too_late, ShardingRuleError, "retain_grad")
    assert_same_error(2, hooked_too_late, LayoutError, "right after redistribute")


def batch_over_dp() -> dict[str, int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = lay(normal(S, D), Shard(0), Replicate(), grad=False, mesh=mesh)
    up = lay(normal(8, D, seed=1), Replicate(), Shard(0), mesh=mesh)
    down = lay(normal(D, 8, seed=2), Replicate(), Shard(1), mesh=mesh)
    scale = lay(normal(D, seed=3), Replicate(), Replicate(), mesh=mesh)
    loss = F.linear(F.gelu(F.linear(x * scale, up)), down).square().mean()
    with record_collectives() as log:
        loss.backward()
    dense = [normal(8, D, seed=1), normal(D, 8, seed=2), normal(D, seed=3)]
    for tensor in dense:
        tensor.requires_grad_()
    F.linear(F.gelu(F.linear(normal(S, D) * dense[2], dense[0])), dense[1]).square().mean().backward()
    for tensor, expected in zip((up, down, scale), dense, strict=True):
        assert tensor.grad.layout is tensor.layout
        torch.testing.assert_close(tensor.grad.full_tensor(), expected.grad)
    return dict(log.counts)


def test_replicated_parameters_get_their_gradients_over_dp_without_a_wrapper() -> None:
    """One all-reduce per parameter over dp, and one over tp for the activation that enters the column-parallel layer."""
    assert run_ranks(4, batch_over_dp) == [{"all_reduce": 4}] * 4


def recomputed() -> None:
    def block(x: Any, up: Any, down: Any) -> Any:
        return F.linear(F.gelu(F.linear(x, up)), down).redistribute(placements=[Replicate()])

    def gradients(save: bool) -> list[torch.Tensor]:
        x, up, down = (
            lay(normal(S, D), Replicate()),
            lay(normal(8, D, seed=1), Shard(0)),
            lay(normal(D, 8, seed=2), Shard(1)),
        )
        hidden = x * 1
        for _ in range(2):
            hidden = block(hidden, up, down) if save else checkpoint(block, hidden, up, down, use_reentrant=False)
        hidden.square().sum().backward()
        return [tensor.grad.full_tensor() for tensor in (x, up, down)]

    for saved, again in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(saved, again, rtol=0, atol=0)


def test_activation_checkpointing_gives_equal_gradients() -> None:
    run_ranks(2, recomputed)


def a_gradient_of_the_users_choice() -> None:
    mesh = mesh2()
    rank = mesh.get_local_rank("tp")
    local = normal(S, D).requires_grad_()
    taken = DTensor.from_local(local, mesh, [Replicate()], grad_placements=[Partial()])
    weight = lay(normal(D, D, seed=1), Shard(0), grad=False)
    (F.linear(taken, weight) * 1).sum().backward()
    total = local.grad.clone()
    torch.distributed.all_reduce(total)
    dense = normal(S, D).requires_grad_()
    F.linear(dense, normal(D, D, seed=1)).sum().backward()
    torch.testing.assert_close(total, dense.grad)

    x = lay(normal(S, D), Replicate())
    part = x.to_local(grad_placements=[Partial()])
    (part * (rank + 1)).sum().backward()  # each rank contributes its share: 1 + 2
    torch.testing.assert_close(x.grad.full_tensor(), torch.full((S, D), 3.0, dtype=torch.float64))


def test_gradients_stay_unreduced_only_where_asked() -> None:
    run_ranks(2, a_gradient_of_the_users_choice)


def roots() -> None:
    base = Layout.from_device_mesh(mesh2())
    whole = normal(S)
    x = distribute_tensor(whole, base(Shard(0)), src_data_rank=None).requires_grad_()
    x.amax().backward()  # a pending maximum: only the rank that holds it gets a gradient
    expected = whole.clone().requires_grad_()
    expected.amax().backward()
    torch.testing.assert_close(x.grad.full_tensor(), expected.grad)
    average = DTensor.from_local(whole, base(Partial("avg"))).requires_grad_()
    (average * 2).sum().backward()
    torch.testing.assert_close(average.grad.to_local(), torch.full((S,), 1.0, dtype=torch.float64))
    y = distribute_tensor(whole, base(Shard(0)), src_data_rank=None).requires_grad_()
    y.backward(distribute_tensor(whole, base(), src_data_rank=None))
    torch.testing.assert_close(y.grad.full_tensor(), whole)


def test_backward_starts_from_any_layout() -> None:
    run_ranks(2, roots)


@pytest.mark.parametrize("call", ["plain", "vector"])
def test_a_backward_that_torch_would_refuse_is_refused(call: str) -> None:
    def refused() -> None:
        x = lay(normal(S, D), Shard(0))
        x.backward(torch.ones(S, D)) if call == "plain" else (x * 2).backward()

    assert_same_error(
        2, refused, (LayoutError, RuntimeError), "must be a DTensor" if call == "plain" else "scalar outputs"
    )


def automatic_casts() -> None:
    x, up, down = (
        lay(normal(S, D), Replicate()),
        lay(normal(8, D, seed=1), Shard(0)),
        lay(normal(D, 8, seed=2), Shard(1)),
    )
    for tensor in (x, up, down):
        tensor.data = tensor.data.float()
    assert F.linear(x, up).dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = F.linear(F.linear(x, up), down)
    assert result.dtype is torch.bfloat16
    assert F.linear(x, up).dtype is torch.float32
    result.float().sum().backward()
    dense = normal(S, D).float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = F.linear(F.linear(dense, normal(8, D, seed=1).float()), normal(D, 8, seed=2).float())
    expected.float().sum().backward()
    assert x.grad.dtype is up.grad.dtype is torch.float32
    torch.testing.assert_close(x.grad.full_tensor(), dense.grad, rtol=0.05, atol=0.05)


def test_autocast_applies_to_the_local_ops() -> None:
    run_ranks(2, automatic_casts)
