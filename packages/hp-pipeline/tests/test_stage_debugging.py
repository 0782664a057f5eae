"""`describe` and `fingerprint` know stages by the protocol `StagedModule`."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import nn

from hp_core import describe, fingerprint, init_device_mesh
from hp_core.process_group import get_rank
from hp_core.protocols import StagedModule
from hp_core.testing import run_ranks
from hp_pipeline.stage import PipelineStage


def test_describe_names_the_stage_and_its_ranks() -> None:

    def look() -> tuple[Any, ...]:
        rank = get_rank()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        torch.manual_seed(rank % 2)
        stage = PipelineStage(nn.Linear(2 + rank % 2, 3 - rank % 2), rank % 2, 2, mesh=mesh)
        assert isinstance(stage, StagedModule)
        file = io.StringIO()
        describe(stage, file=file)
        alone, both = fingerprint(stage), fingerprint(stage, mesh=mesh["dp"]).check()
        return file.getvalue().splitlines()[0], list(alone.ranks), list(both.ranks), both.total

    zero, one, two, three = run_ranks(4, look)
    assert one[0].startswith(
        "Linear, stage 1 of 2 on ranks [0, 1], on rank 1 of 4, backend gloo: 2 parameters of 8 elements"
    )
    assert (one[1], one[2]) == ([1], [1, 3])
    assert (zero[3], one[3]) == (two[3], three[3])
