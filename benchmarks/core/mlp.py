"""A tensor-parallel MLP step, forward and backward: hand-written Megatron code, torch's tensor parallel, hp-core's.

All three hold equal weights (first linear cut by columns, second by rows) and take and give plain tensors; the input wants
a gradient, as in the middle of a network, so each step has one all-reduce forward and one backward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as torch_parallel
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh as torch_mesh

from benchmarks.core.overhead import local
from benchmarks.core.sampling import Samples, take_turns
from benchmarks.report import Section, at_most, table
from hp_core import ColwiseParallel, RowwiseParallel, init_device_mesh, parallelize_module
from hp_core.testing import run_ranks

__all__ = ["SIZES", "section"]

RANKS = 2
BATCH = 64
SIZES = (64, 256, 512)
EXPANSION = 4
MEGATRON, TORCH, OURS = "hand-written f/g", "torch TP", "hp-core"
CALLS = {64: 6, 256: 3, 512: 1}

Step = Callable[[], None]


def section(rounds: int) -> Section:
    """Measure, and tell of it."""
    rows, aims = [], []
    for size, ranks in zip(SIZES, zip(*run_ranks(RANKS, measure, rounds, timeout=900.0), strict=True), strict=True):
        samples = Samples.slowest(ranks)
        rows += [
            (f"{size}", name, f"{1e6 * samples.median(name):.0f}", samples.both_ratios(name, MEGATRON))
            for name in (MEGATRON, OURS, TORCH)
        ]
        ratio = samples.paired_ratio(OURS, MEGATRON)
        aims.append(at_most(f"tensor-parallel MLP step, D = {size}, over hand-written", ratio, 1.05))
    lines = [
        f"Linear(D, {EXPANSION} D), GELU, Linear({EXPANSION} D, D) on [{BATCH}, D] over tp={RANKS}, forward and backward; "
        "the slower rank of each round. Ratios: of medians / median over rounds.",
        "",
        *table(("D", "code", "us", "x hand-written"), rows, left=2),
    ]
    return Section("Tensor-parallel MLP step", tuple(lines), tuple(aims))


def measure(rounds: int) -> list[Samples]:
    """On a rank: for each size check that the three agree, then time them."""
    return [_measure(size, rounds) for size in SIZES]


def _measure(size: int, rounds: int) -> Samples:
    torch.manual_seed(0)
    full = nn.Sequential(nn.Linear(size, EXPANSION * size), nn.GELU(), nn.Linear(EXPANSION * size, size))
    x, gradient = torch.randn(BATCH, size), torch.randn(BATCH, size)
    modules: dict[str, nn.Module] = {
        MEGATRON: MegatronMLP(full),
        TORCH: torch_parallel.parallelize_module(
            copy.deepcopy(full),
            torch_mesh("cpu", (RANKS,), mesh_dim_names=("tp",)),
            {"0": torch_parallel.ColwiseParallel(), "2": torch_parallel.RowwiseParallel()},
        ),
        OURS: parallelize_module(
            copy.deepcopy(full),
            init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",)),
            {"0": ColwiseParallel(), "2": RowwiseParallel()},
        ),
    }
    _check(modules, full, x, gradient)
    steps = {name: _step(module, x, gradient) for name, module in modules.items()}
    return take_turns(steps, rounds, CALLS[size], meet=dist.barrier)


def _step(module: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> Step:
    x = x.clone().requires_grad_()
    parameters = list(module.parameters())

    def step() -> None:
        module(x).backward(gradient)
        x.grad = None
        for parameter in parameters:
            parameter.grad = None

    return step


def _check(modules: dict[str, nn.Module], full: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> None:
    """The outputs and gradients of all must be those of the whole MLP on one device."""
    reference = x.clone().requires_grad_()
    expected = full(reference)
    expected.backward(gradient)
    rank = dist.get_rank()
    cuts = [
        _gradient(parameter).chunk(RANKS, dim)[rank]
        for parameter, dim in zip(full.parameters(), (0, 0, 1), strict=False)
    ]
    for module in modules.values():
        own = x.clone().requires_grad_()
        output = module(own)
        output.backward(gradient)
        got = [_gradient(parameter) for parameter in module.parameters()]
        pairs = zip((output, own.grad, *got), (expected, reference.grad, *cuts, gradient.sum(0)), strict=True)
        for value, wanted in pairs:
            torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-4)
        module.zero_grad()


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's part of a parameter's gradient, as a plain tensor."""
    assert parameter.grad is not None
    return local(parameter.grad)


# -- Megatron's way -------------------------------------------------------------------------------------------------


class _EnterParallel(torch.autograd.Function):
    """Megatron's f: nothing forward, all-reduce backward, into the gradient's own memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(gradient)
        return gradient


class _LeaveParallel(torch.autograd.Function):
    """Megatron's g: all-reduce forward, in place since the product isn't needed any more; nothing backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class MegatronMLP(nn.Module):
    """This rank's share of an MLP, as written by hand in Megatron-LM (arXiv:1909.08053, section 3).

    Args:
        full: the whole MLP: linear, GELU, linear.
    """

    def __init__(self, full: nn.Sequential) -> None:
        super().__init__()
        rank, ranks = dist.get_rank(), dist.get_world_size()

        def share(tensor: torch.Tensor, dim: int) -> nn.Parameter:
            return nn.Parameter(tensor.detach().chunk(ranks, dim)[rank].clone())

        up, _, down = full
        assert isinstance(up, nn.Linear)
        assert isinstance(down, nn.Linear)
        self.up, self.up_bias = share(up.weight, 0), share(up.bias, 0)
        self.down, self.bias = share(down.weight, 1), nn.Parameter(down.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Output of the whole MLP, equal on all ranks: [batch, D]."""
        entered: torch.Tensor = _EnterParallel.apply(x)  # type: ignore[no-untyped-call]
        hidden = F.gelu(F.linear(entered, self.up, self.up_bias))
        left: torch.Tensor = _LeaveParallel.apply(F.linear(hidden, self.down))  # type: ignore[no-untyped-call]
        return left + self.bias
