"""Ops that rearrange, cut, join and pick, in every layout, against dense.

See `conftest.py` for how a case is read and what is compared.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

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
            ("swapaxes", lambda x: x.swapaxes(0, 1), "2x4x3"),
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
            ("rotate half", lambda x: torch.cat((-x[..., 2:], x[..., :2]), dim=-1), "2x5x4"),
        ],
    )


@RANKS
def test_picking(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("int", lambda x: (x[1], x[-1], x[1, 2], x[:, 1]), "5x3;4x6"),
            ("slice", lambda x: (x[1:3], x[:, :2], x[::2], x[:], x[:-1, 1:]), "5x3"),
            ("none and ellipsis", lambda x: (x[None], x[..., 0], x[:, None], x[..., None, :], x[...]), "5x3;2x4x3"),
            ("empty slice", lambda x: x[2:2], "5x3"),
            ("select", lambda x: (x.select(0, 1), x.select(-1, 0), torch.select(x, dim=1, index=-1)), "5x3"),
            ("narrow", lambda x: (x.narrow(0, 1, 2), torch.narrow(x, -1, 0, 2)), "5x3"),
            ("index_select", lambda x, i: torch.index_select(x, 0, i), "5x3 i5:4"),
            ("index_select last", lambda x, i: x.index_select(-1, i), "5x3 i3:5"),
            ("gather", lambda x, i: torch.gather(x, 1, i), "5x3 i3:5x2;5x3 i3:4x3;4x6 i6:4x6"),
            ("gather rows", lambda x, i: x.gather(0, i), "5x3 i5:2x3;5x3 i5:2x2"),
            ("take_along", lambda x, i: x.gather(dim=-1, index=i.unsqueeze(-1)).squeeze(-1), "5x3 i3:5"),
        ],
    )


@RANKS
def test_along_a_whole_dim(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("flip", lambda x: (x.flip(0), x.flip(0, 1), torch.flip(x, (1,)), x.flip([-1])), "5x3"),
            ("roll", lambda x: (x.roll(1, 0), x.roll((1, 2), (0, 1)), torch.roll(x, 2, -1)), "5x3"),
            ("roll all", lambda x: torch.roll(x, 2), "5x3"),
            ("tril", lambda x: (x.tril(), x.triu(1), torch.tril(x, diagonal=-1)), "5x3;2x4x3"),
            ("cumsum", lambda x: (x.cumsum(0), torch.cumsum(x, dim=-1)), "5x3"),
            ("cumprod", lambda x: x.cumprod(0), "p:5x3"),
            ("cummax", lambda x: (*x.cummax(0), *torch.cummin(x, dim=-1), x.logcumsumexp(0)), "5x3"),
            ("sort", lambda x: (*x.sort(), *torch.sort(x, dim=0, descending=True)), "5x3"),
            ("argsort", lambda x: (x.argsort(), torch.argsort(x, dim=0, descending=True)), "5x3"),
            ("topk", lambda x: (*x.topk(2), *torch.topk(x, 2, dim=0), *x.topk(1, dim=-1, largest=False)), "5x3"),
        ],
    )
