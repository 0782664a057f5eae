"""torch's distributed checkpoint saves DTensors and loads them in another layout, on another number of ranks.

Optimizer states, tied weights, asynchronous saving, and plain state dicts that are loaded into sharded models, as well.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from hp_core import (
    DTensor,
    Layout,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    record_collectives,
    shard_module,
    unique_state_dict,
)
from hp_core.errors import LayoutError
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


# -- uneven, ragged and empty pieces ----------------------------------------------------------------------------------


def save_uneven(folder: str) -> None:
    """Rows cut by tensor parallelism, and each piece further by FSDP; ragged shares, one of them empty."""
    base = Layout.from_device_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    line = Layout.from_device_mesh(init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",)))
    rows = torch.arange(20.0).view(5, 4)
    state = {
        "strided": distribute_tensor(rows, base(("tp", "dp")), src_data_rank=None),
        "columns": distribute_tensor(rows, base("dp", "tp"), src_data_rank=None),
        "ragged": distribute_tensor(rows, line(RaggedShard((2, 0, 1, 2))), src_data_rank=None),
    }
    dcp.save(state, checkpoint_id=folder)


def load_uneven(folder: str, ranks: int) -> None:
    line = Layout.from_device_mesh(init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",)))
    shares = (0, 1, 4, 0) if ranks == 4 else (5,)
    layouts = {"strided": line("fsdp"), "columns": line(RaggedShard(shares)), "ragged": line(None, "fsdp")}
    state = {name: distribute_tensor(torch.zeros(5, 4), layout) for name, layout in layouts.items()}
    dcp.load(state, checkpoint_id=folder)
    for name, tensor in state.items():
        assert tensor.layout is layouts[name]
        assert torch.equal(tensor.full_tensor(), torch.arange(20.0).view(5, 4)), name


def test_uneven_and_ragged_pieces_are_saved_at_their_offsets(tmp_path: Path) -> None:
    """Public report case 102: (5, 4) cut by FSDP after tensor parallelism on 2 x 2 ranks, loaded on 1 and on 4."""
    run_ranks(4, save_uneven, str(tmp_path))
    run_ranks(4, load_uneven, str(tmp_path), 4)
    run_ranks(1, load_uneven, str(tmp_path), 1)


def save_by_torch(folder: str) -> None:
    import torch.distributed.tensor as theirs

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")).to_torch()
    x = theirs.distribute_tensor(value("uneven"), mesh, [theirs.Shard(0), theirs.Shard(1)])
    dcp.save({"x": x}, checkpoint_id=folder)
    ours = distribute_tensor(torch.zeros(5, 3, dtype=torch.float64), mesh, [Shard(1), Shard(0)])
    dcp.load({"x": ours}, checkpoint_id=folder)
    assert torch.equal(ours.full_tensor(), value("uneven"))


def test_what_torchs_dtensor_saved_is_loaded(tmp_path: Path) -> None:
    run_ranks(4, save_by_torch, str(tmp_path))


# -- models and optimizers ----------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.linear = nn.Linear(4, 2)  # its bias has fewer elements than there are ranks
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(0.0))


def sharded(ranks: int, seed: int) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    model = shard_module(Model(), mesh, {"*.weight": ("fsdp",), "linear.bias": ("fsdp",)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, index + 1.0)
    optimizer.step()
    return model, optimizer


def contents(model: Model, optimizer: torch.optim.Optimizer) -> list[list[Any]]:
    found = [parameter.full_tensor().tolist() for parameter in model.parameters()]
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        assert state["exp_avg"].layout is parameter.layout
        found += [
            state["exp_avg"].full_tensor().tolist(),
            state["exp_avg_sq"].full_tensor().tolist(),
            state["step"].item(),
        ]
    return found


def save_training(folder: str) -> list[Any]:
    model, optimizer = sharded(4, 0)
    states, moments = get_state_dict(model, optimizer)
    dcp.save({"model": states, "optimizer": moments}, checkpoint_id=folder)
    return contents(model, optimizer)


def load_training(folder: str, ranks: int) -> list[Any]:
    model, optimizer = sharded(ranks, 1)
    states, moments = get_state_dict(model, optimizer)
    dcp.load({"model": states, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=states, optim_state_dict=moments)
    assert model.head.weight is model.embed.weight
    return contents(model, optimizer)


@pytest.mark.parametrize("ranks", [4, 2, 1])
def test_optimizer_states_are_saved_and_loaded(tmp_path: Path, ranks: int) -> None:
    """Public report case 101: ranks whose piece of the bias is empty have a state, too."""
    saved = run_ranks(4, save_training, str(tmp_path))
    assert run_ranks(ranks, load_training, str(tmp_path), ranks) == saved[:ranks]


def save_tied(folder: str) -> list[Any]:
    model, _ = sharded(2, 0)
    state = unique_state_dict(model)
    assert list(state) == ["steps", "embed.weight", "linear.weight", "linear.bias"]
    assert not any(tensor.requires_grad for tensor in state.values())
    dcp.save(state, checkpoint_id=folder)
    return model.embed.weight.full_tensor().tolist()


def load_tied(folder: str) -> list[Any]:
    model, _ = sharded(1, 1)
    dcp.load(unique_state_dict(model), checkpoint_id=folder)
    assert model.head.weight is model.embed.weight
    return model.head.weight.full_tensor().tolist()


def test_tied_weights_are_stored_once_and_still_tied(tmp_path: Path) -> None:
    """Public report case 104."""
    saved = run_ranks(2, save_tied, str(tmp_path))
    stored = FileSystemReader(str(tmp_path)).read_metadata().state_dict_metadata
    assert sorted(stored) == ["embed.weight", "linear.bias", "linear.weight", "steps"]
    assert run_ranks(1, load_tied, str(tmp_path)) == saved[:1]


def save_meanwhile(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    weight = nn.Parameter(distribute_tensor(torch.ones(5, 4), mesh, [Shard(0)]))
    optimizer = torch.optim.AdamW([weight], lr=0.5)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    before = copy.deepcopy(weight.detach())
    future = dcp.async_save({"weight": weight, "moments": optimizer.state[weight]}, checkpoint_id=folder)
    optimizer.step()
    future.result()
    assert not torch.equal(weight.detach().full_tensor(), before.full_tensor())
    state = {
        "weight": torch.zeros_like(weight),
        "moments": {"exp_avg": torch.zeros_like(weight), "step": torch.tensor(0.0)},
    }
    dcp.load(state, checkpoint_id=folder)
    assert torch.equal(state["weight"].full_tensor(), before.full_tensor())
    assert torch.allclose(state["moments"]["exp_avg"].full_tensor(), torch.full((5, 4), 0.1))
    assert state["moments"]["step"].item() == 1.0


def test_an_asynchronous_save_keeps_the_values_of_its_call(tmp_path: Path) -> None:
    """Public report case 99: the values that are on disk are from before the next step, the step count as well."""
    run_ranks(2, save_meanwhile, str(tmp_path))


# -- plain state dicts --------------------------------------------------------------------------------------------------


def load_plain(how: str) -> None:
    model, _ = sharded(4, 0)
    layouts = [parameter.layout for parameter in model.parameters()]
    torch.manual_seed(2)
    dense = Model()
    state = dict(dense.state_dict())
    with record_collectives() as log:
        if how == "copy":
            model.load_state_dict(state)
        elif how == "assign":
            model.load_state_dict(state, assign=True)
        elif how == "part":
            model.linear.load_state_dict({"weight": state["linear.weight"], "bias": state["linear.bias"]})
            model.embed.load_state_dict({"weight": state["embed.weight"]})
        else:
            set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
    assert not log, log.summary()
    assert type(state["linear.weight"]) is torch.Tensor  # the caller's own is left alone
    assert [parameter.layout for parameter in model.parameters()][: len(layouts)] == layouts
    for name, tensor in model.state_dict().items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(full, dense.state_dict()[name]), name


@pytest.mark.parametrize("how", ["copy", "assign", "part", "torch's function"])
def test_a_plain_state_dict_is_the_global_values(how: str) -> None:
    run_ranks(4, load_plain, how)


def load_piece() -> None:
    model, _ = sharded(2, 0)
    model.linear.load_state_dict({name: value.to_local() for name, value in model.linear.state_dict().items()})


def test_this_ranks_piece_is_not_taken_for_the_global_value() -> None:
    assert_same_error(
        2, load_piece, RuntimeError, "size mismatch for weight: copying a param with shape .*1, 4.* is .*2, 4"
    )


def load_unasked() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    layer = nn.Linear(4, 2, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(torch.zeros(2, 4), mesh, [Shard(0)]))
    layer.load_state_dict({"weight": torch.ones(2, 4)})


def test_a_hand_made_model_refuses_what_it_can_not_place() -> None:
    assert_same_error(2, load_unasked, RuntimeError, "plain tensor of shape .*distribute_tensor")


def round_trip() -> None:
    model, optimizer = sharded(2, 0)
    twin, twin_optimizer = sharded(2, 1)
    twin.load_state_dict(model.state_dict())
    twin_optimizer.load_state_dict(optimizer.state_dict())
    assert contents(model, optimizer) == contents(twin, twin_optimizer)
    copied = copy.deepcopy(model)
    assert copied.head.weight is copied.embed.weight
    with torch.no_grad():
        copied.embed.weight.zero_()
    assert contents(model, optimizer) == contents(twin, twin_optimizer)
    copied.load_state_dict(Model().state_dict())
    assert isinstance(copied.linear.weight, DTensor)
    # torch's option knows its own DTensors only: ours stay what they are, never a piece in the guise of the whole
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert full["embed.weight"].layout is model.embed.weight.layout


def test_state_dicts_and_copies_of_models() -> None:
    run_ranks(2, round_trip)


def pending() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    DTensor.from_local(torch.ones(2), mesh, [Partial()]).__create_chunk_list__()


def test_the_reason_names_the_remedy() -> None:
    assert_same_error(2, pending, LayoutError, "reduce_partial")
