"""Clipping by the norm over all parameters, against torch's own clipping of the dense model.

Public reports: case 57 (pipeline stages), 58 (different meshes), 59 (DTensors and plain tensors), 61 (experts), and 62
(gradients are scaled, in no extra memory).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from hp_core import DTensor, FlatShard, Partial, Placement, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_core.errors import LayoutError, MeshError
from hp_core.testing import assert_same_error, record_collectives, run_ranks
from hp_fsdp.clip import ClippingError, NonFiniteNormError, clip_grad_norm_, total_grad_norm

INF = float("inf")
ORDERS = [2.0, INF, 1.0, 3.0]


def value(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(*gradients: torch.Tensor) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    return parameters


def laid_out(gradient: torch.Tensor, mesh: Any, placements: Sequence[Placement]) -> Any:
    """A parameter with this gradient."""
    parameter = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, placements, src_data_rank=None))
    parameter.grad = distribute_tensor(gradient.clone(), mesh, placements, src_data_rank=None)
    return parameter


def check(
    parameters: Sequence[Any],
    gradients: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor] = (),
    collectives: int = 1,
    orders: Sequence[float] = tuple(ORDERS),
    **how: Any,
) -> None:
    """Norm and scaled gradients are those of torch on dense ones: those of `parameters`, and `others` that aren't listed."""
    start = [gradient_of(parameter).clone() for parameter in parameters]
    for order in orders:
        for max_norm in (0.1, 1e6, INF):  # scaled, left alone, and only measured
            for parameter, gradient in zip(parameters, start, strict=True):
                gradient_of(parameter).copy_(gradient)
            reference = dense(*gradients, *others)
            expected = nn.utils.clip_grad_norm_(reference, max_norm, order)
            with record_collectives() as log:
                got = clip_grad_norm_(iter(parameters), max_norm, order, **how)
            assert log.counts == ({"all_reduce": collectives} if collectives else {}), log.summary()
            assert type(got) is torch.Tensor
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=0)
            for parameter, one in zip(parameters, reference, strict=False):
                gradient = parameter.grad.full_tensor() if hasattr(parameter, "_local") else parameter.grad
                torch.testing.assert_close(gradient, one.grad, rtol=1e-10, atol=1e-12)


def gradient_of(parameter: Any) -> torch.Tensor:
    return parameter._local.grad if hasattr(parameter, "_local") else parameter.grad


# -- meshes and plain tensors -----------------------------------------------------------------------------------------


def one_rank() -> None:
    gradients = [value(0, 4, 3), value(1, 5), value(2)]
    check(dense(*gradients), gradients, collectives=0)


def test_plain_tensors_alone_need_no_world() -> None:
    run_ranks(1, one_rank, init=False)
    run_ranks(2, one_rank)


def different_meshes() -> None:
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    gradients = [value(0, 7, 3), value(1, 3, 6), value(2, 5), value(3, 6, 2), value(4)]
    check(
        [
            laid_out(gradients[0], line, [Shard(0)]),
            laid_out(gradients[1], grid, [Replicate(), Shard(1)]),
            laid_out(gradients[2], grid, [Replicate(), Replicate()]),
            laid_out(gradients[3], grid, [Shard(0), Shard(0)]),
            laid_out(gradients[4], line, [Replicate()]),
        ],
        gradients,
    )


def test_case_58_parameters_on_different_meshes_of_the_same_ranks() -> None:
    run_ranks(4, different_meshes)


def mixed(ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    gradients = [value(0, 7, 3), value(1, 3), value(2, 5)]
    plain = dense(*gradients[1:])
    check([laid_out(gradients[0], mesh, [Shard(0)]), *plain], gradients)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_case_59_dtensors_and_plain_tensors(ranks: int) -> None:
    run_ranks(ranks, mixed, ranks) if ranks > 1 else run_ranks(1, alone)


def alone() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    gradients = [value(0, 7, 3), value(1, 3)]
    check([laid_out(gradients[0], mesh, [Shard(0)]), *dense(gradients[1])], gradients, collectives=0)


def rows_and_columns() -> None:
    """What FSDP makes of a tensor-parallel model: norms on the data axis only, one for each rank of the other axis."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    gradients = [value(0, 6), value(1, 4, 6), value(2, 5), value(3, 3)]
    parameters = [
        laid_out(gradients[0], mesh["dp"], [Shard(0)]),
        laid_out(gradients[1], mesh, [Shard(0), Shard(1)]),
        laid_out(gradients[2], mesh["tp"], [Shard(0)]),
        *dense(gradients[3]),
    ]
    check(parameters, gradients)
    check(parameters, gradients, mesh=mesh)
    check([parameters[0], parameters[2]], [gradients[0], gradients[2]], collectives=2, orders=[2.0, INF])
    check([parameters[0], parameters[2]], [gradients[0], gradients[2]], mesh=mesh, orders=[2.0, INF])


def test_parameters_on_sub_meshes_and_on_the_whole_mesh() -> None:
    run_ranks(4, rows_and_columns)


def rows_that_differ() -> float:
    """Each row of ranks has a tensor of its own besides the common one: it counts in its own row only."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "dp"))
    row = mesh.get_local_rank("row")
    gradients = [value(0, 8), value(1 + row, 6) * (1 + 9 * row)]
    parameters = [laid_out(gradients[0], mesh, [Replicate(), Shard(0)]), laid_out(gradients[1], mesh["dp"], [Shard(0)])]
    check(parameters, gradients)
    return total_grad_norm(parameters).item()


def test_tensors_of_other_sub_meshes_of_the_same_kind_are_not_mixed_in() -> None:
    norms = run_ranks(4, rows_that_differ)
    assert norms[0] == norms[1] != norms[2] == norms[3]


def lists_of_all() -> None:
    """All ranks list the same tensors, on meshes of which they may not be part."""
    left = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",), rank_list=(0, 1))
    right = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",), rank_list=(2, 3))
    rank = torch.distributed.get_rank()
    gradients = [value(0, 4), value(1, 6)]
    parameters = []
    for gradient, mesh in zip(gradients, (left, right), strict=True):
        size = gradient.numel() // 2 if rank in mesh.rank_list else 0
        parameter = nn.Parameter(
            DTensor.from_local(torch.zeros(size, dtype=torch.float64), mesh, [Shard(0)], shape=gradient.shape)
        )
        if size:
            parameter.grad = distribute_tensor(gradient, mesh, [Shard(0)], src_data_rank=None)
        parameters.append(parameter)
    for order in ORDERS:
        expected = nn.utils.clip_grad_norm_(dense(*gradients), 0.1, order)
        with record_collectives() as log:
            got = clip_grad_norm_(parameters, 1e9, order)
        assert log.counts == {"all_reduce": 1}
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=0)


def test_ranks_list_tensors_of_meshes_that_they_are_outside_of() -> None:
    run_ranks(4, lists_of_all)


def some_have_none() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    gradient = value(0, 6)
    parameter = laid_out(gradient, mesh, [Shard(0)])
    if mesh.get_local_rank() == 1:
        parameter.grad = None
    for order in ORDERS:
        with record_collectives() as log:
            got = clip_grad_norm_([parameter], 1e9, order)
        assert log.counts == {"all_reduce": 1}
        torch.testing.assert_close(got, torch.linalg.vector_norm(gradient[:3], order), rtol=1e-10, atol=0)
    parameter.grad = None
    with record_collectives() as log:
        assert clip_grad_norm_(parameter, 1.0).item() == 0.0
    assert log.counts == {"all_reduce": 1}
    assert clip_grad_norm_([], 1.0).item() == 0.0


def test_ranks_without_gradients_take_part_all_the_same() -> None:
    run_ranks(2, some_have_none)


def listed_twice() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    gradient = value(0, 6)
    parameter = laid_out(gradient, mesh, [Shard(0)])
    torch.testing.assert_close(total_grad_norm([parameter, parameter]), torch.linalg.vector_norm(gradient))


def test_a_tied_parameter_counts_once() -> None:
    run_ranks(2, listed_twice)


# -- stages and experts -----------------------------------------------------------------------------------------------


def stages(data: int) -> None:
    """Each stage lists its own parameters, on its own mesh or plain, and not as many as the other."""
    world = init_device_mesh("cpu", (2, data), mesh_dim_names=("pp", "dp"))
    stage = world.get_local_rank("pp")
    own = [value(10 * stage + i, 4, 1 + stage) * (1 + stage) for i in range(1 + stage)]
    other = [value(10 * (1 - stage) + i, 4, 2 - stage) * (2 - stage) for i in range(2 - stage)]
    plain = [value(20 + stage, 3)], [value(21 - stage, 3)]
    parameters = [laid_out(gradient, world["dp"], [Shard(0)]) for gradient in own] + dense(*plain[0])
    check(parameters, [*own, *plain[0]], [*other, *plain[1]], mesh=world, distinct={"pp": None})


@pytest.mark.parametrize("data", [1, 2])
def test_case_57_stages_of_a_pipeline(data: int) -> None:
    run_ranks(2 * data, stages, data)


def experts(as_dtensor: bool) -> None:
    """Four experts on two ranks, besides a router that both hold."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    rank = mesh.get_local_rank()
    squares = torch.tensor([4.0, 16.0, 36.0, 64.0], dtype=torch.float64)  # 20 on one rank, 100 on the other
    gradients = [square.sqrt() * torch.ones(1, dtype=torch.float64) for square in squares]
    router = value(5, 3)
    if as_dtensor:
        stacked = torch.stack(gradients)
        check([laid_out(stacked, mesh, [Shard(0)]), *dense(router)], [stacked, router])
        parameters = [laid_out(stacked, mesh, [Shard(0)])]
        assert total_grad_norm(parameters).item() == pytest.approx(120**0.5, rel=1e-12)
        return
    own, others = gradients[2 * rank : 2 * rank + 2], gradients[2 - 2 * rank : 4 - 2 * rank]
    local = dense(*own)
    how: dict[str, Any] = {"mesh": mesh, "distinct": {"ep": local}}
    assert total_grad_norm(local, **how).item() == pytest.approx(120**0.5, rel=1e-12)
    check([*dense(router), *local], [router, *own], others, **how)


@pytest.mark.parametrize("as_dtensor", [True, False])
def test_case_61_experts_are_summed_over_ranks_and_not_averaged(as_dtensor: bool) -> None:
    run_ranks(2, experts, as_dtensor)


def experts_in_stages() -> None:
    """Plain experts that differ along ep and pp, a sharded matrix of each stage, a plain bias of each stage."""
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    stage, place = world.get_local_rank("pp"), world.get_local_rank("ep")
    expert = {(s, e): value(10 * s + e, 3) for s in range(2) for e in range(2)}
    matrix, bias = [value(30 + s, 4, 2) for s in range(2)], [value(40 + s, 2) for s in range(2)]
    mine = dense(expert[stage, place])
    check(
        [*mine, laid_out(matrix[stage], world["ep"], [Shard(0)]), *dense(bias[stage])],
        [expert[stage, place], matrix[stage], bias[stage]],
        [one for key, one in expert.items() if key != (stage, place)] + [matrix[1 - stage], bias[1 - stage]],
        mesh=world,
        distinct={"pp": None, "ep": mine},
    )


def test_experts_within_stages() -> None:
    run_ranks(4, experts_in_stages)


# -- flat storage, memory, precision ----------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """The ops that run, and on how many tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[int]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        tensors = first if isinstance(first, (list, tuple)) else [first]
        self.seen.append((function.name(), [one.numel() for one in tensors if isinstance(one, torch.Tensor)]))
        return function(*args, **(kwargs or {}))

    def of(self, *names: str) -> list[int]:
        return [numel for name, numels in self.seen for numel in numels if any(part in name for part in names)]


def unit(
    gradients: Sequence[torch.Tensor], mesh: Any, placements: Callable[[FlatShard], list[Placement]], gap: int = 0
) -> tuple[list[Any], torch.Tensor]:
    """Parameters on one chunk for each rank of the last axis, with gradients on another; and that chunk."""
    ranks, rank = mesh.shape[-1], mesh.get_local_rank(mesh.mesh_dim_names[-1])
    starts = [sum(one.numel() + gap for one in gradients[:i]) for i in range(len(gradients))]
    chunk = -(-(starts[-1] + gradients[-1].numel()) // ranks)
    values = torch.zeros(chunk, dtype=gradients[0].dtype)
    reduced = torch.zeros(chunk, dtype=gradients[0].dtype)
    parameters = []
    for gradient, start in zip(gradients, starts, strict=True):
        low, high = (min(max(end * chunk - start, 0), gradient.numel()) for end in (rank, rank + 1))
        first = start + low - rank * chunk if high > low else 0
        place = placements(FlatShard(chunk, start))
        local = values[first : first + high - low]
        parameter = nn.Parameter(DTensor.from_local(local, mesh, place, shape=gradient.shape))
        piece = reduced[first : first + high - low]
        piece.copy_(gradient.view(-1)[low:high])
        parameter.grad = DTensor.from_local(piece, mesh, place, shape=gradient.shape)
        parameters.append(parameter)
    return parameters, reduced


def on_chunks(shape: tuple[int, ...], gap: int) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dpr", "dps")[-len(shape) :])
    gradients = [value(i, *size) for i, size in enumerate([(5, 3), (7,), (), (4, 4), (2, 3, 5)])]
    parameters, reduced = unit(gradients, mesh, lambda flat: [Replicate()] * (len(shape) - 1) + [flat], gap)
    check(parameters, gradients)
    with Calls() as calls:
        clip_grad_norm_(parameters, 0.1)
    pieces = [piece.numel() for piece in map(gradient_of, parameters) if piece.numel()]
    expected = [sum(pieces)] if not gap else pieces
    assert sorted(calls.of("norm")) == sorted(expected)
    assert sorted(calls.of("_foreach_mul_")) == sorted(expected)
    total = 1.0 / total_grad_norm(parameters).item()
    assert total == pytest.approx(10, rel=1e-5)
    assert reduced.count_nonzero() == sum(pieces)


@pytest.mark.parametrize("gap", [0, 2])
@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)])
def test_one_norm_per_chunk_of_neighbouring_gradients(shape: tuple[int, ...], gap: int) -> None:
    run_ranks(4 if shape != (2,) else 2, on_chunks, shape, gap)


def on_chunks_with_tensor_parallelism() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    gradients = [value(0, 6, 4), value(1, 5)]
    flat = FlatShard(10, 1)
    cut = distribute_tensor(gradients[0], mesh, [flat, Shard(1)], src_data_rank=None)
    whole = distribute_tensor(gradients[1], mesh, [FlatShard(8, 2), Replicate()], src_data_rank=None)
    parameters = []
    for gradient in (cut, whole):
        parameters.append(nn.Parameter(torch.zeros_like(gradient)))
        parameters[-1].grad = gradient
    check(parameters, gradients)


def test_flat_shares_of_tensor_parallel_pieces() -> None:
    run_ranks(4, on_chunks_with_tensor_parallelism)


def others_gradients() -> None:
    """A parameter that isn't listed lies between two that are: it isn't scaled, and doesn't count."""
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    gradients = [value(0, 5), value(1, 4), value(2, 3)]
    parameters, reduced = unit(gradients, mesh, lambda flat: [flat])
    check(parameters[::2], gradients[::2], collectives=0)
    torch.testing.assert_close(reduced[5:9], gradients[1])


def test_gradients_between_are_left_alone() -> None:
    run_ranks(1, others_gradients)


def peak(dtype: torch.dtype) -> tuple[int, int, float]:
    """Bytes allocated at most at a time while clipping, bytes of gradients, and by what they were scaled."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    gradients = [value(i, 1 << 21).to(dtype) for i in range(8)]
    parameters, reduced = unit(gradients, mesh, lambda flat: [flat])
    before = reduced.clone()
    clip_grad_norm_(parameters, INF)
    with profile(profile_memory=True) as recorded:
        norm = clip_grad_norm_(parameters, 0.1)
    live = most = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    expected = nn.utils.clip_grad_norm_(dense(*[one.double() for one in gradients]), 0.1)
    torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(reduced.double(), before.double() * (0.1 / expected), rtol=1e-2, atol=1e-9)
    return most, reduced.nbytes, reduced.abs().max().item() / before.abs().max().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_62_gradients_are_scaled_in_place_and_nothing_is_copied(dtype: torch.dtype) -> None:
    for most, gradients, factor in run_ranks(2, peak, dtype):
        assert most <= (200_000 if dtype is torch.float32 else 1_100_000) < gradients // 10
        assert factor < 1e-3


def precision() -> float:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    gradient = torch.full((1 << 24,), 0.1)
    parameters, _ = unit([gradient], mesh, lambda flat: [flat])
    return total_grad_norm(parameters).item() / (0.1 * 4096) - 1


def test_many_small_numbers_are_not_lost_in_a_large_sum() -> None:
    """What torch itself gives on the CPU is wrong by 0.1% here."""
    assert abs(run_ranks(1, precision)[0]) < 1e-6


def on_units(bed: Any, kind: str) -> None:
    pair = bed(kind)
    for order in (2.0, INF):
        pair.backward()
        expected = nn.utils.clip_grad_norm_(pair.dense.parameters(), 0.01, order)
        with record_collectives() as log, Calls() as calls:
            got = clip_grad_norm_(pair.model.parameters(), 0.01, order)
        assert log.counts == {"all_reduce": 1}, log.summary()
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=0)
        pair.check_gradients()
        if kind != "tp":  # there, shares of different pieces lie in one chunk
            assert 0 < len(calls.of("_foreach_mul_")) <= 4, "more than one for each unit"
        for optimizer in pair.optimizers:
            optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "tp"])
def test_gradients_of_sharded_units(bed: Any, kind: str) -> None:
    run_ranks(4, on_units, bed, kind)


# -- torch's own --------------------------------------------------------------------------------------------------------


def native_partial() -> None:
    from torch.distributed.device_mesh import init_device_mesh as native_mesh
    from torch.distributed.tensor import DTensor as NativeDTensor
    from torch.distributed.tensor import Partial as NativePartial
    from torch.distributed.tensor import Replicate as NativeReplicate
    from torch.distributed.tensor import Shard as NativeShard
    from torch.distributed.tensor import distribute_tensor as distribute_native

    mesh = native_mesh("cpu", (2,), mesh_dim_names=("dp",))
    gradients = [value(0, 4), value(1, 6)]
    pending = nn.Parameter(distribute_native(torch.zeros(4, dtype=torch.float64), mesh, [NativeReplicate()]))
    pending.grad = NativeDTensor.from_local(gradients[0] / 2, mesh, [NativePartial()])
    cut = nn.Parameter(distribute_native(torch.zeros(6, dtype=torch.float64), mesh, [NativeShard(0)]))
    cut.grad = distribute_native(gradients[1], mesh, [NativeShard(0)])
    reference = dense(*gradients)
    expected = nn.utils.clip_grad_norm_(reference, 0.1)
    with record_collectives() as log:
        torch.testing.assert_close(clip_grad_norm_([pending, cut], 0.1), expected, rtol=1e-10, atol=0)
    assert log.counts == {"all_reduce": 2}  # of the pending gradient, and of the norm
    for parameter, one in zip((pending, cut), reference, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), one.grad, rtol=1e-10, atol=1e-12)  # type: ignore[union-attr]


def test_torchs_own_dtensors_with_a_pending_gradient() -> None:
    run_ranks(2, native_partial)


def pending_parameter() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    parameter = nn.Parameter(DTensor.from_local(value(0, 4), mesh, [Partial()]))
    parameter.square().sum().backward()
    full = nn.Parameter(2 * value(0, 4))
    full.square().sum().backward()
    expected = nn.utils.clip_grad_norm_([full], 0.1)
    torch.testing.assert_close(clip_grad_norm_([parameter], 0.1), expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(parameter.grad.full_tensor(), full.grad, rtol=1e-10, atol=1e-12)


def test_a_parameter_that_is_a_pending_sum() -> None:
    run_ranks(2, pending_parameter)


def torchs_clipping(foreach: bool | None) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    gradients = [value(0, 5, 3), value(1, 7)]
    parameters, _ = unit(gradients, mesh, lambda flat: [flat])
    reference = dense(*gradients)
    expected = nn.utils.clip_grad_norm_(reference, 0.1)
    got = nn.utils.clip_grad_norm_(parameters, 0.1, foreach=foreach)
    assert float(got) == pytest.approx(float(expected), rel=1e-10)
    for parameter, one in zip(parameters, reference, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), one.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("foreach", [True, False, None])
def test_torchs_clipping_works_on_flat_shares(foreach: bool | None) -> None:
    run_ranks(2, torchs_clipping, foreach)


# -- numbers that aren't finite, and mistakes ---------------------------------------------------------------------------


def not_finite(bad: float, order: float) -> list[float]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    gradient = value(0, 6)
    gradient[1] = bad
    parameters = [laid_out(value(1, 4), mesh, [Shard(0)]), laid_out(gradient, mesh, [Shard(0)])]
    before = [gradient_of(parameter).clone() for parameter in parameters]
    where = r"parameters \[1\] of the list" if mesh.get_local_rank() == 0 else "none; other ranks have such"
    with pytest.raises(NonFiniteNormError, match=where):
        clip_grad_norm_(parameters, 1.0, order, error_if_nonfinite=True)
    for parameter, kept in zip(parameters, before, strict=True):
        torch.testing.assert_close(gradient_of(parameter), kept, equal_nan=True)
    reference = dense(value(1, 4), gradient)
    expected = nn.utils.clip_grad_norm_(reference, 1.0, order)
    got = clip_grad_norm_(parameters, 1.0, order)
    torch.testing.assert_close(got, expected, equal_nan=True)
    for parameter, one in zip(parameters, reference, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), one.grad, equal_nan=True)
    return [got.item()]


@pytest.mark.parametrize("order", [2.0, INF])
@pytest.mark.parametrize("bad", [INF, -INF, float("nan")])
def test_gradients_that_are_not_finite(bad: float, order: float) -> None:
    run_ranks(2, not_finite, bad, order)


def senseless(**arguments: Any) -> None:
    with record_collectives() as log:
        try:
            clip_grad_norm_(dense(value(0, 3)), **{"max_norm": 1.0, **arguments})
        finally:
            assert not log


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"norm_type": 0}, "must be > 0, or infinity"),
        ({"norm_type": -2.0}, "must be > 0, or infinity"),
        ({"norm_type": float("nan")}, "must be > 0, or infinity"),
        ({"max_norm": -1.0}, "must be >= 0"),
        ({"max_norm": float("nan")}, "must be >= 0"),
        ({"distinct": {"pp": None}}, "pass mesh="),
    ],
)
def test_senseless_arguments_are_refused(arguments: dict[str, Any], match: str) -> None:
    assert_same_error(2, senseless, ClippingError, match, **arguments)


def unknown_axis() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    clip_grad_norm_(dense(value(0, 3)), 1.0, mesh=mesh, distinct={"pp": None})


def test_an_axis_that_the_mesh_lacks_is_refused() -> None:
    assert_same_error(2, unknown_axis, MeshError, "no mesh axis 'pp'")


def outside() -> None:
    """Every rank lists parameters on two pairs of ranks of which it is in one only, and no mesh has them all."""
    rank = torch.distributed.get_rank()
    if rank == 3:
        raise LayoutError("it isn't among")  # has nothing to clip
    pairs = [(0, 1), (1, 2), (0, 2)]
    meshes = [init_device_mesh("cpu", (2,), mesh_dim_names=("dp",), rank_list=pair) for pair in pairs]
    clip_grad_norm_([on(mesh, rank) for mesh in meshes], 1.0)


def on(mesh: Any, rank: int) -> Any:
    size = 2 if rank in mesh.rank_list else 0
    return nn.Parameter(DTensor.from_local(torch.zeros(size), mesh, [Shard(0)], shape=(4,)))


def test_ranks_that_can_not_know_all_sums_are_refused() -> None:
    assert_same_error(4, outside, LayoutError, "it isn't among")


def off_the_axes() -> None:
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    rank = torch.distributed.get_rank()
    diagonal = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",), rank_list=(0, 3) if rank in (0, 3) else (1, 2))
    clip_grad_norm_([on(diagonal, rank)], 1.0, mesh=world, distinct={"pp": None})


def test_a_mesh_that_is_no_part_of_the_given_one_is_refused() -> None:
    assert_same_error(4, off_the_axes, LayoutError, "doesn't lie on whole axes")
