"""`from_local(run_check=True)`: ranks exchange the shapes of their parts and come to the same end."""

from __future__ import annotations

import pytest
import torch

from hp_core import DTensor, Layout, Replicate, Shard, init_device_mesh
from hp_core.dtensor.agreement import combined_shape
from hp_core.errors import LayoutError
from hp_core.testing import assert_same_error, record_collectives, run_ranks


def test_uneven_parts_give_the_global_shape():
    """Public reports, case 18: (5,) over two ranks stays 5."""

    def take():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        own = torch.arange(5.0).chunk(2)[mesh.get_local_rank("tp")]
        with record_collectives() as log:
            x = DTensor.from_local(own * 2, mesh, [Shard(0)], run_check=True)
        return tuple(x.shape), x.full_tensor().tolist(), [record.kind for record in log]

    assert run_ranks(2, take) == [((5,), [0.0, 2.0, 4.0, 6.0, 8.0], ["all_gather"])] * 2


def test_a_nested_uneven_cut():
    def take():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        layout = Layout.from_device_mesh(mesh)(("dp", "tp"))
        value = torch.arange(15.0).view(5, 3)
        (start, stop), _ = layout.bounds((5, 3))
        return torch.equal(DTensor.from_local(value[start:stop], layout, run_check=True).full_tensor(), value)

    assert run_ranks(4, take) == [True] * 4


@pytest.mark.parametrize("which", ["rows", "dims", "replica", "given"])
def test_parts_that_do_not_fit_are_refused_alike(which):
    """Without the check these would hang or give a wrong tensor: each rank alone sees nothing wrong."""

    def take(which):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        rank = mesh.get_local_rank("tp")
        if which == "rows":
            DTensor.from_local(torch.ones(1 + 2 * rank, 3), mesh, [Shard(0)], run_check=True)
        elif which == "dims":
            DTensor.from_local(torch.ones(*[2] * (1 + rank)), mesh, [Shard(0)], run_check=True)
        elif which == "replica":
            DTensor.from_local(torch.ones(2 + rank), mesh, [Replicate()], run_check=True)
        else:
            DTensor.from_local(torch.ones(2), mesh, [Shard(0)], shape=(3 + rank,), run_check=True)

    message = {
        "rows": r"shape \(4, 3\).*should hold.*Local shapes by rank: \{0: \(1, 3\), 1: \(3, 3\)\}",
        "dims": "differ in number of dims",
        "replica": r"ranks \[1\] should hold",
        "given": r"global shapes given: \{0: \(3,\), 1: \(4,\)\}",
    }[which]
    messages = assert_same_error(2, take, LayoutError, message, which)
    assert len(set(messages)) == 1


def test_the_rule_needs_no_ranks():
    layout = Layout((2,), ("tp",))("tp")
    assert combined_shape(layout, {0: (3, 2), 1: (2, 2)}, {}) == (5, 2)
    with pytest.raises(LayoutError, match="should hold"):
        combined_shape(layout, {0: (2, 2), 1: (3, 2)}, {})
