"""Fingerprints: one hash for all layouts of a tensor, and replicas that differ are found with rank and name."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hp_core import (
    ColwiseParallel,
    DTensor,
    FlatShard,
    Layout,
    LayoutError,
    MeshError,
    Partial,
    PlanError,
    PlatformError,
    RaggedShard,
    ReplicaError,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    fingerprint,
    init_device_mesh,
    parallelize_module,
    record_collectives,
)
from hp_core.process_group import get_rank
from hp_core.testing import assert_same_error, run_ranks

MASK = (1 << 64) - 1


def split_mix(number: int) -> int:
    """SplitMix64's output function, on Python's integers."""
    number &= MASK
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & MASK
    return number ^ (number >> 31)


def dense_hash(tensor: torch.Tensor) -> int:
    """The sum of hashes of all elements, one by one."""
    width = tensor.element_size()
    words = max(1, width // 8)
    data = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
    code = {1: "b", 2: "h", 4: "i", 8: "q"}[width // words]
    bits = struct.unpack(f"<{len(data) * words // width}{code}", data)
    return sum(split_mix(bit + (index + 1) * 0x9E3779B97F4A7C15) for index, bit in enumerate(bits)) & MASK


def hash_of(tensor: torch.Tensor) -> int:
    from hp_core.debug.mixing import hash_of_bits
    from hp_core.geometry import origin_box

    return hash_of_bits(tensor, [origin_box(tensor.shape)], tuple(tensor.shape))


@pytest.mark.parametrize(
    "name", ["float32", "float64", "bfloat16", "float16", "int64", "int8", "bool", "complex64", "complex128"]
)
def test_equals_a_hash_of_one_element_after_the_other(name: str) -> None:
    values = (torch.randn(7, 3, 5, generator=torch.Generator().manual_seed(1)) * 3).to(getattr(torch, name))
    assert hash_of(values) == dense_hash(values)


def test_large_tensors_are_hashed_piece_by_piece_and_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    from hp_core.debug import mixing

    x = torch.randn(9, 4, 6)
    for most in (1, 5, 24, 100):
        monkeypatch.setattr(mixing, "_PIECE", {"cpu": most})
        assert hash_of(x) == dense_hash(x)
    assert hash_of(x.transpose(0, 1)) == dense_hash(x.transpose(0, 1))
    assert hash_of(torch.tensor(2.5)) == dense_hash(torch.tensor(2.5))


def test_every_bit_counts_where_comparison_sees_none() -> None:
    payload = torch.from_numpy(np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32))
    one, other = payload[:1], payload[1:]
    assert payload.isnan().all()
    assert hash_of(one) != hash_of(other)
    assert hash_of(torch.zeros(3)) != hash_of(-torch.zeros(3))
    x = torch.randn(64)
    changed = {hash_of(x)}
    for bit in range(32):
        y = x.clone()
        y.view(torch.int32)[17] ^= (1 << bit) if bit < 31 else -(1 << 31)
        changed.add(hash_of(y))
    assert len(changed) == 33
    assert hash_of(x.flip(0)) != hash_of(x)


def test_shape_dtype_and_name_count() -> None:
    x = torch.arange(6, dtype=torch.int32)
    prints = [
        fingerprint({"x": x}),
        fingerprint({"x": x.view(2, 3)}),
        fingerprint({"x": x.view(torch.float32)}),
        fingerprint({"y": x}),
    ]
    assert len({print_.total for print_ in prints}) == 4
    assert prints[0].tensors["x"] == prints[3].tensors["y"]  # of one tensor alone, so that renamed ones can be compared
    assert prints[0].compare(prints[1]) == ["x"]
    assert prints[0].compare(prints[3].tensors) == ["x", "y"]
    assert prints[0].compare(fingerprint({"x": x.clone()})) == []


def layouts() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layout = Layout.from_device_mesh(mesh)
    flat = mesh.flatten("all")
    return {
        "replicated": layout(),
        "rows": layout("dp"),
        "columns": layout(None, "tp"),
        "both": layout("dp", "tp"),
        "nested": layout(("tp", "dp")),
        "last": layout(None, None, ("dp", "tp")),
        "ragged": Layout.from_device_mesh(flat)(RaggedShard((1, 0, 3, 3))),
        "flat": Layout.from_device_mesh(flat)(FlatShard(32, 11)),
        "flat in tp": layout(FlatShard(40, 3), Shard(1)),
    }


def test_a_global_tensor_has_one_hash_whatever_its_layout() -> None:
    x = torch.randn(7, 5, 3, dtype=torch.float64)

    def hashes(x: torch.Tensor) -> dict[str, str | None]:
        return dict(fingerprint({name: distribute_tensor(x, one) for name, one in layouts().items()}).check().tensors)

    results = run_ranks(4, hashes, x)
    dense = fingerprint({"x": x}).tensors["x"]
    for result in results:
        assert result == dict.fromkeys(result, dense)
        assert len(result) == 9


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.norm = nn.LayerNorm(6)
        self.norm.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(self.up(x)))


def parallel_model() -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(3)
    model = Model()
    return parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}), mesh


def test_equal_replicas_pass_and_the_total_is_that_of_the_dense_model() -> None:
    def look() -> tuple[str | None, dict[Any, str], str]:
        model, mesh = parallel_model()
        found = fingerprint(model, mesh=mesh).check()
        return found.total, found.coordinates, str(found)

    torch.manual_seed(3)
    dense = fingerprint(Model())
    for total, coordinates, text in run_ranks(4, look):
        assert total == dense.total
        # replicas are equal, other parts differ
        assert coordinates[0, 0] == coordinates[1, 0] != coordinates[0, 1] == coordinates[1, 1]
        assert "6 tensors on 4 ranks, replicas equal" in text


def flipped(name: str, rank: int) -> Any:
    """A parallel model in which one bit of one rank's part of a parameter is wrong."""
    model, mesh = parallel_model()
    if get_rank() == rank:
        parameter = model.get_parameter(name)
        local = getattr(parameter, "_local", parameter)
        local.data.view(torch.int32).view(-1)[2] ^= 1
    return model, mesh


@pytest.mark.parametrize(
    ("name", "rank", "odd", "groups"),
    [
        ("norm.bias", 1, (1,), ((0, 2, 3), (1,))),  # plain, on all ranks
        ("down.bias", 2, (2,), ((0, 1, 3), (2,))),  # a DTensor, replicated over tp, and by dp's ranks alike
        ("up.weight", 3, (), ((1,), (3,))),  # a shard, and its replica: nobody can tell who is right
    ],
)
def test_a_flipped_bit_is_found_with_rank_and_name(name: str, rank: int, odd: Any, groups: Any) -> None:
    def look() -> Any:
        model, mesh = flipped(name, rank)
        found = fingerprint(model, mesh=mesh)
        [difference] = found.differences
        ranks = tuple(members for _, members in difference.groups)
        missing = [name for name, text in found.tensors.items() if text is None]
        return difference.name, difference.odd_ranks, ranks, found.total, missing

    assert run_ranks(4, look) == [(name, odd, groups, None, [name])] * 4


def test_all_ranks_raise_alike() -> None:
    def check() -> None:
        model, mesh = flipped("norm.bias", 1)
        fingerprint(model, mesh=mesh).check()

    message, *others = assert_same_error(4, check, ReplicaError)
    assert set(others) == {message}
    assert "parameters differ between ranks that should hold the same bits" in message
    assert "'norm.bias' [6]: rank 1 differs from the others (ranks 0, 2, 3 hold " in message


def test_the_largest_mesh_or_the_current_one_is_asked_unless_one_is_given() -> None:
    def look() -> Any:
        model, mesh = parallel_model()
        alone = fingerprint(model)
        with mesh:
            return list(alone.ranks), list(fingerprint(model).ranks), list(fingerprint(Model()).ranks)

    results = run_ranks(4, look)
    assert [alone for alone, _, _ in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert all(entered == world == [0, 1, 2, 3] for _, entered, world in results)


def test_gradients_that_were_not_reduced_or_are_missing_are_found() -> None:
    def look() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        model(torch.full((2, 3), 1.0 + get_rank())).sum().backward()
        if get_rank() == 2:
            model[1].weight.grad = None
        model[1].bias.requires_grad_(False)
        found = fingerprint(model, "gradients")
        return (
            list(found.tensors),
            [(one.name, [ranks for _, ranks in one.groups]) for one in found.differences],
            [text for one in found.differences for text, ranks in one.groups if ranks == (2,)],
        )

    names, differences, of_rank_2 = run_ranks(4, look)[0]
    assert names == ["0.weight", "0.bias", "1.weight"]
    # the bias of the first layer sees the same on all ranks
    assert differences == [("0.weight", [(0,), (1,), (2,), (3,)]), ("1.weight", [(0,), (1,), (2,), (3,)])]
    assert of_rank_2[1] == "none"


def test_gradients_of_two_layouts_are_compared_bit_for_bit() -> None:
    def both() -> Any:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        totals = []
        for placement in (Shard(0), Shard(1), Replicate()):
            weight = distribute_tensor(torch.ones(8, 8), mesh, [placement]).requires_grad_()
            (distribute_tensor(torch.arange(16.0).view(2, 8), mesh) @ weight).full_tensor().sum().backward()
            totals.append(fingerprint([("weight", weight.grad)]).check().total)
        return totals

    weight = torch.ones(8, 8, requires_grad=True)
    (torch.arange(16.0).view(2, 8) @ weight).sum().backward()
    assert run_ranks(4, both) == [[fingerprint({"weight": weight.grad}).total] * 3] * 4


def test_ranks_may_have_tensors_of_their_own() -> None:
    def look() -> Any:
        model = nn.ModuleDict({"router": nn.Linear(2, 2), "experts": nn.Linear(2, 2)})
        nn.init.ones_(model["router"].weight)
        nn.init.zeros_(model["router"].bias)
        nn.init.constant_(model["experts"].weight, get_rank())
        nn.init.constant_(model["experts"].bias, get_rank())
        everywhere = fingerprint(model)
        own = fingerprint(model, per_rank="experts.*").check()
        return [one.name for one in everywhere.differences], own.total is not None, len(set(own.ranks.values()))

    assert run_ranks(4, look) == [(["experts.weight", "experts.bias"], True, 4)] * 4


def test_a_tied_parameter_counts_once_and_buffers_when_asked() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    assert list(fingerprint(model).tensors) == ["0.weight", "0.bias", "1.bias"]
    assert list(fingerprint(Model(), "buffers").tensors) == ["norm.seen"]


def test_torchs_own_dtensors_are_compared_as_well() -> None:
    def look(x: torch.Tensor) -> Any:
        import torch.distributed.tensor as native

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")).to_torch()
        tensor = native.distribute_tensor(x, mesh, [native.Replicate(), native.Shard(1)])
        return fingerprint({"x": tensor}).check().total

    x = torch.randn(3, 5)
    assert run_ranks(4, look, x) == [fingerprint({"x": x}).total] * 4


def other_structures() -> None:
    fingerprint(nn.Linear(2, 2 + get_rank() // 2))


def pending() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    fingerprint({"x": DTensor.from_local(torch.ones(2), mesh, [Partial()])})


def outside() -> None:
    model, mesh = parallel_model()
    fingerprint(model, mesh=mesh["dp"])


def without_storage() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    fingerprint(model)


@pytest.mark.parametrize(
    ("function", "error", "said"),
    [
        (other_structures, PlanError, "ranks [0, 1] have 2 tensors; ranks [2, 3] have 2 tensors"),
        (pending, LayoutError, "call reduce_partial"),
        (outside, MeshError, "aren't among those asked"),
        (without_storage, PlatformError, "call init_parameters() first"),
    ],
)
def test_what_cannot_be_compared_is_refused_on_all_ranks(function: Any, error: type[Exception], said: str) -> None:
    def caught() -> str:
        with pytest.raises(error) as info:
            function()
        return str(info.value)

    assert all(said in message for message in run_ranks(4, caught))


def test_wrong_arguments_are_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(PlanError, match="hash 'parameters', 'gradients' or 'buffers'"):
        fingerprint(model, "weights")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"per_rank='experts.\*' fits no tensor; there are 2: 'weight', 'bias'"):
        fingerprint(model, per_rank="experts.*")
    with pytest.raises(PlanError, match="1 gradients were given for 2 trainable parameters"):
        fingerprint(model, [torch.zeros(2)])
    with pytest.raises(PlanError, match="'x' is a int, not a tensor"):
        fingerprint({"x": 3})
    with pytest.raises(PlatformError, match=r"a builtins.int was given where a torch.nn.Module is needed"):
        fingerprint(3)


def test_what_is_exchanged_grows_with_tensors_and_ranks_but_not_with_their_product() -> None:
    def look(count: int, differ: bool) -> Any:
        tensors = {
            f"t{i}": torch.full((3,), float(i) + (differ and i % 3 > 0 and get_rank() == 2)) for i in range(count)
        }
        with record_collectives() as log:
            found = fingerprint(tensors)
        moved = [(call.kind, call.nbytes) for call in log]
        message = ""
        if differ:
            with pytest.raises(ReplicaError) as error:
                found.check()
            message = str(error.value)
        names = [one.name for one in found.differences]
        return moved, names, found.untold, message, [name for name, text in found.tensors.items() if text is None]

    dealt = 25  # of 98 tensors, to each of 4 ranks
    for moved, names, untold, _, missing in run_ranks(4, look, 98, False):
        assert moved == [
            ("all_gather", 3 * 16),
            ("all_to_all", 3 * dealt * 24),
            ("all_gather", 3 * (1 + 2 * dealt) * 8),
        ]
        assert (names, untold, missing) == ([], (), [])
    for moved, names, untold, message, missing in run_ranks(4, look, 150, True):
        wrong = [f"t{i}" for i in range(150) if i % 3]
        assert len(moved) == 4
        assert (names, list(untold), missing) == (wrong[:64], wrong[64:], wrong)
        assert "'t1' [3]: rank 2 differs from the others" in message
        assert f"and {len(wrong) - 8} more" in message
