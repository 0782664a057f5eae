"""Muon of sharded matrices: equal to dense, each matrix computed once, two all-to-alls or none."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from hp_core import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_core.errors import LayoutError, PlanError
from hp_core.testing import assert_same_error, record_collectives, run_ranks
from hp_fsdp.optim import Muon

SHAPES = [(8, 6), (7, 3), (3, 9), (1, 4), (4, 5, 3), (8, 6)]


def values(shapes: Sequence[tuple[int, ...]] = SHAPES, seed: int = 0, dtype: Any = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


class Counted:
    """How many matrices this rank orthogonalizes, and in how many calls."""

    def __enter__(self) -> Counted:
        from hp_fsdp.platform.torch.optim import newton_schulz

        self.calls: list[tuple[int, ...]] = []
        self._module, self._real = newton_schulz, newton_schulz.orthogonalize

        def counting(matrices: torch.Tensor, *options: Any) -> torch.Tensor:
            self.calls.append(tuple(matrices.shape))
            return self._real(matrices, *options)

        newton_schulz.orthogonalize = counting
        return self

    def __exit__(self, *_: object) -> None:
        self._module.orthogonalize = self._real

    @property
    def matrices(self) -> int:
        return sum(shape[0] for shape in self.calls)


# -- plain parameters -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw"}, {"ns_steps": 3}], ids=str
)
def test_plain_matrices_equal_torchs_muon(options: dict[str, Any]) -> None:
    options = {"lr": 0.1, **options}
    shapes = [(8, 6), (7, 3), (3, 9), (8, 6)]
    pairs = [[nn.Parameter(value) for value in values(shapes, dtype=torch.float32)] for _ in range(2)]
    optimizers = Muon(pairs[0], **options), torch.optim.Muon(pairs[1], **options)
    for step in range(3):
        for params, optimizer in zip(pairs, optimizers, strict=True):
            for param, gradient in zip(params, values(shapes, step, torch.float32), strict=True):
                param.grad = gradient
            optimizer.step()
    for mine, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02)
        torch.testing.assert_close(
            optimizers[0].state[mine]["momentum_buffer"], optimizers[1].state[theirs]["momentum_buffer"]
        )
    again = Muon(pairs[1], **options)
    again.load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    again.step()
    torch.optim.Muon(pairs[0]).load_state_dict(
        {**optimizers[0].state_dict(), "param_groups": optimizers[1].state_dict()["param_groups"]}
    )


def test_a_stack_is_its_matrices() -> None:
    """Public reports, case 106."""
    stack = nn.Parameter(values([(4, 5, 3)])[0])
    single = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    optimizers = Muon([stack], ns_dtype="float64"), Muon(single, ns_dtype="float64")
    for step in range(2):
        stack.grad = values([(4, 5, 3)], step)[0]
        for param, gradient in zip(single, stack.grad, strict=True):
            param.grad = gradient.clone()
        with Counted() as counted:
            optimizers[0].step()
        assert counted.calls == [(4, 5, 3)]
        optimizers[1].step()
    torch.testing.assert_close(stack.detach(), torch.stack([param.detach() for param in single]))


def test_bad_use_is_refused() -> None:
    with pytest.raises(PlanError, match=r"\(2, 3, 1, 1\).*convolution"):
        Muon([nn.Parameter(torch.ones(2, 3, 1, 1))])
    with pytest.raises(PlanError, match=r"\(3,\), which is no matrix; give it to AdamW"):
        Muon([nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))])
    optimizer = Muon([nn.Parameter(torch.ones(2, 3))])
    with pytest.raises(PlanError, match="complex"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 3, dtype=torch.complex64))]})
    assert len(optimizer.param_groups) == 1
    for bad in ({"adjust_lr_fn": "none"}, {"ns_dtype": "int8"}, {"lr": -1.0}, {"ns_coefficients": (1.0, 2.0)}):
        with pytest.raises(PlanError, match=next(iter(bad))):
            Muon([nn.Parameter(torch.ones(2, 3))], **bad)


# -- sharded parameters ---------------------------------------------------------------------------------------------


def layouts_of(case: str) -> tuple[tuple[int, ...], tuple[str, ...], int, list[list[Any]] | None]:
    """Mesh, names, flat axis and the placements on the other axes, of a case."""
    tensor_parallel = [Shard(0), Shard(1), Shard(1), Replicate(), Shard(0), Shard(1)]
    experts = [Replicate(), Shard(0), Replicate(), Replicate(), Shard(2), Replicate()]
    return {
        "fsdp 2": ((2,), ("dp",), 0, None),
        "fsdp 4": ((4,), ("dp",), 0, None),
        "hsdp": ((2, 2), ("dpr", "dps"), 1, None),
        "dp x tp": ((2, 2), ("dp", "tp"), 0, [[Replicate(), placement] for placement in tensor_parallel]),
        "dp x ep": ((2, 2), ("dp", "ep"), 0, [[Replicate(), placement] for placement in experts]),
    }[case]


def train(make_unit: Callable[..., Any], case: str, whole: bool, dtype: Any, ns_dtype: str) -> tuple[int, int]:
    shape, names, axis, outer = layouts_of(case)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    unit = make_unit(values(dtype=dtype), mesh, axis, outer, whole)
    dense = [nn.Parameter(value) for value in values(dtype=dtype)]

    def groups(params: Sequence[Any]) -> list[dict[str, Any]]:
        return [
            {"params": params[:3]},
            {"params": params[3:], "lr": 0.05, "adjust_lr_fn": "match_rms_adamw", "nesterov": False},
        ]

    mine, theirs = (Muon(groups(params), lr=0.1, ns_dtype=ns_dtype) for params in (unit.params, dense))
    for step in range(3):
        gradients = values(seed=step + 1, dtype=dtype)
        unit.give(gradients)
        for param, gradient in zip(dense, gradients, strict=True):
            param.grad = gradient
        with record_collectives() as log, Counted() as counted:
            mine.step()
        theirs.step()
        assert set(log.counts) <= {"all_to_all"}, log.summary()
    tolerance = 1e-10 if ns_dtype == "float64" else 1e-5 if ns_dtype == "float32" else 0.02
    for param, expected in zip(unit.params, dense, strict=True):
        torch.testing.assert_close(param.detach().full_tensor(), expected.detach(), rtol=tolerance, atol=tolerance)
        momentum = mine.state[param]["momentum_buffer"]
        assert momentum.layout is param.layout
        torch.testing.assert_close(momentum.full_tensor(), theirs.state[expected]["momentum_buffer"])
    return len(log), counted.matrices


NUMBER = 5 + 4  # matrices in SHAPES


def all_cases(make_unit: Callable[..., Any], cases: Sequence[str]) -> list[Any]:
    results = []
    for case in cases:
        for whole in (False, True):
            for dtype, ns_dtype in (
                (torch.float64, "float64"),
                (torch.float32, "float32"),
                (torch.float32, "bfloat16"),
                (torch.bfloat16, "bfloat16"),
            ):
                print(case, whole, dtype, ns_dtype)  # shown if it fails
                results.append((case, whole, train(make_unit, case, whole, dtype, ns_dtype)))
    return results


@pytest.mark.parametrize(("ranks", "cases"), [(2, ["fsdp 2"]), (4, ["fsdp 4", "hsdp", "dp x tp", "dp x ep"])])
def test_sharded_matrices_equal_dense_and_each_is_computed_once(unit: Any, ranks: int, cases: list[str]) -> None:
    """Public reports, case 105."""
    for outcomes in zip(*run_ranks(ranks, all_cases, unit, cases), strict=True):
        case, whole, _ = outcomes[0]
        messages = {counts[0] for _, _, counts in outcomes}
        computed = sum(counts[1] for _, _, counts in outcomes)
        if whole and case in ("fsdp 2", "fsdp 4", "hsdp"):
            assert messages == {0}, (case, whole)
            # Of replicas each computes its own; nothing is sent.
            assert computed == NUMBER * (2 if case == "hsdp" else 1), (case, whole)
        else:
            assert messages == {2}, (case, whole)
            if case.startswith("fsdp"):
                assert computed == NUMBER, (case, whole)
            else:  # a matrix that is whole on a rank, and on its replicas, is computed by each of these
                assert NUMBER <= computed < 2 * NUMBER, (case, whole)


def cut_everywhere(make_unit: Callable[..., Any]) -> tuple[int, list[tuple[int, ...]]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dpr", "dps"))
    unit = make_unit(values([(8, 6)]) + values([(6, 8)] * 2), mesh, 1)
    optimizer = Muon(unit.params)
    unit.give(values([(8, 6)]) + values([(6, 8)] * 2))
    with record_collectives() as log, Counted() as counted:
        optimizer.step()
    sizes = [record.group_size for record in log]
    assert sizes in ([], [4, 4])
    return len(log), counted.calls


def test_replicas_share_the_cut_matrices(unit: Any) -> None:
    """Of three matrices on two shards only the middle one is cut; the ends are whole on two replicas each."""
    results = run_ranks(4, cut_everywhere, unit)
    assert {messages for messages, _ in results} == {2}
    calls = sorted(shape for _, shapes in results for shape in shapes)
    assert calls == [(1, 6, 8)] * 3 + [(1, 8, 6)] * 2


def equal_shapes() -> list[tuple[int, ...]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    params = [
        nn.Parameter(distribute_tensor(value, mesh, [Shard(1)], src_data_rank=None)) for value in values([(8, 6)] * 6)
    ]
    optimizer = Muon(params)
    for param, gradient in zip(params, values([(8, 6)] * 6), strict=True):
        param.grad = distribute_tensor(gradient, mesh, [Shard(1)], src_data_rank=None)
    with Counted() as counted:
        optimizer.step()
    return counted.calls


def test_matrices_of_one_shape_are_one_batch_and_owners_are_balanced() -> None:
    assert run_ranks(2, equal_shapes) == [[(3, 8, 6)]] * 2


def ordinary_shards() -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    pair = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",), rank_list=(1, 3))
    kinds: list[tuple[tuple[int, ...], Any, list[Any], int]] = [
        ((4, 5, 3), grid, [Shard(0), Replicate()], 0),  # cut between matrices: nothing is sent
        ((5, 4, 3), grid, [Shard(0), Shard(2)], 2),
        ((5, 7), grid, [Shard(1), Shard(0)], 2),
        ((3, 7), line, [Shard(0)], 2),
        ((6, 5), line, [Replicate()], 0),
        ((6, 5), pair, [Shard(0)], 2),
    ]
    shapes = [shape for shape, *_ in kinds]

    def laid_out(tensors: Sequence[torch.Tensor]) -> list[Any]:
        result = []
        for tensor, (_, mesh, placements, _) in zip(tensors, kinds, strict=True):
            if mesh.get_coordinate() is None:
                result.append(DTensor.from_local(tensor.new_empty(0), mesh, placements, shape=tensor.shape))
            else:
                result.append(distribute_tensor(tensor, mesh, placements, src_data_rank=None))
        return result

    params = [nn.Parameter(value) for value in laid_out(values(shapes))]
    dense = [nn.Parameter(value) for value in values(shapes)]
    mine, theirs = Muon(params, lr=0.1, ns_dtype="float64"), Muon(dense, lr=0.1, ns_dtype="float64")
    for step in range(2):
        for param, gradient in zip(params, laid_out(values(shapes, step)), strict=True):
            param.grad = gradient
        for param, gradient in zip(dense, values(shapes, step), strict=True):
            param.grad = gradient
        with record_collectives() as log:
            mine.step()
        theirs.step()
        # the two meshes of all ranks share one exchange
        assert [record.group_size for record in log] == ([4, 2, 4, 2] if pair.get_coordinate() else [4, 4])
    for param, expected in zip(params, dense, strict=True):
        if param.layout.mesh.get_coordinate() is not None:
            torch.testing.assert_close(param.detach().full_tensor(), expected.detach(), rtol=1e-10, atol=1e-10)
    for (shape, _, _, messages), param in zip(kinds, params, strict=True):
        if param.layout.mesh.get_coordinate() is None:
            continue
        optimizer = Muon([param])
        param.grad = torch.ones_like(param.detach())
        with record_collectives() as log:
            optimizer.step()
        assert len(log) == messages, (shape, log.summary())


def test_ordinary_shards_of_several_meshes_and_stacks_of_experts() -> None:
    """Public reports, cases 106 and 109."""
    run_ranks(4, ordinary_shards)


def missing_gradients(make_unit: Callable[..., Any]) -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    rank = mesh.get_local_rank()
    shapes = [(9, 8), (8, 9), (9, 8)]
    unit = make_unit(values(shapes), mesh)
    dense = [nn.Parameter(value) for value in values(shapes)]
    mine, theirs = Muon(unit.params, lr=0.1, ns_dtype="float64"), Muon(dense, lr=0.1, ns_dtype="float64")
    assert all(
        0 < p._local.numel() < p.numel() for p, there in zip(unit.params, (1, 1, 3), strict=True) if rank == there
    )
    # nowhere at all, nowhere for the second, on some ranks only, everywhere, on some again
    for step, absent in enumerate(
        [{0: (0, 1, 2, 3), 1: (0, 1, 2, 3), 2: (0, 1, 2, 3)}, {1: (0, 1, 2, 3)}, {0: (1,), 2: (2,)}, {}, {1: (2,)}]
    ):
        gradients = values(shapes, step)
        unit.give([None if rank in absent.get(place, ()) else gradient for place, gradient in enumerate(gradients)])
        for place, (param, gradient) in enumerate(zip(dense, gradients, strict=True)):
            gone = absent.get(place, ())
            param.grad = None
            if len(gone) < 4:
                param.grad = gradient.clone()
                for other in gone:
                    start, stop = unit.params[place].layout.flat_interval(shapes[place], other)
                    param.grad.view(-1)[start:stop] = 0
        with record_collectives() as log:
            mine.step()
        theirs.step()
        assert log.counts == {"all_to_all": 2}
        for param, expected in zip(unit.params, dense, strict=True):
            torch.testing.assert_close(param.detach().full_tensor(), expected.detach(), rtol=1e-10, atol=1e-10)
    for param, expected in zip(unit.params, dense, strict=True):
        momentum = mine.state[param]["momentum_buffer"]
        torch.testing.assert_close(momentum.full_tensor(), theirs.state[expected]["momentum_buffer"])


def test_missing_gradients_change_no_collective_and_count_as_zeros_where_others_have_some(unit: Any) -> None:
    run_ranks(4, missing_gradients, unit)


def unfreezing(make_unit: Callable[..., Any]) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    shapes = [(9, 8), (8, 9), (9, 8)]
    unit = make_unit(values(shapes), mesh)
    dense = [nn.Parameter(value) for value in values(shapes)]
    mine, theirs = Muon(unit.params, lr=0.1, ns_dtype="float64"), Muon(dense, lr=0.1, ns_dtype="float64")
    for step, wanted in enumerate([(True, False, True), (True, True, True)]):
        for group in (unit.params, dense):
            for param, flag in zip(group, wanted, strict=True):
                param.requires_grad_(flag)
        gradients = [g if flag else None for g, flag in zip(values(shapes, step), wanted, strict=True)]
        unit.give(gradients)
        for param, gradient in zip(dense, gradients, strict=True):
            param.grad = gradient
        with record_collectives() as log:
            mine.step()
        theirs.step()
        assert len(log) == 2 * wanted[1]  # the one that is cut was frozen
    whole = theirs.state_dict()
    mine.load_state_dict(whole)
    for param, expected in zip(unit.params, dense, strict=True):
        torch.testing.assert_close(param.detach().full_tensor(), expected.detach(), rtol=1e-10, atol=1e-10)
        loaded = mine.state[param]["momentum_buffer"]
        assert loaded.layout is param.layout
        torch.testing.assert_close(loaded.full_tensor(), theirs.state[expected]["momentum_buffer"])


def test_frozen_matrices_take_no_part_and_states_of_whole_tensors_load(unit: Any) -> None:
    run_ranks(2, unfreezing, unit)


def pending() -> None:
    from hp_core import Partial

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    param = nn.Parameter(DTensor.from_local(torch.ones(2, 3), mesh, [Partial()]))
    Muon([param]).step()


def test_pending_sums_are_refused_alike() -> None:
    assert_same_error(2, pending, LayoutError, "reduce it before it is optimized")
