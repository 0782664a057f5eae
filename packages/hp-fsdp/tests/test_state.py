"""What is saved, loaded, copied and built without memory: state dicts, checkpoints, copies, pickles, the meta device."""

from __future__ import annotations

import copy
import importlib
import io
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict

import hp_fsdp
from hp_core import (
    DTensor,
    Shard,
    distribute_tensor,
    init_empty_weights,
    init_parameters,
    manual_seed,
    record_collectives,
)
from hp_core.protocols import ShardedModule
from hp_core.testing import run_ranks
from hp_fsdp import HSDPModule, fully_shard


def test_a_state_dict_is_shards_and_costs_no_communication(bed: Any, ranks: int) -> None:
    def body(bed: Any) -> None:
        it = bed("tp")
        it.train(2)
        with record_collectives() as log:
            state = it.model.state_dict()
        assert not log
        for name, value in it.dense.state_dict().items():
            assert isinstance(state[name], DTensor), name
            assert state[name].shape == value.shape
            it.close(state[name].full_tensor(), value, name, 1e3)

    run_ranks(ranks, body, bed)


def test_a_module_unsharded_by_hand_saves_shards(bed: Any) -> None:
    def body(bed: Any) -> None:
        it = bed()
        block = it.model.blocks[0]
        block.unshard()
        assert not isinstance(block.up.weight, DTensor)
        assert torch.equal(block.up.weight, it.dense.blocks[0].up.weight)
        assert isinstance(it.model.state_dict()["blocks.0.up.weight"], DTensor)
        assert not it.held_whole()

    run_ranks(2, body, bed)


def test_values_of_other_layouts_and_plain_ones_are_loaded(bed: Any, ranks: int) -> None:
    """Case 40: a plain, full state dict loads into a sharded model."""

    def body(bed: Any) -> None:
        it = bed()
        other = bed.Net().double()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.uniform_(-1, 1, generator=torch.Generator().manual_seed(parameter.numel()))
        plain = other.state_dict()
        it.model.load_state_dict(plain)
        optimizers = it.optimizers
        for name, parameter in it.model.named_parameters():
            assert torch.equal(parameter.detach().full_tensor(), plain[name]), name
        laid_out = {
            name: distribute_tensor(2 * value, it.mesh, [Shard(0)], src_data_rank=None) for name, value in plain.items()
        }
        it.model.load_state_dict(laid_out)
        for name, parameter in it.model.named_parameters():
            assert torch.equal(parameter.detach().full_tensor(), 2 * plain[name]), name
        it.dense.load_state_dict({name: 2 * value for name, value in plain.items()})
        it.optimizers = optimizers  # which hold the same parameters still
        it.train(3)
        missing = dict(plain)
        del missing["head.weight"]
        for state, word in ((missing, "Missing"), ({**plain, "more": torch.zeros(1)}, "Unexpected")):
            with pytest.raises(RuntimeError, match=word):
                it.model.load_state_dict(state)
            it.model.load_state_dict(state, strict=False)

    run_ranks(ranks, body, bed)


def test_loading_by_assignment_is_taken_in(bed: Any) -> None:
    def body(bed: Any) -> None:
        it = bed()
        values = {name: value + 1 for name, value in it.dense.state_dict().items()}
        it.dense.load_state_dict(values)
        it.model.load_state_dict(values, assign=True)
        it.backward()  # the parameters of now are made shards
        it.optimize()
        it.model.zero_grad()
        it.dense.zero_grad()
        it.train(3)

    run_ranks(2, body, bed)


def test_checkpoints_move_between_numbers_of_ranks(bed: Any, tmp_path: Path) -> None:
    """Cases 101 and 102: empty shares and optimizer states too; saved by 4 ranks, loaded by 2, and into a dense model."""

    def save(bed: Any, folder: Path) -> None:
        it = bed("tp")
        it.train(3)
        model, optimizer = get_state_dict(it.model, it.optimizers[1])
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(bed: Any, folder: Path, kind: str) -> None:
        it = bed(kind)
        dense = bed("fsdp" if kind == "fsdp" else "tp")  # on as many data ranks as it was saved from
        dense.train(3)
        model, optimizer = get_state_dict(it.model, it.optimizers[1])
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(it.model, it.optimizers[1], model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        it.dense, it.optimizers = dense.dense, (dense.optimizers[0], it.optimizers[1])
        it.check()
        whole = bed.Net().double()
        plain = {"model": whole.state_dict()}
        dcp.load(plain, checkpoint_id=folder)
        for name, value in dense.dense.state_dict().items():
            it.close(plain["model"][name], value, name, 1e3)

    run_ranks(4, save, bed, tmp_path)
    run_ranks(2, load, bed, tmp_path, "fsdp")
    run_ranks(4, load, bed, tmp_path, "hsdp")


def test_a_tied_parameter_is_stored_once(bed: Any) -> None:
    """Case 104."""

    def body(bed: Any) -> None:
        from hp_core import unique_state_dict

        it = bed(build=lambda: bed.Net(tied=True))
        state = unique_state_dict(it.model)
        assert ("embed.weight" in state) != ("head.weight" in state)
        assert get_model_state_dict(it.model).keys() == it.dense.state_dict().keys()

    run_ranks(2, body, bed)


def test_built_without_memory_and_filled_shard_by_shard(bed: Any, ranks: int) -> None:
    """Same bits as a dense model of the same seed, for tp > 1 with dp = 1, too; case 26: what is tied stays tied."""

    def body(bed: Any, kind: str, tied: bool) -> None:
        manual_seed(5)
        with init_empty_weights():
            dense = bed.Net(tied=tied)
        init_parameters(dense)
        manual_seed(5)
        with init_empty_weights():
            model = bed.Net(tied=tied)
        mesh = bed.mesh_of(kind, model)
        bed.shard_blocks(model, mesh)
        assert all(value.is_meta for value in model.parameters())
        init_parameters(model)
        for name, value in dense.named_parameters():
            found = dict(model.named_parameters())[name]
            assert torch.equal(found.detach().full_tensor(), value), name
        assert (model.head.weight is model.embed.weight) == tied
        tokens, _ = bed.tokens_of(0, 0)
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (dense, model)]
        for one, optimizer in zip((dense, model), optimizers, strict=True):
            one(tokens).square().mean().backward()
            optimizer.step()
        for name, value in dense.named_parameters():
            found = dict(model.named_parameters())[name].detach().full_tensor()
            torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6, msg=name)

    for kind in ("fsdp", "tp"):
        for tied in (False, True):
            if not (kind == "tp" and tied):
                run_ranks(ranks, body, bed, kind, tied)


def test_converting_a_sharded_model(bed: Any) -> None:
    def body(bed: Any) -> None:
        it = bed(dtype=torch.float32)
        it.backward()
        it.model.zero_grad()
        it.dense.zero_grad()
        it.model.double()
        it.dense.double()
        it.optimize()
        it.train(4)
        assert all(value.dtype == torch.float64 for value in it.model.state_dict().values())

    run_ranks(2, body, bed)


def test_copies_and_pickles_train_by_themselves(bed: Any, ranks: int) -> None:
    def body(bed: Any) -> None:
        it = bed(build=lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5)), shard=shard)

        def objective(model: Any, rank: int, step: int) -> torch.Tensor:
            x = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
            return model(x).square().mean()

        it.backward(0, objective)
        it.update()
        before = {name: value.clone() for name, value in it.model.state_dict().items()}
        file = io.BytesIO()
        torch.save(it.model, file)
        file.seek(0)
        original, dense = it.model, it.dense
        for twin in (copy.deepcopy(it.model), torch.load(file, weights_only=False)):
            assert isinstance(twin, nn.Sequential)
            assert isinstance(twin, HSDPModule)
            assert twin[0].weight is not original[0].weight
            it.model, it.dense = twin, copy.deepcopy(dense)
            it.optimize()
            it.train(4, objective)
        for name, value in original.state_dict().items():
            assert torch.equal(value.to_local(), before[name].to_local()), f"{name} was changed by training a copy"

    def shard(model: Any, mesh: Any) -> None:
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)

    run_ranks(ranks, body, bed)


def test_what_a_sharded_module_is(bed: Any) -> None:
    def body(bed: Any) -> None:
        it = bed()
        block = it.model.blocks[0]
        assert isinstance(block, bed.Block)
        assert isinstance(block, HSDPModule)
        assert isinstance(block, ShardedModule)
        assert type(block).__name__ == "HSDPBlock"
        handle = block.unshard(async_op=True)
        handle.wait()
        assert block.up.weight.shape == (24, 6)
        assert not isinstance(block.up.weight, DTensor)
        block.reshard()
        assert isinstance(block.up.weight, DTensor)

    run_ranks(2, body, bed)


def test_names_of_the_package_are_no_modules() -> None:
    """Also when the module that defines a name was imported first, as pickles of it do."""
    for name, module in hp_fsdp.EXPORTS.items():
        importlib.import_module(f"hp_fsdp.{module}")
        assert not isinstance(getattr(hp_fsdp, name), ModuleType), name
