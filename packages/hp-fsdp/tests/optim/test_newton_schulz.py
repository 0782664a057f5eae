"""Newton-Schulz against the singular value decomposition, and the owners of matrices: numbers, no ranks."""

from __future__ import annotations

import pytest
import torch

from hp_core import FlatShard, Replicate, Shard
from hp_core.layout import from_placements
from hp_core.mesh import DeviceMesh
from hp_fsdp.optim.matrices import Matrix, Piece, matrices_of, newton_schulz_cost
from hp_fsdp.optim.owners import owners_of, route_of, slabs_of
from hp_fsdp.platform.torch.optim import newton_schulz
from hp_fsdp.platform.torch.optim.newton_schulz import COEFFICIENTS, orthogonalize


def by_singular_values(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    first, third, fifth = COEFFICIENTS
    for _ in range(steps):
        values = first * values + third * values**3 + fifth * values**5
    return left @ torch.diag(values) @ right


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (5, 5), (1, 3), (3, 1)])
def test_it_acts_on_singular_values_alone(shape: tuple[int, int]) -> None:
    stack = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kept = stack.clone()
    found = orthogonalize(stack)
    for matrix, result in zip(stack, found, strict=True):
        torch.testing.assert_close(result, by_singular_values(matrix, 5), rtol=1e-10, atol=1e-10)
    assert torch.equal(stack, kept)
    assert (torch.linalg.svdvals(found) > 0.3).all()
    assert (torch.linalg.svdvals(found) < 1.3).all()


def test_zeros_stay_zeros_and_large_stacks_are_worked_on_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.equal(orthogonalize(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))
    stack = torch.randn(5, 3, 4, dtype=torch.float64)
    whole = orthogonalize(stack)
    monkeypatch.setattr(newton_schulz, "_AT_ONCE", 24)
    torch.testing.assert_close(orthogonalize(stack), whole)


MESH = DeviceMesh((2, 2, 2), ("dpr", "dps", "tp"))


@pytest.mark.parametrize("shape", [(5, 6), (3, 4, 5), (2, 1, 7)])
@pytest.mark.parametrize("outer", [Replicate(), Shard(0), Shard(1)])
@pytest.mark.parametrize("flat", [None, (17, 0), (30, 23), (80, 3)])
def test_pieces_are_disjoint_and_all_of_each_matrix(
    shape: tuple[int, ...], outer: Replicate | Shard, flat: tuple[int, int] | None
) -> None:
    layout = from_placements(MESH, [Replicate(), Replicate() if flat is None else FlatShard(*flat), outer], len(shape))
    numel = torch.Size(shape).numel()
    if flat is not None and numel > 2 * flat[0] - flat[1]:
        layout = from_placements(MESH, [Replicate(), FlatShard(numel), outer], len(shape))
    numbers = torch.arange(numel).view(shape)
    held = {
        rank: torch.cat([numbers[tuple(slice(*i) for i in box)].reshape(-1) for box in layout.boxes(shape, rank)])
        for rank in MESH.rank_list
        if layout.boxes(shape, rank)
    }
    matrices = matrices_of(0, shape, layout)
    stack = numbers.view(-1, *shape[-2:])
    assert [matrix.index for matrix in matrices] == list(range(len(stack)))
    for matrix in matrices:
        found = torch.full(shape[-2:], -1)
        for piece in matrix.pieces:
            for rank in piece.ranks:
                elements = held[rank][piece.start : piece.stop]
                here = [stack[matrix.index][tuple(slice(*i) for i in box)].reshape(-1) for box in piece.boxes]
                assert torch.equal(torch.cat(here), elements)
            for box in piece.boxes:
                view = found[tuple(slice(*i) for i in box)]
                assert (view == -1).all()
                view.copy_(stack[matrix.index][tuple(slice(*i) for i in box)])
        assert torch.equal(found, stack[matrix.index])


def cut(parameter: int, rows: int, columns: int, ranks: list[tuple[int, ...]]) -> Matrix:
    share = rows * columns // len(ranks)
    return Matrix(parameter, 0, rows, columns, tuple(Piece(who, 0, share, ()) for who in ranks))


def test_owners_share_the_cost_and_replicas_share_it_too() -> None:
    everyone = [cut(number, 64, 64, [(0,), (1,), (2,), (3,)]) for number in range(8)]
    assert sorted(rank for rank, _ in owners_of(everyone)) == [0, 0, 1, 1, 2, 2, 3, 3]
    replicas = [cut(number, 64, 64, [(0, 2), (1, 3)]) for number in range(4)]
    assert sorted(rank for rank, _ in owners_of(replicas)) == [0, 1, 2, 3]
    whole = Matrix(9, 0, 64, 64, (Piece((1,), 0, 4096, ()),))
    owners = owners_of([whole, *(cut(number, 64, 64, [(0,), (1,)]) for number in range(3))])
    assert owners[0] == (-1, -1)
    assert sorted(rank for rank, _ in owners[1:]) == [0, 0, 1]
    mixed = [cut(0, 128, 512, [(0,), (1,)]), *(cut(number, 64, 64, [(0,), (1,)]) for number in range(1, 5))]
    assert [rank for rank, _ in owners_of(mixed)] == [0, 1, 1, 1, 1]
    assert newton_schulz_cost(128, 512) > 4 * newton_schulz_cost(64, 64)


def test_what_one_sends_is_what_the_other_awaits() -> None:
    layouts = [
        from_placements(MESH, [Replicate(), FlatShard(40, 10), Shard(1)], 2),
        from_placements(MESH, [Replicate(), FlatShard(20, 5), Replicate()], 3),
        from_placements(MESH, [Shard(1), Shard(0), Replicate()], 2),
    ]
    shapes = [(9, 10), (3, 2, 5), (4, 6)]
    matrices = [
        matrix
        for number, (shape, layout) in enumerate(zip(shapes, layouts, strict=True))
        for matrix in matrices_of(number, shape, layout)
    ]
    ranks = MESH.rank_list
    owners = owners_of(matrices)
    routes = [route_of(matrices, owners, ranks, rank) for rank in ranks]
    for sender, route in enumerate(routes):
        for receiver, other in enumerate(routes):
            assert route is not None
            assert other is not None
            sent = [part.numel for part in route.sends[receiver]]
            assert sent == [piece.stop - piece.start for _, piece in other.arrivals[sender]]
            back = [piece.stop - piece.start for _, piece in route.returns[receiver]]
            assert back == [part.numel for part in other.receives[sender]]
    computed = [(one.parameter, one.rows) for route in routes if route for one in route.owned]
    assert len(computed) == sum(matrix.is_cut for matrix in matrices)
    assert sum(slab.count for slab in slabs_of(matrices, 0)) == sum(
        not matrix.is_cut and 0 in matrix.pieces[0].ranks for matrix in matrices
    )
