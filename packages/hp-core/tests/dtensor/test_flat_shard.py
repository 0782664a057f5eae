"""DTensors in flat layouts: redistribution with gradients, ops on shares, optimizers, refusals, all against dense."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hp_core import (
    DTensor,
    FlatShard,
    Layout,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    plan_redistribute,
    record_collectives,
)
from hp_core.errors import HyperParallelError, LayoutError, ShardingRuleError
from hp_core.testing import assert_same_error, run_ranks

SHAPES: list[tuple[int, ...]] = [(5, 3), (4, 6), (7,), (2,), (1, 2, 3), ()]
"""Even and uneven ones, some with fewer elements than there are ranks."""


def make_mesh(ranks: int, grid: bool) -> Any:
    shape, names = ((2, 2), ("dp", "tp")) if grid else ((ranks,), ("dp",))
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def flat_layouts(mesh: Any, shape: tuple[int, ...], pending: bool = True) -> Iterator[Layout]:
    """Shares along either axis, from the start of the buffer and from within it; what is left over is as it can be."""
    base = Layout.from_device_mesh(mesh)
    numel = prod(shape)

    def share(size: int, offset: int) -> FlatShard:
        return FlatShard(-(-(numel + offset) // size), offset)

    if mesh.ndim == 1:
        yield from (base(share(mesh.size(), offset)) for offset in (0, 5))
        yield base(FlatShard(numel + 4, 2))  # most of it on the first rank, nothing on the others
        return
    others = [Replicate(), *(Shard(dim) for dim in range(min(len(shape), 2))), *([Partial()] if pending else [])]
    for other in others:
        yield base(share(2, 0), other)
        yield base(other, share(2, 3))


def plain_layouts(mesh: Any, shape: tuple[int, ...]) -> Iterator[Layout]:
    options = [Replicate(), Partial(), *(Shard(dim) for dim in range(min(len(shape), 2)))]
    for placements in product(options, repeat=mesh.ndim):
        yield Layout.from_device_mesh(mesh)(*placements)


def own_part(value: torch.Tensor, layout: Layout) -> torch.Tensor:
    shape = tuple(value.shape)
    for dim, (start, stop) in enumerate(layout.unflat.bounds(shape)):
        value = value.narrow(dim, start, stop - start)
    if layout.flat is not None:
        value = value.reshape(-1)[slice(*layout.flat_interval(shape))]
    return value.clone()


def local_of(value: torch.Tensor, layout: Layout) -> torch.Tensor:
    """What this rank holds, so that pending sums give `value`; ranks hold different numbers."""
    coordinate = layout.mesh.get_coordinate()
    for axis, _ in layout.partials:
        size = layout.mesh.shape[axis]
        value = (2 * size - 1) * value if coordinate[axis] == 0 else -2 * value
    return own_part(value, layout)


# -- redistribution -------------------------------------------------------------------------------------------------


def all_pairs(ranks: int, grid: bool, shape: tuple[int, ...]) -> list[tuple[str, int, int, int, int]]:
    mesh = make_mesh(ranks, grid)
    value = torch.arange(1.0, prod(shape) + 1, dtype=torch.float64).view(shape)
    direction = 7 - value
    every = [*flat_layouts(mesh, shape), *plain_layouts(mesh, shape)]
    told = []
    for number, (src, dst) in enumerate(product(every, repeat=2)):
        if src.flat is None and dst.flat is None:
            continue
        local = local_of(value, src).requires_grad_()
        x = DTensor.from_local(local, src, shape=shape)
        with record_collectives() as log:
            moved = x.redistribute(dst, async_op=number % 2 == 0)
            assert tuple(moved.to_local().shape) == dst.local_shape(shape)
        plan = plan_redistribute(src, dst, shape, 8)
        collectives = sum(count for kind, count in log.counts.items() if kind not in ("send", "recv"))
        told.append((f"{src} -> {dst}", plan.messages, plan.nbytes, collectives, log.nbytes))
        assert torch.equal(moved.full_tensor().detach(), value), (src, dst)
        moved.backward(distribute_tensor(direction, dst.gradient, src_data_rank=None))
        assert torch.equal(local.grad, own_part(direction, src.gradient)), (src, dst)  # type: ignore[arg-type]
    return told


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("ranks", "grid"), [(2, False), (4, False), (4, True)])
def test_all_pairs_there_and_the_gradient_back(ranks: int, grid: bool, shape: tuple[int, ...]) -> None:
    """What is sent is what the plan says, in as many messages; its bytes are those of the busiest rank."""
    for ways in zip(*run_ranks(ranks, all_pairs, ranks, grid, shape), strict=True):
        name, messages, nbytes = ways[0][:3]
        collectives, sent = (max(way[place] for way in ways) for place in (3, 4))
        assert collectives <= messages, name
        assert sent == nbytes if messages == 1 else sent <= nbytes, name


def to_another_mesh() -> None:
    square = Layout.from_device_mesh(make_mesh(4, True))
    pair = Layout.from_device_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",), rank_list=(2, 3)))
    value = torch.arange(15.0).view(5, 3)
    src, dst = square(FlatShard(5, 1), Shard(0)), pair(FlatShard(11, 4))
    there = distribute_tensor(value, src, src_data_rank=None).redistribute(dst)
    if dst.mesh.get_coordinate() is not None:
        assert torch.equal(there.to_local(), own_part(value, dst))
    assert torch.equal(there.redistribute(src).to_local(), own_part(value, src))


def test_to_another_mesh_and_back() -> None:
    run_ranks(4, to_another_mesh)


# -- ops ------------------------------------------------------------------------------------------------------------


def set_items(x: Any) -> Any:
    x = x.clone()
    x[0] = 7.0
    x[..., 1:] = x[..., :1]
    return x


ON_SHARES: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x + x * 2 - x / 3,
    "in place": lambda x: x.clone().add_(x, alpha=2).mul_(3).addcdiv_(x, x.abs() + 1).lerp_(x, 0.3).sub_(1),
    "scaled": lambda x: x * (x.sum() if x.ndim else 2),
    "zero": lambda x: x.clone().zero_() + torch.zeros_like(x) + torch.ones_like(x),
    "full": lambda x: torch.full_like(x, 3.0) + x.clone().fill_(2.0),
    "copy": lambda x: torch.empty_like(x).copy_(x),
    "where": lambda x: torch.where(x > 0, x, -x).masked_fill(x > 1, 0.0).clamp(min=0.1),
    "cast": lambda x: x.float().to(torch.float64).type_as(x),
    "detach": lambda x: x.detach(),
    "own shape": lambda x: x.reshape(x.shape).view_as(x),
    "foreach": lambda x: torch._foreach_addcmul([x, x * 2], [x, x], [x, x])[1],
}
REDUCED: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "mean float": lambda x: torch.mean(x, dtype=torch.float32),
    "amax": lambda x: x.amax(),
    "amin": lambda x: x.amin(),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "all": lambda x: x.all(),
    "any": lambda x: (x > 1).any(),
    "count": lambda x: x.count_nonzero(),
    "finite": lambda x: x.isfinite().all(),
    "prod": lambda x: x.prod(),
    "extrema": lambda x: torch.stack(tuple(torch.aminmax(x))),
    "linalg norm": lambda x: torch.linalg.norm(x),
    "distance": lambda x: torch.dist(x, x * 2),
    "norms": lambda x: torch.stack(torch._foreach_norm([x, x * 2])),
    **{
        f"norm {p}": lambda x, p=p: x.norm(p) + torch.linalg.vector_norm(x, p)
        for p in (2, 1, 0, 3, 0.5, float("inf"), -float("inf"))
    },
}
BY_GATHER = {"prod", "extrema"}
"""Reductions that aren't sums or extrema of their own kind: each rank's result is gathered, a number or two."""
GATHERED: dict[str, Callable[[Any], Any]] = {
    "rows": lambda x: x.sum(0),
    "kept dims": lambda x: x.sum(tuple(range(x.ndim)), True),
    "flat": lambda x: x.reshape(-1) * 2,
    "product": lambda x: x.reshape(x.shape[0], -1) @ x.reshape(x.shape[0], -1).t(),
    "softmax": lambda x: x.softmax(0),
    "deviation": lambda x: x.std(),
    "norms of matrices": lambda x: x.norm("nuc") + torch.linalg.norm(x, 2) if x.ndim == 2 else x.norm(keepdim=True),
    "rows beside": lambda x: x.clone().add_(x.sum(0)) + x.amax(0),
    "scan in place": lambda x: x.clone().cumsum_(0),
    "set items": set_items,
    "indexed": lambda x: x[x.shape[0] // 2],
}


def check_table(ranks: int, grid: bool, which: str) -> list[str]:
    """What differs from dense in value, gradient or layout, or sends what it needn't."""
    mesh = make_mesh(ranks, grid)
    table = {"shares": ON_SHARES, "reduced": REDUCED, "gathered": GATHERED}[which]
    wrong = []
    for shape in SHAPES[:-1] if which == "gathered" else SHAPES:
        dense = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        for layout, (name, op) in product(flat_layouts(mesh, shape, pending=False), table.items()):
            told = f"{name} of {shape} {layout}"
            x = distribute_tensor(dense, layout, src_data_rank=None).requires_grad_()
            leaf = dense.clone().requires_grad_()
            with record_collectives() as log:
                result = op(x)
            expected = op(leaf)
            precision = 1e-5 if expected.dtype is torch.float32 else 1e-10
            if not torch.allclose(result.full_tensor(), expected, rtol=precision, equal_nan=True):
                wrong.append(f"{told}: {result.full_tensor()} instead of {expected}")
            if which == "shares" and result.layout.gradient is not layout.gradient:
                wrong.append(f"{told}: the result is laid out {result.layout}")
            if which != "gathered" and set(log.counts) - {"all_reduce", *(["all_gather"] if name in BY_GATHER else [])}:
                wrong.append(f"{told}: {log.summary()}")
            if expected.requires_grad:
                result.sum().backward()
                expected.sum().backward()
                if x.grad.layout is not layout.gradient:
                    wrong.append(f"{told}: the gradient is laid out {x.grad.layout}")
                gradient = torch.zeros_like(dense) if leaf.grad is None else leaf.grad
                if not torch.allclose(x.grad.full_tensor(), gradient, rtol=1e-5, atol=1e-7, equal_nan=True):
                    wrong.append(f"{told}: gradient {x.grad.full_tensor()} instead of {gradient}")
    return wrong


@pytest.mark.parametrize("which", ["shares", "reduced", "gathered"])
@pytest.mark.parametrize(("ranks", "grid"), [(2, False), (4, True)])
def test_ops_equal_dense(ranks: int, grid: bool, which: str) -> None:
    """Elementwise ops stay on the shares; a reduction of all sends what it leaves; what else there is gathers first."""
    assert run_ranks(ranks, check_table, ranks, grid, which, timeout=150) == [[]] * ranks


def gathers() -> None:
    layout = Layout.from_device_mesh(make_mesh(4, True))(FlatShard(9, 1), Shard(0))
    x = distribute_tensor(torch.randn(5, 3), layout, src_data_rank=None)
    index = distribute_tensor(torch.tensor([0, 3]), layout.replicated, src_data_rank=None)
    for op in (lambda a: a.softmax(0), lambda a: a.std(), lambda a: a.clone().index_fill_(0, index, 1.0)):
        with record_collectives() as log:
            op(x)
        assert log.counts["all_gather"] == 1, log.summary()


def test_an_op_that_is_computed_from_others_gathers_once() -> None:
    run_ranks(4, gathers)


def pending_shares() -> None:
    mesh = make_mesh(4, True)
    base = Layout.from_device_mesh(mesh)
    dense = torch.arange(-7.0, 8.0).view(5, 3)
    layout = base(FlatShard(9, 1), Partial())
    x = DTensor.from_local(local_of(dense, layout), layout, shape=(5, 3))
    with record_collectives() as log:
        for kept in (x + x, x * 2, x.double(), -x, x.clone(), x.clone().add_(x)):
            assert kept.layout is layout
        assert x.sum().layout is base(Partial(), Partial())
    assert not log, log.summary()
    with record_collectives() as log:
        assert x.abs().layout is layout.gradient
        assert torch.equal(x.reduce_partial().to_local(), own_part(dense, layout))
    assert log.counts == {"all_reduce": 2}
    assert torch.equal((x + x).full_tensor(), dense * 2)
    assert torch.equal((x + 1).full_tensor(), dense + 1)
    assert x.norm().item() == pytest.approx(dense.norm().item())


def test_sums_pending_on_another_axis_stay_or_are_finished_on_the_shares() -> None:
    run_ranks(4, pending_shares)


def mixed_layouts() -> None:
    mesh = make_mesh(4, True)
    base = Layout.from_device_mesh(mesh)
    dense = torch.arange(1.0, 16.0).view(5, 3)
    flat = base(FlatShard(8, 1), Shard(0))
    others = [base(*p) for p in product((Replicate(), Shard(0), Partial(), FlatShard(16, 4)), (Replicate(), Shard(0)))]
    for other in [*others, flat.unflat, base(Replicate(), FlatShard(9))]:
        x = distribute_tensor(dense, flat, src_data_rank=None)
        y = distribute_tensor(dense * 3, other, src_data_rank=None)
        for write in (
            lambda a, b: a.add_(b),
            lambda a, b: torch._foreach_add_([a], [b]),
            lambda a, b: a.copy_(b + a),
            lambda a, b: a.addcmul_(b, torch.ones_like(a)),
        ):
            written = x.clone()
            write(written, y)
            assert written.layout is flat
            assert torch.equal(written.full_tensor(), dense * 4), other
            if not y.is_partial():
                written = y.clone()
                write(written, x)
                assert written.layout is other
                assert torch.equal(written.full_tensor(), dense * 4), other
        assert torch.equal((x * y).full_tensor(), dense * dense * 3)
        assert torch.equal(torch._foreach_mul([x], [y])[0].full_tensor(), dense * dense * 3)
    whole = distribute_tensor(dense, flat.unflat, src_data_rank=None)
    with record_collectives() as log:
        assert (x * whole).layout is flat  # to share what is whole costs nothing
    assert not log


def test_operands_in_other_layouts_follow_the_one_that_is_written_to() -> None:
    run_ranks(4, mixed_layouts)


def data_parallel() -> None:
    """Weights gathered for a forward on other samples on every rank, and their gradients scattered: FSDP's pattern."""
    mesh = make_mesh(4, True)
    base = Layout.from_device_mesh(mesh)
    values = [
        torch.randn(s, dtype=torch.float64, generator=torch.Generator().manual_seed(s[0])) for s in ((6, 5), (3, 6))
    ]
    batch = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    layouts = [base(FlatShard(20, 1), Shard(0)), base(FlatShard(9), Shard(1))]
    dense = [value.clone().requires_grad_() for value in values]
    flat = [
        distribute_tensor(v, layout, src_data_rank=None).requires_grad_()
        for v, layout in zip(values, layouts, strict=True)
    ]
    x = distribute_tensor(batch, base("dp"), src_data_rank=None)
    with record_collectives() as log:
        loss = F.linear(F.linear(x, flat[0]).tanh(), flat[1]).square().sum()
    assert log.counts["all_gather"] == 2
    with record_collectives() as log:
        loss.backward()
    assert log.counts == {"reduce_scatter": 2}, log.summary()
    F.linear(F.linear(batch, dense[0]).tanh(), dense[1]).square().sum().backward()
    for one, other, layout in zip(flat, dense, layouts, strict=True):
        assert one.grad.layout is layout
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)


def test_the_gradient_of_a_gathered_weight_is_reduce_scattered() -> None:
    run_ranks(4, data_parallel)


def batch_norm(x: Any, weight: Any, mean: Any, variance: Any) -> Any:
    """The running statistics, which the op writes to beside its result, count as well."""
    result = F.batch_norm(x, mean, variance, weight[0], None, True)
    return result.sum(1) + mean.sum() + variance.sum()


MODELS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "linear": (F.linear, [(4, 6), (5, 6), (5,)]),
    "norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), [(4, 6), (6,), (6,)]),
    "batch norm": (batch_norm, [(4, 6), (1, 6), (6,), (6,)]),
    "embedding": (lambda x, w: F.embedding(x.detach().abs().long().clamp(max=4), w), [(4, 6), (5, 3)]),
    "loss": (lambda x, w: F.cross_entropy(x @ w, w.detach().argmax(0) % 4), [(4, 6), (6, 4)]),
    "other op": (lambda x, w: torch.cov(x @ w.flip(0)).fliplr(), [(4, 6), (6, 4)]),
    "op without rule": (lambda x, w: torch.diff(x, dim=1) @ torch.diff(w, dim=0), [(4, 6), (6, 4)]),
}


def check_models() -> list[str]:
    mesh = make_mesh(4, True)
    base = Layout.from_device_mesh(mesh)
    wrong = []
    for name, (model, shapes) in MODELS.items():
        values = [torch.randn(s, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(s))) for s in shapes]
        written = name == "batch norm"
        dense = [value.clone().requires_grad_(not written or place < 2) for place, value in enumerate(values)]
        flat = []
        for place, value in enumerate(values):
            numel = value.numel() + place
            layout = (
                base(FlatShard(numel), Shard(0)) if place % 2 else base(Replicate(), FlatShard(numel // 2 + 1, place))
            )
            flat.append(distribute_tensor(value, layout, src_data_rank=None).requires_grad_(dense[place].requires_grad))
        result, expected = model(*flat), model(*dense)
        if not torch.allclose(result.full_tensor(), expected):
            wrong.append(f"{name}: {result.full_tensor()} instead of {expected}")
        direction = torch.linspace(0.5, 2, expected.numel(), dtype=torch.float64).view(expected.shape)
        result.backward(distribute_tensor(direction, result.layout.gradient, src_data_rank=None))
        expected.backward(direction)
        for one, other in zip(flat, dense, strict=True):
            if other.grad is not None and not torch.allclose(one.grad.full_tensor(), other.grad):
                wrong.append(f"{name}: gradient {one.grad.full_tensor()} instead of {other.grad}")
    return wrong


def test_ops_of_models_take_flat_operands() -> None:
    assert run_ranks(4, check_models) == [[]] * 4


# -- optimizers -----------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda group, **kind: torch.optim.SGD(group, lr=0.1, momentum=0.9, weight_decay=0.01, **kind),
    "adam": lambda group, **kind: torch.optim.Adam(group, lr=0.01, amsgrad=True, **kind),
    "adamw": lambda group, **kind: torch.optim.AdamW(group, lr=0.01, weight_decay=0.1, **kind),
}


def train(make: Callable[..., torch.optim.Optimizer], ranks: int, grid: bool) -> None:
    mesh = make_mesh(ranks, grid)
    values, layouts = [], []
    for number, shape in enumerate(SHAPES):
        for layout in flat_layouts(mesh, shape, pending=False):
            values.append(torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(number)))
            layouts.append(layout)
    dense = [nn.Parameter(value.clone()) for value in values]
    flat = [
        nn.Parameter(distribute_tensor(value, layout, src_data_rank=None))
        for value, layout in zip(values, layouts, strict=True)
    ]
    optimizers = make(dense), make(flat)
    for step in range(3):
        for group in (dense, flat):
            sum((step + 1 + one.square()).log().sum() for one in group).backward()
        norms = [nn.utils.clip_grad_norm_(group, 0.5) for group in (dense, flat)]
        assert float(norms[0]) == pytest.approx(float(norms[1]), rel=1e-12)
        for optimizer in optimizers:
            with record_collectives() as log:
                optimizer.step()
            assert not log, log.summary()
            optimizer.zero_grad()
    for one, other, layout in zip(flat, dense, layouts, strict=True):
        assert one.layout is layout
        torch.testing.assert_close(one.detach().full_tensor(), other.detach(), rtol=1e-11, atol=1e-11)
    for parameter, state in optimizers[1].state.items():
        moments = [value for name, value in state.items() if torch.is_tensor(value) and name != "step"]
        assert moments
        for value in moments:
            assert value.layout is parameter.layout
            assert value.to_local().shape == parameter.to_local().shape


@pytest.mark.parametrize("kind", ["foreach", "single", "fused"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("ranks", "grid"), [(2, False), (4, True)])
def test_optimizers_equal_dense_and_send_nothing(ranks: int, grid: bool, name: str, kind: str) -> None:
    make = OPTIMIZERS[name]
    chosen = {"foreach": {"foreach": True}, "single": {"foreach": False}, "fused": {"fused": True}}[kind]
    run_ranks(ranks, train, _Chosen(make, chosen), ranks, grid)


class _Chosen:
    """An optimizer's constructor with a choice of implementation."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer], chosen: dict[str, bool]) -> None:
        self.make, self.chosen = make, chosen

    def __call__(self, group: Any) -> torch.optim.Optimizer:
        return self.make(group, **self.chosen)


# -- mistakes -------------------------------------------------------------------------------------------------------


def fused_step(parameter: Any, gradient: Any, *momentum: Any) -> None:
    options = {"weight_decay": 0.0, "momentum": 0.9, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False}
    torch._fused_sgd_([parameter], [gradient], list(momentum), **options, is_first_step=False)  # type: ignore[arg-type]


def mistake(which: str) -> None:
    mesh = make_mesh(2, False)
    layout = Layout.from_device_mesh(mesh)(FlatShard(8, 1))
    x = distribute_tensor(torch.ones(5, 3), layout, src_data_rank=None)
    other = distribute_tensor(torch.ones(5, 3), layout.unflat, src_data_rank=None)
    view = x.view(15)
    with record_collectives() as log:
        try:
            if which == "no shape":
                DTensor.from_local(torch.ones(3), layout)
            elif which == "length":
                DTensor.from_local(torch.ones(3), layout, shape=(5, 3))
            elif which == "chunk":
                distribute_tensor(torch.ones(5, 3), mesh, [FlatShard(7)])
            elif which == "torch":
                x.to_torch()
            elif which == "list":
                torch._foreach_add_([x], [distribute_tensor(torch.ones(3), layout.unflat, src_data_rank=None)])
            elif which == "fused":
                fused_step(x, other)
            elif which == "fused state":  # the step would be written to a copy
                fused_step(other, other, x)
            elif which == "grad":
                x.requires_grad_().grad = other
            elif which == "shape":
                x + distribute_tensor(torch.ones(4, 3), layout, src_data_rank=None)
            elif which == "view":
                view[0] = 1.0
        except HyperParallelError:
            assert not log, log.summary()
            raise


@pytest.mark.parametrize(
    ("which", "kind", "text"),
    [
        ("no shape", LayoutError, r"ranks hold unequal shares.*pass shape="),
        (
            "length",
            LayoutError,
            r"holds a local tensor of shape \(3,\), but of a global tensor of shape \(5, 3\).*its part is",
        ),
        ("chunk", LayoutError, r"chunks of 7 elements on the 2 ranks of axis 'dp' reach 14.*has up to 15"),
        ("torch", LayoutError, r"flat shares, which torch's placements can't express; redistribute first"),
        ("list", ShardingRuleError, r"would write to a flat tensor with an operand of another shape"),
        ("fused", ShardingRuleError, r"laid out .*flat\(8\+1\):dp has state or a gradient laid out .*replicated"),
        ("fused state", ShardingRuleError, r"laid out .*replicated has state or a gradient laid out .*flat\(8\+1\):dp"),
        ("grad", LayoutError, r"law of gradients asks for .*flat\(8\+1\):dp"),
        ("shape", ShardingRuleError, r"don't broadcast"),
        ("view", ShardingRuleError, r"view of a DTensor that had to be moved.*would be lost"),
    ],
)
def test_mistakes_are_told_alike_before_anything_is_sent(which: str, kind: type[Exception], text: str) -> None:
    assert_same_error(2, mistake, kind, text, which)


def checked_parts(which: str) -> None:
    layout = Layout.from_device_mesh(make_mesh(2, False))(FlatShard(8, 1))
    local = torch.ones(7 + layout.mesh.get_local_rank("dp"))
    if which == "right":
        assert tuple(DTensor.from_local(local, layout, shape=(5, 3), run_check=True).shape) == (5, 3)
    else:
        DTensor.from_local(
            local, layout, shape=(5, 3) if which == "wrong" and len(local) == 7 else None, run_check=True
        )


def test_parts_are_checked_over_the_ranks() -> None:
    run_ranks(2, checked_parts, "right")
    assert_same_error(2, checked_parts, LayoutError, "ranks hold unequal shares.*pass shape=", "no shape")
