"""What a DTensor costs where nothing is communicated: forward and backward of two linears on small tensors.

The first weight is cut by columns, the second by rows, the output stays a pending sum and the input needs no gradient, so
that the same local kernels run three times: on bare tensors, under hp-core's DTensor and under torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.tensor as torch_tensor
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh as torch_mesh

from benchmarks.core.sampling import Calls, Samples, count_calls, take_turns
from benchmarks.report import Section, at_least, at_most, table
from hp_core import DTensor, Partial, Replicate, Shard, init_device_mesh
from hp_core.testing import record_collectives, run_ranks

__all__ = ["CONTENDERS", "RANKS", "Wrap", "section", "wrappers"]

RANKS = 2
BATCH, FEATURES, HIDDEN = 16, 32, 64
CALLS = 40
RAW, OURS, TORCH = "raw", "hp-core", "torch DTensor"
CONTENDERS = (RAW, OURS, TORCH)

Wrap = Callable[..., Any]
"""`wrap(local, placement, requires_grad=False)`: the local tensor as a contender sees it. Placements as text: R, P, S0, S1, ..."""


def section(rounds: int) -> Section:
    """Measure, and tell of it."""
    ranks = run_ranks(RANKS, measure, rounds, timeout=600.0)
    samples = Samples.pooled([samples for samples, _ in ranks])
    calls = ranks[0][1]
    rows = [
        (
            name,
            f"{1e6 * samples.median(name):.1f}",
            samples.both_ratios(name, RAW),
            samples.both_ratios(TORCH, name),
            str(calls[name].python),
            str(calls[name].native),
        )
        for name in CONTENDERS
    ]
    head = ("two linears", "us", "x raw", "torch DTensor / this", "Python calls", "native calls")
    lines = [
        f"Forward and backward of two linears, {BATCH} x {FEATURES} -> {HIDDEN} -> {FEATURES} over tp={RANKS}, no communication. "
        "Ratios: of medians / median over rounds.",
        "",
        *table(head, rows),
    ]
    aims = (
        at_most("op overhead: two linears over raw", samples.paired_ratio(OURS, RAW), 1.4),
        at_least("op overhead: torch DTensor over ours", samples.paired_ratio(TORCH, OURS), 3.0),
    )
    return Section("Op overhead", tuple(lines), aims)


def measure(rounds: int) -> tuple[Samples, dict[str, Calls]]:
    """On a rank: check that the contenders agree and don't communicate, then time them and count their calls."""
    steps = {name: two_linears(wrap) for name, wrap in wrappers().items()}
    expected = steps[RAW]()
    for name, step in steps.items():
        with record_collectives() as log:
            results = step()
        assert not log, f"{name} communicates: {log.summary()}"
        for result, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(result, wanted)
    timed: dict[str, Callable[[], object]] = {name: two_linears(wrap, keep=False) for name, wrap in wrappers().items()}
    return take_turns(timed, rounds, CALLS), {name: count_calls(step) for name, step in timed.items()}


def two_linears(wrap: Wrap, keep: bool = True) -> Callable[[], tuple[torch.Tensor, ...]]:
    """A training step's forward and backward; gives both local gradients, if they shall be kept."""
    seed = torch.Generator().manual_seed(0)
    x = wrap(torch.randn(BATCH, FEATURES, generator=seed), "R")
    up = wrap(torch.randn(HIDDEN // RANKS, FEATURES, generator=seed), "S0", requires_grad=True)
    down = wrap(torch.randn(FEATURES, HIDDEN // RANKS, generator=seed), "S1", requires_grad=True)
    gradient = wrap(torch.randn(BATCH, FEATURES, generator=seed), "R")

    def step() -> tuple[torch.Tensor, ...]:
        F.linear(F.linear(x, up), down).backward(gradient)
        kept = tuple(local(weight.grad) for weight in (up, down)) if keep else ()
        up.grad = None
        down.grad = None
        return kept

    return step


def wrappers() -> dict[str, Wrap]:
    """How each contender takes local tensors as parts of tensors on a mesh of all ranks."""
    ranks = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    native = torch_mesh("cpu", (ranks,), mesh_dim_names=("tp",))

    def raw(tensor: torch.Tensor, placement: str, requires_grad: bool = False) -> torch.Tensor:
        return tensor.clone().requires_grad_(requires_grad)

    def ours(tensor: torch.Tensor, placement: str, requires_grad: bool = False) -> Any:
        kinds = {"R": Replicate, "P": Partial}
        where = kinds[placement]() if placement in kinds else Shard(int(placement[1:]))
        return DTensor.from_local(tensor.clone(), mesh, [where]).requires_grad_(requires_grad)

    def torchs(tensor: torch.Tensor, placement: str, requires_grad: bool = False) -> Any:
        kinds = {"R": torch_tensor.Replicate, "P": torch_tensor.Partial}
        where = kinds[placement]() if placement in kinds else torch_tensor.Shard(int(placement[1:]))
        return torch_tensor.DTensor.from_local(tensor.clone(), native, [where]).requires_grad_(requires_grad)

    return {RAW: raw, OURS: ours, TORCH: torchs}


def local(tensor: Any) -> torch.Tensor:
    """The local tensor of a contender's tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]
