"""The example on every mesh equals the example on one process: losses of 20 steps and gradients of the first.

The dense run is computed once per dtype in this process; each mesh runs on its own ranks and hands back whole tensors.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import pytest
from lm.check import trace_run
from lm.compare import TOLERANCES, Trace, compare_runs
from lm.config import ModelSizes, RunConfig, parse_mesh
from lm.parallel import build_mesh
from lm.text import load_standard_library

from hp_core.testing import run_ranks

STEPS = 20
SIZES = ModelSizes(d_model=32, layers=2, heads=4, d_hidden=64, sequence=32)
TINY = RunConfig(sizes=SIZES, steps=STEPS, batch=8, warmup=5, max_bytes=300_000)


def trace(config: RunConfig) -> Trace:
    """On a rank, or in one dense process: the traced run."""
    text = load_standard_library(config.max_bytes, config.sizes.sequence)
    return trace_run(config, text, STEPS, build_mesh(config) if config.mesh else None)


@lru_cache
def dense_trace(dtype: str, optimizer: str = "adamw") -> Trace:
    return trace(dataclasses.replace(TINY, dtype=dtype, optimizer=optimizer))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("ranks", "mesh", "sequence_parallel"),
    [
        pytest.param(4, "dp=4", False, id="dp4"),
        pytest.param(4, "tp=4", False, id="tp4"),
        pytest.param(4, "dp=2,tp=2", False, id="dp2-tp2"),
        pytest.param(4, "tp=2,dp=2", False, id="tp2-dp2"),
        pytest.param(2, "tp=2", True, id="tp2-sequence"),
        pytest.param(4, "dp=2,tp=2", True, id="dp2-tp2-sequence"),
    ],
)
def test_a_mesh_gives_the_losses_and_gradients_of_one_process(
    ranks: int, mesh: str, sequence_parallel: bool, dtype: str
) -> None:
    config = dataclasses.replace(TINY, mesh=parse_mesh(mesh), sequence_parallel=sequence_parallel, dtype=dtype)
    traces = run_ranks(ranks, trace, config)
    for rank, of_rank in enumerate(traces):
        assert of_rank.losses == traces[0].losses, f"rank {rank} saw other losses than rank 0"
        difference = compare_runs(of_rank, dense_trace(dtype))
        assert difference.loss <= TOLERANCES[dtype], f"rank {rank}: {difference}"
        assert difference.gradient <= TOLERANCES[dtype], f"rank {rank}: {difference}"
        if dtype == "float64":
            # Adam divides by the gradient's size: in float32 an element that is zero but for rounding moves visibly.
            assert difference.parameter <= TOLERANCES[dtype], f"rank {rank}: {difference}"


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        pytest.param("dp=4", {}, id="dp4"),
        pytest.param("dpr=2,dps=2", {}, id="hybrid"),
        pytest.param("dp=2,tp=2", {}, id="dp2-tp2"),
        pytest.param("dp=2,tp=2", {"sequence_parallel": True}, id="dp2-tp2-sequence"),
        pytest.param("dp=4", {"optimizer": "muon"}, id="dp4-muon"),
        pytest.param("dp=2,tp=2", {"optimizer": "muon"}, id="dp2-tp2-muon"),
    ],
)
def test_fully_sharded_training_equals_one_process(mesh: str, changes: dict[str, Any]) -> None:
    config = dataclasses.replace(TINY, mesh=parse_mesh(mesh), dtype="float64", fsdp=True, **changes)
    reference = dense_trace("float64", config.optimizer)
    traces = run_ranks(4, trace, config)
    for rank, of_rank in enumerate(traces):
        assert of_rank.losses == traces[0].losses, f"rank {rank} saw other losses than rank 0"
    difference = compare_runs(traces[0], reference)
    # Newton-Schulz iterates in the elements' own type here, and amplifies rounding
    assert difference.largest <= (1e-6 if config.optimizer == "muon" else TOLERANCES["float64"]), difference


def test_bfloat16_training_follows_full_precision() -> None:
    config = dataclasses.replace(TINY, mesh=parse_mesh("dp=4"), fsdp=True)
    full, rounded = (run_ranks(4, trace, one)[0] for one in (config, dataclasses.replace(config, precision="bf16")))
    assert rounded.losses != full.losses
    assert rounded.losses == pytest.approx(full.losses, rel=0.02)


def test_every_parameter_has_a_gradient_to_compare() -> None:
    trace = dense_trace("float64")
    assert trace.gradients.keys() == trace.parameters.keys()
    assert all(gradient.abs().max() > 0 for gradient in trace.gradients.values())


@pytest.mark.parametrize("part", ["losses", "gradients", "parameters"])
def test_the_comparison_sees_a_small_fault_in_any_part(part: str) -> None:
    right = dense_trace("float64")
    if part == "losses":
        wrong = dataclasses.replace(right, losses=[*right.losses[:-1], right.losses[-1] * (1 + 1e-6)])
    else:
        tensors = dict(getattr(right, part))
        tensors["norm.weight"] = tensors["norm.weight"] * (1 + 1e-6)
        wrong = dataclasses.replace(right, **{part: tensors})
    assert compare_runs(right, right).largest == 0
    assert compare_runs(wrong, right).largest == pytest.approx(1e-6, rel=1e-3)
