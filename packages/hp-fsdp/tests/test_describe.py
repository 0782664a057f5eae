"""What `describe` says of sharded models: states, shares and units."""

from __future__ import annotations

import io
from typing import Any

import torch

from hp_core import describe, init_device_mesh
from hp_core.process_group import get_rank
from hp_core.testing import run_ranks


def test_states_bytes_and_units(bed: Any) -> None:
    def look() -> tuple[Any, ...]:
        torch.manual_seed(0)
        net = bed.Net(blocks=2, tied=True)
        net.blocks[1].norm.bias.requires_grad_(False)
        bed.shard_blocks(net, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))
        before = describe(net, file=io.StringIO())
        net.blocks[1].unshard()
        whole = describe(net, file=io.StringIO())
        net.blocks[1].reshard()
        with net.no_sync():
            bed.loss_of(net, get_rank(), 0).backward()
        waiting = describe(net, file=io.StringIO())
        bed.loss_of(net, get_rank(), 1).backward()
        after = describe(net, file=io.StringIO())
        return before, whole, waiting, after

    before, whole, waiting, after = run_ranks(4, look)[3]
    states = {row.name: row.states for row in before.rows}
    assert states["embed.weight"] == ("sharded", "also head.weight")
    assert states["blocks.0.up.weight"] == ("sharded",)
    assert states["blocks.1.norm.bias"] == ("sharded", "frozen")
    assert [unit.name for unit in before.units] == ["(root)", "blocks.0", "blocks.1"]
    assert {unit.state for unit in before.units} == {"sharded"}
    first = before.units[1]
    assert first.parameters == 6
    assert first.ranks == {"replicas": 2, "shards": 2}
    assert first.whole_bytes == 2 * first.shard_bytes
    assert not first.gathered
    held = sum(row.local_bytes for row in before.rows if row.name.startswith("blocks.0"))
    assert 0 < held <= first.shard_bytes
    assert {row.states for row in whole.rows if row.name.startswith("blocks.1")} == {("whole",), ("whole", "frozen")}
    assert [unit.gathered for unit in whole.units] == [False, False, True]
    assert {unit.waiting for unit in waiting.units} == {"gradients not reduced"}
    assert "gradients not reduced" in str(waiting)
    assert {unit.waiting for unit in after.units} == {""}
    assert {"grad" in row.states for row in after.rows} == {True, False}
    assert "blocks.0  sharded           6  2 replicas x 2 shards" in str(before)
