"""torch's distributed checkpoint saves DTensors and loads them in another layout, on another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException

from hp_core import DTensor, Layout, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_core.testing import assert_same_error, run_ranks

SHAPES = {"even": (4, 6), "uneven": (5, 3), "short": (1, 3), "vector": (7,), "scalar": ()}
SAVED = {"even": ("dp", "tp"), "uneven": (("tp", "dp"),), "short": ("dp",), "vector": (("dp", "tp"),), "scalar": ()}


def value(name: str) -> torch.Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64)


def save(folder: str) -> None:
    base = Layout.from_device_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    state: dict[str, Any] = {
        name: distribute_tensor(value(name), base(*SAVED[name]), src_data_rank=None) for name in SHAPES
    }
    state["parameter"] = nn.Parameter(distribute_tensor(value("even"), base("tp"), src_data_rank=None))
    state["step"] = torch.tensor(3.0)
    dcp.save(state, checkpoint_id=folder)


def load(folder: str, ranks: int, dim: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    state: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        placement = Shard(dim) if dim < len(shape) else Replicate()
        state[name] = distribute_tensor(torch.zeros(shape, dtype=torch.float64), mesh, [placement], src_data_rank=None)
    state["parameter"] = nn.Parameter(
        distribute_tensor(torch.zeros(4, 6, dtype=torch.float64), mesh, [Shard(dim)], src_data_rank=None)
    )
    state["step"] = torch.tensor(0.0)
    dcp.load(state, checkpoint_id=folder)
    for name in SHAPES:
        assert isinstance(state[name], DTensor)
        assert torch.equal(state[name].full_tensor(), value(name)), name
    assert torch.equal(state["parameter"].full_tensor().detach(), value("even"))
    assert state["step"].item() == 3.0


@pytest.mark.parametrize(("ranks", "dim"), [(4, 0), (4, 1), (2, 0), (1, 0)])
def test_save_on_a_square_and_load_on_a_line(tmp_path: Path, ranks: int, dim: int) -> None:
    run_ranks(4, save, str(tmp_path))
    run_ranks(ranks, load, str(tmp_path), ranks, dim)


def save_pending(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dcp.save({"x": DTensor.from_local(torch.ones(2), mesh, [Partial()])}, checkpoint_id=folder)


def test_a_pending_sum_is_not_saved(tmp_path: Path) -> None:
    assert_same_error(2, save_pending, CheckpointException, "ranks:dict_keys..0, 1..", str(tmp_path))
