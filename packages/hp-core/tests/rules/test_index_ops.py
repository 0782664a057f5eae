"""Picking and writing by position, in every layout, against dense; and what little it communicates.

See `conftest.py` for how a case is read and what is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hp_core import DTensor, Layout, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_core.errors import ShardingRuleError
from hp_core.testing import assert_same_error, record_collectives, run_ranks

RANKS = pytest.mark.parametrize("ranks", [2, 4])


def write(x: Any, index: Any, value: Any) -> Any:
    """A copy of x with what the index picks replaced."""
    copy = x.clone()
    copy[index] = value
    return copy


def written(x: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    """A copy of x after an in-place op."""
    copy = x.clone()
    result = getattr(copy, method)(*args, **kwargs)
    assert result is copy
    return copy


@RANKS
def test_basic_indexing(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("int", lambda x: (x[1], x[-1], x[1, 2], x[:, 1]), "5x3;4x6"),
            ("slice", lambda x: (x[1:3], x[:, :2], x[::2], x[:], x[:-1, 1:]), "5x3"),
            ("steps", lambda x: (x[1::2, ::3], x[::4], x[4:1], x[-3:-1]), "5x4;7x3"),
            ("none and ellipsis", lambda x: (x[None], x[..., 0], x[:, None], x[..., None, :], x[...]), "5x3;2x4x3"),
            ("mixed", lambda x: (x[1, None, 1:, ::2], x[..., -1, :2], x[:-1, 0]), "5x3x4"),
            ("empty slice", lambda x: x[2:2], "5x3"),
            ("bool", lambda x: (x[True], x[False], x[..., True]), "5x3"),
            ("scalar", lambda x: (x[...], x[None]), "-"),
            ("flags", lambda x: (x[1], x[1:, :2]), "b:5x3"),
            ("select", lambda x: (x.select(0, 1), x.select(-1, 0), torch.select(x, dim=1, index=-1)), "5x3"),
            ("narrow", lambda x: (x.narrow(0, 1, 2), torch.narrow(x, -1, 0, 2), x.narrow(0, -2, 2)), "5x3"),
        ],
    )


@RANKS
def test_index_tensors(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("one", lambda x, i: (x[i], x[:, i % 3], x[i, None]), "5x3 i5:4;5x3 i5:2x3"),
            ("of a vector", lambda x, i: (x[i], x[i, None]), "5 i5:3;5 i5:1x3"),
            ("negative", lambda x, i: x[i - 5], "5x3 i5:4"),
            ("0-d", lambda x, i: (x[i], x[1:, i]), "5x3 i3:-"),
            ("plain 0-d", lambda x: (x[torch.tensor(1)], x[:, torch.tensor(-1)]), "5x3"),
            ("two", lambda x, i, j: x[i, j], "5x3 i5:4 i3:4;5x3 i5:4x1 i3:2;2x4x3 i2:3 i4:3"),
            ("apart", lambda x, i, j: x[i, :, j], "2x4x3 i2:3 i3:3"),
            ("with basic", lambda x, i: (x[1:, i], x[0, i], x[..., i, None, :2], x[:, i, 1]), "3x5x4 i5:3"),
            ("int and apart", lambda x, i, j: (x[i, 1, j], x[0, :, i, j]), "2x4x3x2 i2:3 i2:3"),
            ("lists", lambda x: (x[[0, 2]], x[:, [1, 0, -1]], x[[[0, 1], [2, 3]],], x[[0, 1], [2, 0]]), "5x3"),
            ("list of bools", lambda x: x[:, [True, False, True]], "5x3"),
            ("0-d and more", lambda x, i, j: x[i, :, j], "3x5x3 i3:- i3:4"),
            ("index_select", lambda x, i: torch.index_select(x, 0, i), "5x3 i5:4;5 i5:2"),
            ("index_select last", lambda x, i: x.index_select(-1, i), "5x3 i3:5"),
            ("index_select keyword", lambda x, i: x.index_select(dim=1, index=i), "5x3 i3:-"),
            ("integers", lambda x, i: x[i], "i9:5x3 i5:4"),
            ("take", lambda x, i: torch.take(x, i), "5x3 i15:4"),
        ],
    )


@RANKS
def test_masks(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("mask", lambda x, m: x[m], "5x3 b:5x3;5x3 b:5;4 b:4"),
            ("mask of a later dim", lambda x, m: (x[:, m], x[1:, m], x[0, m], x[..., m, :]), "2x5x3 b:5"),
            ("mask and index", lambda x, m, i: x[m, i], "5x3 b:5 i3:1"),
            ("masked_select", lambda x, m: torch.masked_select(x, m), "5x3 b:5x3;5x3 b:3;3 b:5x1"),
            ("nonzero", lambda m: (m.nonzero(), torch.argwhere(m), *m.nonzero(as_tuple=True)), "b:5x3"),
        ],
    )


@RANKS
def test_gathers(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("gather", lambda x, i: torch.gather(x, 1, i), "5x3 i3:5x2;5x3 i3:4x3;4x6 i6:4x6"),
            ("gather rows", lambda x, i: x.gather(0, i), "5x3 i5:2x3;5x3 i5:2x2"),
            ("gather keyword", lambda x, i: x.gather(dim=-1, index=i.unsqueeze(-1)).squeeze(-1), "5x3 i3:5"),
            ("take_along_dim", lambda x, i: torch.take_along_dim(x, i, 1), "5x3 i3:5x2;5x3 i3:1x2;1x3 i3:4x2"),
            ("take_along_dim flat", lambda x, i: torch.take_along_dim(x, i), "5x3 i15:4"),
        ],
    )


@RANKS
def test_assignment(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("number", lambda x: (write(x, 1, 2.5), write(x, (slice(None), 1), 3), write(x, ..., 0)), "5x3"),
            ("rows", lambda x, v: (write(x, 1, v), write(x, slice(1, 4), v), write(x, ..., v)), "5x3 3;5x3 1;5x3 -"),
            ("slices", lambda x, v: write(x, (slice(1, None), slice(0, 2)), v), "5x3 4x2;5x3 4x1;5x3 2"),
            ("steps", lambda x, v: write(x, (slice(0, None, 2), slice(1, None)), v), "5x3 3x2;5x3 1x3x2;5x3 1x1"),
            ("new dim", lambda x, v: write(x, (slice(1, 3), None, 1), v), "5x3 2x1;5x3 1"),
            ("whole", lambda x, v: write(x, slice(None), v), "5x3 5x3;5x3 3;5x3 5x1"),
            ("empty", lambda x, v: write(x, slice(2, 2), v), "5x3 3"),
            ("tensor", lambda x, i, v: write(x, torch.argsort(i), v), "f:5x3 i99:5 5x3;f:5x3 i99:5 3;f:5x3 i99:5 -"),
            ("tensor column", lambda x, i, v: write(x, (slice(1, 4), i.argsort()), v), "f:5x3 i9:3 3x3;f:5x3 i9:3 3x1"),
            ("number at tensor", lambda x, i: (write(x, i, 2.0), write(x, (i, 1), -1)), "5x3 i5:4"),
            ("two tensors", lambda x, i, v: write(x, (i.argsort(), i.argsort() % 3), v), "f:5x3 i99:5 5;f:5x3 i99:5 1"),
            (
                "apart",
                lambda x, i, v: write(x, (i.argsort(), slice(1, 3), i.argsort()), v),
                "f:3x4x3 i99:3 3x2;f:3x4x3 i99:3 2",
            ),
            ("int and tensor", lambda x, i, v: write(x, (1, i.argsort()), v), "f:2x4x3 i99:4 4x3"),
            ("list", lambda x, v: (write(x, [0, 3], v), write(x, (slice(None), [2, 0]), 1)), "5x3 2x3;5x3 3"),
            ("0-d tensor", lambda x, i, v: write(x, i, v), "5x3 i5:- 3"),
            ("mask number", lambda x, m: write(x, m, 2.0), "5x3 b:5x3;5x3 b:5"),
            ("mask rows", lambda x, m, v: write(x, m, v), "5x3 b:5 3;5x3 b:5x3 -;5x3 b:5 -"),
            ("mask values", lambda x, m, v: write(x, m, v[: int(m.sum())]), "f:5x3 b:5 5x3;f:5x3 b:5x3 15"),
            ("mask of a column", lambda x, m, v: write(x, (slice(1, 4), m), v[:, : int(m.sum())]), "f:5x3 b:3 3x3"),
            ("bool", lambda x, v: (write(x, True, v), write(x, False, v)), "5x3 3"),
        ],
    )


@RANKS
def test_index_put(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("index_put", lambda x, i, v: x.index_put((i.argsort(),), v), "5x3 i99:5 5x3;5x3 i99:5 3"),
            ("add", lambda x, i, v: x.index_put((i,), v, accumulate=True), "5x3 i5:7 7x3;5x3 i5:7 3"),
            ("in place", lambda x, i, v: written(x, "index_put_", (i.argsort(),), v), "f:5x3 i99:5 5x3"),
            ("add in place", lambda x, i, v: written(x, "index_put_", (i, i % 3), v, accumulate=True), "5x3 i5:7 7"),
        ],
    )


@RANKS
def test_scatters(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("scatter", lambda x, i, v: x.scatter(0, i.argsort(0), v), "5x3 i99:5x3 5x3;5x3 i99:5x2 5x2"),
            ("scatter rows", lambda x, i, v: torch.scatter(x, -1, i.argsort(1), v), "5x3 i99:5x3 5x3;5x3 i99:4x3 4x3"),
            ("scatter number", lambda x, i: (x.scatter(1, i, 2.0), torch.scatter(x, 1, i, value=1.0)), "5x3 i3:5x2"),
            ("scatter in place", lambda x, i, v: written(x, "scatter_", 1, i.argsort(1), v), "f:5x3 i99:5x3 5x3"),
            ("scatter number in place", lambda x, i: written(x, "scatter_", 1, i, 2.0), "5x3 i3:5x2"),
            ("scatter larger source", lambda x, i, v: x.scatter(0, i.argsort(0), v), "5x3 i99:3x3 n:5x3"),
            ("scatter reduce", lambda x, i, v: x.scatter(1, i, v, reduce="add"), "n:5x3 i3:5x4 n:5x4"),
            ("scatter_add", lambda x, i, v: x.scatter_add(1, i, v), "5x3 i3:5x4 5x4;5x3 i3:4x2 4x2"),
            ("scatter_add rows", lambda x, i, v: x.scatter_add(0, i, v), "5x3 i5:7x3 7x3"),
            ("scatter_add in place", lambda x, i, v: written(x, "scatter_add_", 0, i, v), "5x3 i5:7x3 7x3"),
            ("scatter_reduce", lambda x, i, v: x.scatter_reduce(0, i, v, "prod"), "p:5x3 i5:7x3 p:7x3"),
            ("reduce sum", lambda x, i, v: x.scatter_reduce(1, i, v, reduce="sum"), "5x3 i3:5x4 5x4"),
            ("reduce mean", lambda x, i, v: x.scatter_reduce(1, i, v, "mean", include_self=False), "5x3 i3:5x4 5x4"),
            ("reduce amax", lambda x, i, v: written(x, "scatter_reduce_", 1, i, v, "amax"), "5x3 i3:5x4 5x4"),
            ("one dim", lambda x, i, v: x.scatter_add(0, i, v), "5 i5:7 7"),
        ],
    )


@RANKS
def test_index_writes(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("index_add", lambda x, i, v: x.index_add(0, i, v), "5x3 i5:7 7x3;5 i5:4 4"),
            ("index_add alpha", lambda x, i, v: torch.index_add(x, 1, i, v, alpha=2.0), "5x3 i3:4 5x4"),
            ("index_add in place", lambda x, i, v: written(x, "index_add_", 0, i, v), "5x3 i5:7 7x3"),
            ("index_copy", lambda x, i, v: x.index_copy(0, i.argsort(), v), "5x3 i99:5 5x3"),
            ("index_copy in place", lambda x, i, v: written(x, "index_copy_", 1, i.argsort(), v), "f:5x3 i99:3 5x3"),
            ("index_fill", lambda x, i: (x.index_fill(0, i, 2.0), written(x, "index_fill_", 1, i % 3, -1)), "5x3 i5:2"),
            ("index_fill tensor", lambda x, i, v: torch.index_fill(x, 0, i, v), "5x3 i5:2 -"),
            ("index_reduce", lambda x, i, v: x.index_reduce(0, i, v, "amax"), "n:5x3 i5:7 n:7x3"),
            ("select_scatter", lambda x, v: torch.select_scatter(x, v, 0, 1), "5x3 3"),
            ("slice_scatter", lambda x, v: torch.slice_scatter(x, v, 0, 1, 4, 2), "5x3 2x3"),
        ],
    )


@RANKS
def test_masked_writes(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("masked_fill", lambda x, m: x.masked_fill(m, 2.0), "5x3 b:5x3;5x3 b:3"),
            ("masked_fill tensor", lambda x, m, v: torch.masked_fill(x, m, v), "5x3 b:5x3 -"),
            ("masked_fill in place", lambda x, m: written(x, "masked_fill_", m, 2.0), "5x3 b:5x3;5x3 b:5x1"),
            ("masked_scatter", lambda x, m, v: x.masked_scatter(m, v), "5x3 b:5x3 15;5x3 b:3 5x3"),
            ("masked_scatter in place", lambda x, m, v: written(x, "masked_scatter_", m, v), "5x3 b:5x3 20"),
            ("where", lambda m, x, y: torch.where(m, x, y), "b:5x3 5x3 5x3;b:5x1 5x3 -"),
            ("where positions", lambda m: torch.where(m), "b:5x3"),
        ],
    )


@RANKS
def test_search_and_count(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("unique", lambda x: (x.unique(), torch.unique(x, sorted=True)), "i4:5x3"),
            ("unique counts", lambda x: x.unique(return_inverse=True, return_counts=True), "i4:5x3"),
            ("unique rows", lambda x: torch.unique(x, dim=0), "i2:5x2"),
            ("consecutive", lambda x: torch.unique_consecutive(x), "i2:9"),
            ("bincount", lambda x: (torch.bincount(x), x.bincount(minlength=9)), "i5:7"),
            ("bincount weights", lambda x, w: torch.bincount(x, w), "i5:7 n:7"),
            ("histc", lambda x: (torch.histc(x, 5, -1.0, 1.0), x.histc(4)), "n:5x3"),
            ("searchsorted", lambda s, v: torch.searchsorted(s.sort()[0], v), "n:7 n:5x3;n:5x3 n:5x2"),
            ("searchsorted right", lambda s, v: torch.searchsorted(s.sort()[0], v, right=True), "i9:7 i9:4"),
            ("bucketize", lambda v, s: torch.bucketize(v, s.sort()[0]), "n:5x3 n:7"),
        ],
    )


def lay(value: torch.Tensor, *placements: Any, ranks: int = 2) -> Any:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    return distribute_tensor(value, mesh, placements, src_data_rank=None)


VALUE = torch.arange(32, dtype=torch.float64).view(8, 4)
ROW = 4 * 8  # bytes


def communicated(function: Callable[[], Any]) -> tuple[dict[str, int], int, dict[str, int], int]:
    """Collectives and bytes of a call, and of the backward of its sum."""
    with record_collectives() as forward:
        result = function()
    if not result.requires_grad:
        return dict(forward.counts), forward.nbytes, {}, 0
    total = result.redistribute(result.layout.gradient).sum() if result.is_partial() else result.sum()
    with record_collectives() as backward:
        total.backward()
    return dict(forward.counts), forward.nbytes, dict(backward.counts), backward.nbytes


def count_reads() -> dict[str, Any]:
    def cut() -> Any:
        return lay(VALUE, Shard(0)).requires_grad_()

    rows = lay(torch.tensor([1, 6, 6]), Replicate())
    flags = lay(torch.arange(8) % 3 == 0, Shard(0))
    return {
        "row": communicated(lambda: cut()[5]),
        "shifted": communicated(lambda: cut()[1:]),
        "kept": communicated(lambda: cut()[:, 1:3]),
        "reversed": communicated(lambda: cut().flip(0)),
        "rolled": communicated(lambda: cut().roll(1, 0)),
        "looked up": communicated(lambda: cut()[rows]),
        "gathered": communicated(lambda: cut().gather(0, rows[:, None].expand(3, 4))),
        "masked": communicated(lambda: cut()[flags]),
        "joined": communicated(lambda: torch.cat([cut(), lay(VALUE[:2], Replicate())])),
        "halves": communicated(lambda: cut().chunk(2)[0]),
        "triangle": communicated(lambda: cut().tril()),
        "diagonal": communicated(lambda: cut().diagonal()),
        "repeated": communicated(lambda: cut().repeat(2, 1)),
        "counted": communicated(lambda: torch.searchsorted(lay(VALUE.flatten(), Shard(0)), lay(VALUE, Replicate()))),
    }


def test_reads_of_a_cut_dim_move_little() -> None:
    """A pending sum costs nothing yet; a slice moves only rows that change hands, and their gradients move back."""
    for seen in run_ranks(2, count_reads):
        silent = ({}, 0, {}, 0)
        for name in ("row", "kept", "looked up", "triangle", "diagonal"):
            assert seen[name] == silent, name
        assert seen["counted"] == silent
        assert seen["gathered"] == silent
        assert seen["halves"][0] == {"all_to_all": 1}
        # at most one message of at most the rows that change hands, each way
        for name, most in (
            ("shifted", 1),
            ("rolled", 1),
            ("joined", 1),
            ("reversed", 4),
            ("halves", 2),
            ("repeated", 8),
        ):
            forward, sent, backward, returned = seen[name]
            assert forward == backward == {"all_to_all": 1}, name
            assert max(sent, returned) <= most * ROW, name
        assert seen["masked"][0] == {"all_gather": 2}
        assert seen["masked"][2] == {}


def count_writes() -> dict[str, Any]:
    x = lay(VALUE, Shard(0))
    index = lay(torch.tensor([1, 6]), Replicate())
    flags = lay(torch.arange(8) % 3 == 0, Shard(0))
    row = lay(torch.ones(4, dtype=torch.float64), Replicate())
    rows = lay(torch.ones(2, 4, dtype=torch.float64), Replicate())
    whole = lay(VALUE, Replicate())
    at, what = lay(torch.tensor([1, 6, 6, 2]), Shard(0)), lay(VALUE[:4], Shard(0))

    def setting(index: Any, value: Any) -> Callable[[], Any]:
        def set_() -> Any:
            x[index] = value
            return x

        return set_

    result = whole.index_add(0, at, what)
    assert result.is_partial()
    return {
        "int": communicated(setting(3, row)),
        "slice": communicated(setting(slice(2, 7, 2), 1.0)),
        "tensor": communicated(setting(index, rows)),
        "mask": communicated(setting(flags, row)),
        "index_add": communicated(lambda: x.index_add(0, index, rows)),
        "scatter": communicated(lambda: x.scatter(0, index[:, None].expand(2, 4), rows)),
        "pending": communicated(lambda: whole.index_add(0, at, what)),
    }


def test_writes_to_a_cut_dim_move_nothing() -> None:
    for seen in run_ranks(2, count_writes):
        assert {name: record for name, record in seen.items() if record != ({}, 0, {}, 0)} == {}


def write_to_copies() -> None:
    x = lay(VALUE.clone(), Shard(0))
    for view in (x[1], x[1:], x.narrow(0, 1, 2), x.select(0, 3), x.chunk(3)[0], x.diagonal()):
        with pytest.raises(ShardingRuleError, match="would be lost"):
            view.add_(1)
        with pytest.raises(ShardingRuleError, match="would be lost"):
            view[...] = 1
    torch.testing.assert_close(x.full_tensor(), VALUE)
    picked = x[lay(torch.tensor([1, 2]), Replicate())]  # a copy in the dense program, too
    picked.reduce_partial().add_(1)
    x[0][lay(torch.tensor([1]), Replicate())].reduce_partial().add_(1)
    torch.testing.assert_close(x.full_tensor(), VALUE)
    x[:, 1].add_(1)
    x[:, 2:] = 0
    expected = VALUE.clone()
    expected[:, 1] += 1
    expected[:, 2:] = 0
    torch.testing.assert_close(x.full_tensor(), expected)


def test_a_write_to_what_is_a_copy_here_is_refused() -> None:
    run_ranks(2, write_to_copies)


def pending_target() -> None:
    x = lay(VALUE, Partial())
    x[0] = 1.0


def index_out_of_range() -> None:
    x = lay(VALUE.clone(), Shard(0))
    x[0, lay(torch.tensor([4]), Replicate())] = 1.0  # only rank 0 has row 0


def row_out_of_range() -> None:
    lay(VALUE.clone(), Shard(0))[lay(torch.tensor([-9, 0]), Replicate())] = 1.0


def too_few_values() -> None:
    x = lay(VALUE.clone(), Shard(0))
    x.masked_scatter_(lay(VALUE > 20, Shard(0)), lay(torch.ones(3, dtype=torch.float64), Replicate()))


def write_to_a_leaf() -> None:
    x = lay(VALUE.clone(), Shard(0)).requires_grad_()
    x[0] = 1.0


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (pending_target, ShardingRuleError, "can't write in place"),
        (index_out_of_range, IndexError, "out of range"),
        (row_out_of_range, IndexError, "out of range"),
        (too_few_values, IndexError, "out of range"),
        (write_to_a_leaf, RuntimeError, "leaf Variable"),
    ],
)
def test_bad_writes_are_refused_alike_on_all_ranks(function: Any, error: type[Exception], text: str) -> None:
    assert_same_error(2, function, error, text)


def bad_reads() -> None:
    x = lay(VALUE, Shard(0))
    number = lay(torch.tensor(2), Replicate())
    for index, match in (
        ((slice(number, None),), "int"),
        (([[0, 1], [2, 3]]), "ambiguous"),
        ("a", "DTensor"),
        ((0, 0, 0), "too many indices"),
    ):
        with pytest.raises(ShardingRuleError, match=match):
            x[index]
    for index in (8, -9):
        with pytest.raises(IndexError, match="out of bounds"):
            x[index]
    with pytest.raises(ShardingRuleError, match="view, unfold"):
        x.as_strided((2, 2), (1, 1))


def test_what_is_no_index_is_refused_with_what_to_write() -> None:
    run_ranks(2, bad_reads)


def uneven_and_ragged() -> None:
    """More ranks than rows, and unequal shares."""
    from hp_core.placement import RaggedShard

    value = torch.arange(12, dtype=torch.float64).view(6, 2)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    layout = Layout.from_device_mesh(mesh)
    index = distribute_tensor(torch.tensor([5, 0, 3]), mesh, [Replicate()], src_data_rank=None)
    for how in (layout(RaggedShard((3, 0, 1, 2))), layout("tp")):
        x = distribute_tensor(value, how, src_data_rank=None).requires_grad_()
        dense = value.clone().requires_grad_()
        for function in (
            lambda x, i: x[4] * 2,
            lambda x, i: x[1:5],
            lambda x, i: x.flip(0),
            lambda x, i: torch.cat([x, x]),
            lambda x, i: x.split([1, 3, 2])[1],
            lambda x, i: x[i],
            lambda x, i: x[:, x[0] > -1],
            lambda x, i: x[x[:, 0] > 2],
            lambda x, i: x[:, None, None][:, (i >= 0)[:1], :, (i < 5)[:2]],
            lambda x, i: x.tril(-2),
            lambda x, i: write(x, slice(0, None, 3), 7.0),
            lambda x, i: write(x, i, x[:3]),
            lambda x, i: x.index_add(0, i, x[3:]),
        ):
            x.grad = dense.grad = None
            result, expected = function(x, index), function(dense, index.full_tensor())
            assert isinstance(result, DTensor)
            torch.testing.assert_close(result.full_tensor(), expected)
            weight = torch.arange(expected.numel(), dtype=torch.float64).view(expected.shape)
            (result.full_tensor() * weight).sum().backward()
            (expected * weight).sum().backward()
            torch.testing.assert_close(x.grad.full_tensor(), dense.grad)


def test_empty_and_ragged_parts() -> None:
    run_ranks(4, uneven_and_ragged)
