"""Fingerprints of sharded models: the dense model's total, and replicas of HSDP that differ, found by rank and parameter."""

from __future__ import annotations

from typing import Any

import torch

from hp_core import ReplicaError, fingerprint, init_device_mesh
from hp_core.process_group import get_rank
from hp_core.testing import assert_same_error, run_ranks
from hp_fsdp import fully_shard


def built(bed: Any, shape: tuple[int, ...] = (2, 2)) -> Any:
    names = ("replicas", "shards")[-len(shape) :]
    torch.manual_seed(0)
    net = bed.Net(blocks=1, tied=True)
    bed.shard_blocks(net, init_device_mesh("cpu", shape, mesh_dim_names=names))
    return net


def test_the_total_is_the_dense_model_s_sharded_and_whole(bed: Any) -> None:
    def look() -> tuple[Any, ...]:
        dense = fingerprint(_dense(bed), mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("all",))).total
        totals = []
        for shape in ((4,), (2, 2)):
            net = built(bed, shape)
            totals.append(fingerprint(net).check().total)
            for module in (net, net.blocks[0]):
                module.unshard()
            totals.append(fingerprint(net, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("all",))).check().total)
            for module in (net, net.blocks[0]):
                module.reshard()
        return dense, totals

    for dense, totals in run_ranks(4, look):
        assert totals == [dense] * 4


def test_gradients_of_replicas_agree_after_a_backward_and_a_step(bed: Any) -> None:
    def look() -> tuple[Any, ...]:
        net = built(bed)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        before = fingerprint(net).total
        bed.loss_of(net, get_rank(), 0).backward()
        gradients = fingerprint(net, "gradients").check()
        optimizer.step()
        after = fingerprint(net).check()
        return before, after.total, gradients.total, len(set(gradients.ranks.values()))

    for before, after, gradients, different in run_ranks(4, look):
        assert before != after
        assert gradients is not None
        assert different == 2  # one for each shard


def test_a_flipped_bit_in_a_replica_of_a_shard_is_found(bed: Any) -> None:
    def look() -> None:
        net = built(bed)
        shard = net.blocks[0].up.weight._local
        if get_rank() == 2:
            assert shard.numel()
            shard.data.view(torch.int32)[-1] ^= 1 << 30
        found = fingerprint(net)
        assert [one.name for one in found.differences] == ["blocks.0.up.weight"]
        assert [ranks for _, ranks in found.differences[0].groups] == [(0,), (2,)]
        assert [name for name, text in found.tensors.items() if text is None] == ["blocks.0.up.weight"]
        found.check()

    message = assert_same_error(4, look, ReplicaError)[0]
    assert "'blocks.0.up.weight' [24, 6] (rank 0 holds" in message


def _dense(bed: Any) -> Any:
    torch.manual_seed(0)
    return bed.Net(blocks=1, tied=True)


def test_a_module_sharded_alone_names_its_own_parameters() -> None:
    def look() -> list[str]:
        model = fully_shard(torch.nn.Linear(3, 3), mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
        return list(fingerprint(model).check().tensors)

    assert run_ranks(2, look) == [["weight", "bias"]] * 2


def test_two_runs_give_the_same_bits_in_deterministic_mode_too(bed: Any) -> None:
    """With fresh memory filled with NaN, as `deterministic(2)` has it: no buffer of a unit is read before it is written."""

    def look() -> set[str | None]:
        totals = set()
        for strict in (False, True, True):
            torch.use_deterministic_algorithms(strict)
            try:
                net = built(bed)
                optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
                for step in range(2):
                    bed.loss_of(net, get_rank(), step).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            finally:
                torch.use_deterministic_algorithms(False)
            totals.add(fingerprint(net).check().total)
        return totals

    results = run_ranks(4, look)
    assert len(set().union(*results)) == 1
