"""Who computes which matrix, and what travels for it: two all-to-alls for all cut matrices of a group of ranks.

Everything follows from shapes and layouts, so all ranks of a group decide alike without talking.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from hp_fsdp.optim.matrices import Matrix, Piece, newton_schulz_cost

__all__ = ["Owned", "Part", "Route", "Slab", "owners_of", "route_of", "slabs_of"]


@dataclass(frozen=True, slots=True)
class Slab:
    """Matrices of a stack that a rank holds as a whole, one after another.

    Attributes:
        parameter: number of the parameter.
        start: where they start in the flattened local tensor, in elements.
        count: number of matrices.
        rows: rows of each.
        columns: columns of each.
    """

    parameter: int
    start: int
    count: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's own piece of a cut matrix.

    Attributes:
        parameter: number of the parameter.
        start: where it starts in the flattened local tensor, in elements.
        stop: where it ends.
        rows: rows of the whole matrix.
        columns: columns of the whole matrix.
    """

    parameter: int
    start: int
    stop: int
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Owned:
    """A cut matrix that this rank computes.

    Attributes:
        parameter: number of the parameter.
        rows: number of rows.
        columns: number of columns.
    """

    parameter: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Route:
    """What one rank of a group sends and gets, member by member, for all cut matrices of the group.

    Attributes:
        ranks: the group, ascending.
        owned: the matrices that this rank computes.
        sends: for each member, this rank's pieces of matrices that the member owns.
        arrivals: for each member, of which owned matrix (by its place in `owned`) and which boxes of it arrive from there.
        returns: for each member, of which owned matrix and which boxes of it go there when it is computed.
        receives: for each member, the pieces of this rank that come back from there.
    """

    ranks: tuple[int, ...]
    owned: tuple[Owned, ...]
    sends: tuple[tuple[Part, ...], ...]
    arrivals: tuple[tuple[tuple[int, Piece], ...], ...]
    returns: tuple[tuple[tuple[int, Piece], ...], ...]
    receives: tuple[tuple[Part, ...], ...]


def owners_of(matrices: Sequence[Matrix]) -> list[tuple[int, int]]:
    """The owner of each matrix of a group as (rank, replica); of one that isn't cut (-1, -1): every holder computes it.

    The costliest first, each goes to the one of its holders that has least to do, whole matrices included; among equals to
    the one that holds most of it, then to the lowest rank. Holders of all replicas are asked, so that replicas share the work.
    """
    load: dict[int, int] = defaultdict(int)
    for matrix in matrices:
        if not matrix.is_cut:
            for rank in matrix.pieces[0].ranks:
                load[rank] += newton_schulz_cost(matrix.rows, matrix.columns)
    owners = [(-1, -1)] * len(matrices)
    costs = [newton_schulz_cost(matrix.rows, matrix.columns) for matrix in matrices]
    for place in sorted(range(len(matrices)), key=lambda place: (-costs[place], place)):
        matrix = matrices[place]
        if not matrix.is_cut:
            continue
        _, _, rank, replica = min(
            (load[rank], piece.start - piece.stop, rank, replica)
            for piece in matrix.pieces
            for replica, rank in enumerate(piece.ranks)
        )
        owners[place] = (rank, replica)
        load[rank] += costs[place]
    return owners


def route_of(
    matrices: Sequence[Matrix], owners: Sequence[tuple[int, int]], ranks: tuple[int, ...], own: int
) -> Route | None:
    """What rank `own` has to do for the cut matrices of a group; None if none is cut.

    An owner gets the pieces from its own replica, and gives the results to all replicas: so each matrix is computed once,
    and replicas can't drift apart.
    """
    position = {rank: place for place, rank in enumerate(ranks)}
    owned: list[Owned] = []
    sends: list[list[Part]] = [[] for _ in ranks]
    receives: list[list[Part]] = [[] for _ in ranks]
    arrivals: list[list[tuple[int, Piece]]] = [[] for _ in ranks]
    returns: list[list[tuple[int, Piece]]] = [[] for _ in ranks]
    for matrix, (owner, replica) in zip(matrices, owners, strict=True):
        if not matrix.is_cut:
            continue
        for piece in matrix.pieces:
            if own in piece.ranks:
                part = Part(matrix.parameter, piece.start, piece.stop, matrix.rows, matrix.columns)
                receives[position[owner]].append(part)
                if own == piece.ranks[replica]:
                    sends[position[owner]].append(part)
            if own == owner:
                arrivals[position[piece.ranks[replica]]].append((len(owned), piece))
                for rank in piece.ranks:
                    returns[position[rank]].append((len(owned), piece))
        if own == owner:
            owned.append(Owned(matrix.parameter, matrix.rows, matrix.columns))
    if all(owner < 0 for owner, _ in owners):
        return None
    return Route(
        ranks,
        tuple(owned),
        tuple(map(tuple, sends)),
        tuple(map(tuple, arrivals)),
        tuple(map(tuple, returns)),
        tuple(map(tuple, receives)),
    )


def slabs_of(matrices: Sequence[Matrix], own: int) -> list[Slab]:
    """The matrices that rank `own` holds as a whole, neighbours of one stack together."""
    slabs: list[Slab] = []
    for matrix in matrices:
        if matrix.is_cut or own not in matrix.pieces[0].ranks:
            continue
        start, size = matrix.pieces[0].start, matrix.rows * matrix.columns
        last = slabs[-1] if slabs else None
        if last is not None and last.parameter == matrix.parameter and last.start + last.count * size == start:
            slabs[-1] = Slab(last.parameter, last.start, last.count + 1, last.rows, last.columns)
        else:
            slabs.append(Slab(matrix.parameter, start, 1, matrix.rows, matrix.columns))
    return slabs
