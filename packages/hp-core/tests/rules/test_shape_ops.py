"""Ops that rearrange, cut, join and pick, in every layout, against dense.

See `conftest.py` for how a case is read and what is compared.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hp_core import Replicate, Shard, distribute_tensor, init_device_mesh
from hp_core.testing import run_ranks

RANKS = pytest.mark.parametrize("ranks", [2, 4])


@RANKS
def test_reshapes(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("view -1", lambda x: x.view(-1), "5x3;4x6;1x3;2x4x3"),
            ("view", lambda x: x.view(2, 2, 6), "4x6;24"),
            ("view tuple", lambda x: x.view((6, 4)), "4x6;2x12"),
            ("view 3x5", lambda x: x.view(3, 5), "5x3;15;1x15"),
            ("reshape", lambda x: x.reshape(-1, 3), "5x3;2x4x3;15"),
            ("reshape keyword", lambda x: torch.reshape(x, shape=(6, -1)), "4x6"),
            ("view heads", lambda x: x.view(2, 5, 2, 3), "2x5x6;10x6"),
            ("merge heads", lambda x: x.reshape(2, 5, 6), "2x5x2x3"),
            ("reshape of transposed", lambda x: x.transpose(0, 1).reshape(-1), "5x3;4x6"),
            ("heads and back", lambda x: x.view(2, 5, 2, 3).transpose(1, 2).transpose(1, 2).reshape(2, 5, 6), "2x5x6"),
            ("view_as", lambda x, y: x.view_as(y), "4x6 2x12;5x3 15"),
            ("reshape_as", lambda x, y: x.reshape_as(y), "4x6 2x12"),
            ("flatten", lambda x: (x.flatten(), x.flatten(1), x.flatten(0, 1), x.flatten(-2, -1)), "2x4x3;3x2x2"),
            ("flatten keyword", lambda x: torch.flatten(x, start_dim=1), "2x4x3"),
            ("flatten scalar", lambda x: x.flatten(), "-"),
            ("unflatten", lambda x: x.unflatten(0, (2, -1)), "4x3;6"),
            ("unflatten last", lambda x: torch.unflatten(x, -1, (3, 2)), "5x6"),
            ("unflatten torch", lambda x: x.flatten(0, 1).unflatten(0, (4, 3)), "4x3x2;4x3x1"),
            ("squeeze", lambda x: x.squeeze(), "1x3;5x1;1x5x1"),
            ("squeeze dim", lambda x: (x.squeeze(1), x.squeeze(-1), x.squeeze(0)), "5x1x3;1x4x1"),
            ("squeeze dims", lambda x: x.squeeze((0, 2)), "1x5x1"),
            ("ravel", lambda x: (x.ravel(), torch.ravel(x)), "2x4x3;5x3"),
            ("atleast", lambda x: (torch.atleast_1d(x), torch.atleast_2d(x), torch.atleast_3d(x)), "-;5;5x3;2x4x3"),
            ("atleast of two", lambda x, y: (*torch.atleast_2d(x, y), *torch.atleast_1d([x, y])), "- 5"),
            ("view dtype", lambda x: (x.detach().view(torch.int64), x.detach().view(torch.int32)), "f:5x3"),
            ("view dtype keyword", lambda x: x.view(dtype=torch.float64), "i9:5x3"),
            ("unsqueeze", lambda x: (x.unsqueeze(0), x.unsqueeze(1), x.unsqueeze(-1), x.unsqueeze(-2)), "5x3;4"),
            ("unsqueeze scalar", lambda x: x.unsqueeze(0), "-"),
            ("empty", lambda x: x.view(3, 0), "0x4"),
        ],
    )


@RANKS
def test_transpositions(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("transpose", lambda x: x.transpose(0, -1), "5x3;2x4x3"),
            ("transpose keyword", lambda x: torch.transpose(x, dim0=0, dim1=1), "5x3"),
            ("t", lambda x: x.t(), "5x3"),
            ("T", lambda x: x.T, "5x3"),
            ("mT", lambda x: x.mT, "2x5x3"),
            ("permute", lambda x: x.permute(2, 0, 1), "2x4x3"),
            ("permute tuple", lambda x: torch.permute(x, (2, 0, -2)), "2x4x3"),
            ("permute keyword", lambda x: x.permute(dims=(1, 0)), "5x3"),
            ("movedim", lambda x: (x.movedim(0, 2), x.movedim(-1, 0), x.movedim((0, 1), (1, 2))), "2x4x3"),
            ("moveaxis", lambda x: torch.moveaxis(x, 0, 1), "2x4x3"),
            ("swapaxes", lambda x: (x.swapaxes(0, 1), x.swapdims(-1, 0)), "2x4x3"),
            ("rot90", lambda x: (x.rot90(), torch.rot90(x, 2), x.rot90(-1, (1, 0)), torch.rot90(x, 4)), "5x3"),
            ("detach", lambda x: x.detach(), "5x3"),
        ],
    )


@RANKS
def test_expansion(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("expand", lambda x: x.expand(5, 3), "5x3;1x3;5x1;3;1;-"),
            ("expand -1", lambda x: x.expand(2, -1, 3), "5x3;5x1"),
            ("expand tuple", lambda x: x.expand((4, 5, 3)), "1x5x3"),
            ("expand_as", lambda x, y: x.expand_as(y), "1x3 5x3;3 5x3"),
            ("broadcast_to", lambda x: torch.broadcast_to(x, (2, 5, 3)), "5x1"),
            ("broadcast_tensors", lambda x, y: torch.broadcast_tensors(x, y), "5x1 3;- 4"),
            ("meshgrid", lambda x, y: torch.meshgrid(x, y, indexing="ij"), "5 3;4 -"),
            ("meshgrid xy", lambda x, y: torch.meshgrid([x, y], indexing="xy"), "5 3"),
            ("cartesian_prod", lambda x, y: torch.cartesian_prod(x, y), "5 3"),
            ("repeat", lambda x: (x.repeat(2, 1), x.repeat(1, 3), x.repeat(2, 2, 2), x.repeat((1, 1))), "5x3;4x2"),
            ("repeat none", lambda x: x.repeat(0, 1), "5x3"),
            ("tile", lambda x: (x.tile(2), torch.tile(x, (2, 1)), torch.tile(x, dims=(2, 1, 3))), "5x3"),
            (
                "repeat_interleave",
                lambda x: (x.repeat_interleave(2, 0), torch.repeat_interleave(x, 3, dim=-1)),
                "5x3;4x4",
            ),
            ("interleave all", lambda x: x.repeat_interleave(2), "5x3"),
            ("interleave counts", lambda x, n: torch.repeat_interleave(x, n, 0), "5x3 i3:5"),
            ("unfold", lambda x: (x.unfold(0, 2, 1), x.unfold(-1, 2, 1)), "5x3"),
            ("repeat kv", lambda x: x[:, :, None].expand(2, 2, 3, 4).reshape(2, 6, 4), "2x2x4"),
        ],
    )


@RANKS
def test_cutting(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("split", lambda x: (*x.split(2), *x.split(2, dim=1), *torch.split(x, 3, -1)), "5x3;4x6"),
            ("split sizes", lambda x: x.split([1, 2, 2]), "5x3"),
            ("split_with_sizes", lambda x: x.split_with_sizes([1, 4], dim=0), "5x3"),
            ("chunk", lambda x: (*x.chunk(2), *x.chunk(4, dim=-1), *torch.chunk(x, chunks=3, dim=0)), "5x3;4x6"),
            ("tensor_split", lambda x: (*torch.tensor_split(x, 3), *torch.tensor_split(x, (1, 2), dim=1)), "5x3"),
            ("tensor_split ends", lambda x: (*x.tensor_split((1, -1)), *x.tensor_split([3, 2])), "5x3"),
            ("hsplit", lambda x: (*torch.hsplit(x, 2), *torch.vsplit(x, [1, 3])), "5x4;4x6"),
            ("dsplit", lambda x: (*x.dsplit(2), *x.hsplit([1])), "2x3x4"),
            ("unbind", lambda x: (*x.unbind(), *x.unbind(1), *torch.unbind(x, dim=-1)), "5x3"),
            ("iterate", lambda x: tuple(x), "5x3"),
            ("qkv", lambda x: torch.stack([part.sum(-1) for part in x.chunk(3, dim=-1)]), "2x5x6"),
        ],
    )


@RANKS
def test_joining(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("cat", lambda x, y: torch.cat([x, y]), "5x3 2x3;4x6 4x6"),
            ("cat dim", lambda x, y: torch.cat((x, y), dim=-1), "5x3 5x2"),
            ("cat three", lambda x, y, z: torch.cat([x, y, z], 1), "5x3 5x2 5x1"),
            ("cat twice", lambda x: torch.cat([x, x]), "5x3"),
            ("cat empty", lambda x, y: torch.cat([x, y]), "5x3 0"),
            ("stack", lambda x, y: torch.stack([x, y]), "5x3 5x3"),
            ("stack dim", lambda x, y: (torch.stack([x, y], dim=1), torch.stack((x, y), -1)), "5x3 5x3"),
            ("hstack", lambda x, y: torch.hstack([x, y]), "5x3 5x2;5 3;- 3"),
            ("vstack", lambda x, y: (torch.vstack((x, y)), torch.row_stack((x, y))), "5x3 2x3;3 3;3 2x3"),
            ("dstack", lambda x, y: torch.dstack([x, y]), "5x3 5x3;5 5"),
            ("column_stack", lambda x, y: torch.column_stack([x, y]), "5 5;5x3 5"),
            ("block_diag", lambda x, y: torch.block_diag(x, y), "2x3 3x1;3 -"),
            ("rotate half", lambda x: torch.cat((-x[..., 2:], x[..., :2]), dim=-1), "2x5x4"),
        ],
    )


@RANKS
def test_orders_and_diagonals(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("flip", lambda x: (x.flip(0), x.flip(0, 1), torch.flip(x, (1,)), x.flip([-1])), "5x3"),
            ("roll", lambda x: (x.roll(1, 0), x.roll((1, 2), (0, 1)), torch.roll(x, 2, -1)), "5x3"),
            ("roll all", lambda x: torch.roll(x, 2), "5x3"),
            ("roll both ways", lambda x: (x.roll((1, 3), (0, 0)), x.roll(-7, 1)), "5x3"),
            ("fliplr", lambda x: (x.fliplr(), torch.flipud(x)), "5x3"),
            ("tril", lambda x: (x.tril(), x.triu(1), torch.tril(x, diagonal=-1)), "5x3;2x4x3"),
            ("tril in place", lambda x: (x.clone().tril_(), x.clone().triu_(-1)), "5x3"),
            ("diagonal", lambda x: (x.diagonal(), x.diagonal(1), x.diagonal(-2), x.diagonal(7)), "5x3;4x6"),
            ("diagonal dims", lambda x: (x.diagonal(0, 1, 2), torch.diagonal(x, -1, dim1=2, dim2=0)), "2x4x3"),
            ("diag", lambda x: (x.diag(), torch.diag(x, -1)), "5;5x3"),
            ("diag_embed", lambda x: (x.diag_embed(), torch.diag_embed(x, 1), x.diag_embed(0, 0, 2)), "5x3"),
            ("diagflat", lambda x: torch.diagflat(x), "5"),
        ],
    )


def growing_cache() -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    value = torch.arange(24.0).view(4, 6)
    faults = []
    for placement in (Shard(0), Shard(1), Replicate()):
        x = distribute_tensor(value, mesh, [placement], src_data_rank=None)
        for dim in (0, 1):
            grown = torch.cat([torch.cat([torch.tensor([]), x], dim=dim), x], dim=dim)
            if grown.layout is not x.layout or not torch.equal(grown.full_tensor(), torch.cat([value, value], dim=dim)):
                faults.append(f"{placement} {dim}: {grown.layout}")
    return faults


def test_a_cache_that_starts_as_an_empty_plain_tensor_grows() -> None:
    assert run_ranks(2, growing_cache) == [[], []]
