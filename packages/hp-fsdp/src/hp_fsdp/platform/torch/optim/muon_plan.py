"""What a rank does in a step of Muon: the matrices that it holds as a whole, and an exchange for each group of ranks.

Made once from shapes and layouts, alike on all ranks of a group; gradients play no part in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from hp_core.dtensor.api import DTensorMethods
from hp_core.process_group import get_rank
from hp_fsdp.optim.matrices import Matrix, matrices_of
from hp_fsdp.optim.owners import Slab, owners_of, route_of, slabs_of
from hp_fsdp.platform.torch.optim.exchange import Exchange
from hp_fsdp.platform.torch.optim.runs import local_of

__all__ = ["MuonPlan", "plan_muon"]


@dataclass(frozen=True, eq=False)
class MuonPlan:
    """What a rank does.

    Attributes:
        slabs: matrices that are whole here.
        exchanges: one for each group of ranks and element type, in an order that is the same on all ranks.
    """

    slabs: tuple[Slab, ...]
    exchanges: tuple[Exchange, ...]


def plan_muon(params: Sequence[Any], dtypes: Sequence[torch.dtype]) -> MuonPlan:
    """Plan for these parameters.

    Args:
        params: the parameters to be optimized, numbered in this order; alike on all ranks of their meshes.
        dtypes: for each the element type in which its matrices travel and are computed.

    Raises:
        LayoutError: reductions of a parameter are pending.
    """
    slabs: list[Slab] = []
    groups: dict[tuple[tuple[int, ...], str], list[Matrix]] = defaultdict(list)
    for number, (param, dtype) in enumerate(zip(params, dtypes, strict=True)):
        if not isinstance(param, DTensorMethods):
            if param.numel():
                slabs.append(Slab(number, 0, prod(param.shape[:-2]), *param.shape[-2:]))
            continue
        mesh = param.layout.mesh
        if mesh.get_coordinate() is not None:
            key = tuple(sorted(mesh.rank_list)), str(dtype)
            groups[key].extend(matrices_of(number, tuple(param.shape), param.layout))
    exchanges = []
    own = get_rank()
    for (ranks, _), matrices in sorted(groups.items(), key=lambda item: item[0]):
        slabs.extend(slabs_of(matrices, own))
        route = route_of(matrices, owners_of(matrices), ranks, own)
        if route is not None:
            first = next(matrix.parameter for matrix in matrices if matrix.is_cut)
            exchanges.append(Exchange(route, dtypes[first], local_of(params[first]).device))
    return MuonPlan(tuple(slabs), tuple(exchanges))
