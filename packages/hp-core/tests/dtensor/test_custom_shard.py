"""`custom_shard`: functions of local tensors on DTensors: values, gradients by the law, global shapes, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from hp_core import (
    DTensor,
    Layout,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    custom_shard,
    distribute_tensor,
    init_device_mesh,
    record_collectives,
)
from hp_core.errors import LayoutError
from hp_core.testing import assert_same_error, run_ranks


def mesh_of(ranks: int) -> Any:
    shape, names = ((2, 2), ("dp", "tp")) if ranks == 4 else ((ranks,), ("tp",))
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def lay(value: torch.Tensor, *entries: Any, ranks: int = 2) -> Any:
    return distribute_tensor(value, Layout.from_device_mesh(mesh_of(ranks))(*entries), src_data_rank=None)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uneven() -> None:
    x = lay(torch.arange(5.0), "tp")
    double = custom_shard(lambda x: x * 2, mesh_of(2), [Shard(0)])
    for collectives in (1, 0):  # the shape is agreed upon once
        with record_collectives() as log:
            y = double(x)
        assert y.shape == (5,)
        assert len(log) == collectives
    assert y.layout is x.layout
    assert torch.equal(y.full_tensor(), torch.arange(5.0) * 2)
    head = custom_shard(lambda x: x[:2], mesh_of(2), [Shard(0)])(x)  # (3,) and (2,) become (2,) and (2,)
    assert head.shape == (4,)
    assert head.full_tensor().tolist() == [0.0, 1.0, 3.0, 4.0]
    shares = lay(torch.arange(5.0), RaggedShard((4, 1)))
    ragged = custom_shard(lambda x: x + 1, mesh_of(2), [RaggedShard((4, 1))], out_shapes=[(5,)])(shares)
    assert torch.equal(ragged.full_tensor(), torch.arange(5.0) + 1)


def test_uneven_outputs_have_the_right_global_shape() -> None:
    """Public report case 18."""
    run_ranks(2, uneven)


def product(x: Any, w: Any) -> Any:
    return x @ w


CASES: list[tuple[Callable[..., Any], list[Any], list[Any], Any]] = [
    # function, shapes of operands, their layouts, the layout of the output
    (product, [(5, 4), (4, 3)], [("tp",), ()], ("tp",)),
    (product, [(5, 4), (4, 3)], [(), (None, "tp")], (None, "tp")),
    (product, [(5, 4), (4, 3)], [(None, "tp"), ("tp",)], [Partial()]),
    (lambda x, y: x * y, [(3, 5), (3, 5)], [(None, "tp"), (None, "tp")], (None, "tp")),
    (lambda x, y: x + y, [(3, 5), (5,)], [(None, "tp"), ("tp",)], (None, "tp")),
    (lambda x, y: (x * y).sum(0), [(4, 3), (3,)], [("tp",), ()], [Partial()]),
]


def gradients(index: int) -> None:
    function, shapes, layouts, out = CASES[index]
    dense = [random(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
    operands = [lay(value.detach(), *entries).requires_grad_() for value, entries in zip(dense, layouts, strict=True)]
    result = custom_shard(function, mesh_of(2), out)(*operands)
    expected = function(*dense)
    torch.testing.assert_close(result.full_tensor(), expected)
    result.square().sum().backward()
    expected.square().sum().backward()
    for operand, value in zip(operands, dense, strict=True):
        assert operand.grad.layout is operand.layout.gradient
        torch.testing.assert_close(operand.grad.full_tensor(), value.grad)


@pytest.mark.parametrize("index", range(len(CASES)))
def test_gradients_are_the_dense_ones(index: int) -> None:
    run_ranks(2, gradients, index)


def two_axes() -> None:
    x, w = random(5, 4).requires_grad_(), random(4, 6, seed=1).requires_grad_()
    dx = lay(x.detach(), "dp", ranks=4).requires_grad_()
    dw = lay(w.detach(), None, "tp", ranks=4).requires_grad_()
    with record_collectives() as log:
        y = custom_shard(product, mesh_of(4), [Shard(0), Shard(1)], out_shapes=[(5, 6)])(dx, dw)
        y.square().sum().backward()
    assert len(log) == 2, log.summary()  # x's gradient is summed over tp, w's over dp
    (x @ w).square().sum().backward()
    torch.testing.assert_close(dx.grad.full_tensor(), x.grad)
    torch.testing.assert_close(dw.grad.full_tensor(), w.grad)


def test_each_axis_has_its_own_part_in_the_law() -> None:
    run_ranks(4, two_axes)


def own_part() -> None:
    """Only the output is cut: every rank takes its part of a replicated input."""
    mesh = mesh_of(2)
    rank = mesh.get_local_rank("tp")
    x, dense = lay(random(5, 3)).requires_grad_(), random(5, 3).requires_grad_()
    rows = custom_shard(lambda x: x.chunk(2)[rank] ** 3, mesh, [Shard(0)])(x)
    shares = custom_shard(lambda x: x * (rank + 1), mesh, [Partial()])(x)
    (rows * 2 + shares).square().sum().backward()
    (2 * dense**3 + 3 * dense).square().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), dense.grad)


def test_an_axis_that_only_the_output_is_cut_over_is_active() -> None:
    run_ranks(2, own_part)


class Pair(NamedTuple):
    values: Any
    count: Any


def inputs_and_outputs() -> None:
    mesh = mesh_of(2)
    x = lay(random(6, 4), "tp")

    @custom_shard(mesh=mesh, out_placements=([Shard(0)], None), in_placements=([Shard(0)], None))
    def scaled(x: Any, factor: float, *, offsets: Any = ()) -> Pair:
        """Docstring."""
        assert type(x) is torch.Tensor
        assert all(type(offset) is torch.Tensor for offset in offsets)
        return Pair(x * factor + sum(offsets), x.shape[0])

    assert scaled.__name__ == "scaled"
    assert scaled.__doc__ == "Docstring."
    result = scaled(x, 3.0, offsets=[lay(torch.ones(4, dtype=torch.float64))])
    assert isinstance(result, Pair)
    assert result.count == 3
    assert torch.equal(result.values.full_tensor(), random(6, 4) * 3 + 1)
    with record_collectives() as log:
        scaled(x, 4.0, offsets=[lay(torch.ones(4, dtype=torch.float64))])
    assert len(log) == 1  # another number may give another shape

    moved = custom_shard(torch.neg, mesh, (None, "tp"), [(None, "tp")], redistribute_inputs=True)(x)
    assert moved.layout is Layout.from_device_mesh(mesh)(None, "tp")
    assert torch.equal(moved.full_tensor(), -random(6, 4))

    plain = torch.ones(2, 4, dtype=torch.float64)
    made = custom_shard(lambda plain: plain * 2, mesh, ("tp",))
    for _ in range(2):  # plain tensors have no global shape, so it is agreed upon each time
        with record_collectives() as log:
            assert made(plain).shape == (4, 4)
        assert len(log) == 1
    assert custom_shard(lambda plain: plain * 2, None, ("tp",))(plain) is not None
    assert type(custom_shard(torch.neg, None, ("tp",))(plain)) is torch.Tensor  # no mesh: the function itself
    whole = custom_shard(lambda x: x.new_ones(3), mesh, [Replicate()])
    with record_collectives() as log:
        assert whole(x).shape == (3,)
    assert not log


def test_inputs_and_outputs_of_all_kinds() -> None:
    run_ranks(2, inputs_and_outputs)


def own_communication() -> None:
    mesh = mesh_of(2)
    x = lay(random(4, 3), "tp").requires_grad_()
    w = lay(random(3, seed=1)).requires_grad_()

    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
            part = part.clone()
            torch.distributed.all_reduce(part)
            return part

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return Summed.apply((x * x).sum(0)) * w  # w sees what is whole, so its local gradient is whole

    run = custom_shard(function, mesh, [Replicate()], in_grad_placements=[None, [Replicate()]])
    run(x, w).sum().backward()
    dx, dw = random(4, 3).requires_grad_(), random(3, seed=1).requires_grad_()
    ((dx * dx).sum(0) * dw).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), dx.grad)
    torch.testing.assert_close(w.grad.full_tensor(), dw.grad)


def test_functions_that_communicate_say_what_their_gradients_are() -> None:
    run_ranks(2, own_communication)


def identity(x: Any) -> Any:
    return x


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x, m: custom_shard(identity, m, ("tp",), [()])(x), "argument 0 is laid out .*in_placements says"),
        (lambda x, m: custom_shard(identity, m, ("tp",), [("tp",), None])(x), "2 entries, but .* 1 positional"),
        (
            lambda x, m: custom_shard(identity, m, ("tp",), [("tp",)])(torch.ones(3)),
            "argument 0 lies, but it is a Tensor",
        ),
        (lambda x, m: custom_shard(identity, m, (("tp",), None))(x), "tells of 2 outputs, but the function gave 1"),
        (lambda x, m: custom_shard(lambda x: 1, m, ("tp",))(x), "output 0 is a int"),
        (lambda x, m: custom_shard(identity, m, (None,))(x), "output 0 is a Tensor"),
        (lambda x, m: custom_shard(lambda _: x, m, ("tp",))(x), "output 0 is a DTensor"),
        (lambda x, m: custom_shard(identity, m, ("tp",), out_shapes=[(9,)])(x), "its part is"),
        (lambda x, m: custom_shard(identity, m, ("tp",), out_shapes=[None, None]), "2 out_shapes for 1"),
        (
            lambda x, m: custom_shard(lambda x: x[x.shape[0] - 2 :], m, (None, "tp"))(x),
            "differ in number|1 dims|make up",
        ),
        (lambda x, m: custom_shard(identity, m["tp"] if m.ndim > 1 else other_mesh(), ("tp",))(x), "works on .*got a"),
        (lambda x, m: custom_shard(identity, m, Shard(0))(x), "is no layout"),
    ],
)
def test_what_does_not_fit_is_refused_alike(call: Any, match: str) -> None:
    def refused() -> None:
        call(lay(torch.arange(5.0), "tp"), mesh_of(2))

    assert_same_error(2, refused, LayoutError, match)


def other_mesh() -> Any:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("other",))


def changed() -> None:
    sizes = iter([2, 1])
    shrink = custom_shard(lambda x: x[: next(sizes)], mesh_of(2), ("tp",))
    x = lay(torch.arange(6.0), "tp")
    assert isinstance(shrink(x), DTensor)
    shrink(x)


def test_a_shape_that_changes_between_equal_calls_is_refused() -> None:
    assert_same_error(2, changed, LayoutError, "earlier call.*out_shapes")
