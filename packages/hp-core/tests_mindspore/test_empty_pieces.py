"""Ops on pieces without elements, which a rank has where a dim is cut over more ranks than it has rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, ops

from hp_core.errors import PlatformError
from hp_core.platform.mindspore.autograd import MindSporeAutograd
from hp_core.platform.mindspore.op import MindSporeOp
from hp_core.testing import run_ranks

F = mint.nn.functional
CASES: list[tuple[str, Callable[..., Any], list[tuple[int, ...]], list[tuple[int, ...]]]] = [
    # MindSpore gives the operand that is stretched a gradient of one
    ("add", lambda x, y: x + y, [(1,), (0, 3)], [(0, 3)]),
    ("add", lambda x, y: x + y, [(2, 1, 3), (0, 1)], [(2, 0, 3)]),
    ("mul", lambda x, y: x * y, [(3,), (0, 3)], [(0, 3)]),
    # kernels that refuse
    ("maximum", mint.maximum, [(0, 3), (3,)], [(0, 3)]),
    ("tile", lambda x: ops.tile(x, (2, 1)), [(0, 4)], [(0, 4)]),
    ("max", lambda x: mint.max(x, 1), [(0, 3)], [(0,), (0,)]),
    ("getitem", lambda x: x[:, 1], [(0, 3)], [(0,)]),
    ("getitem", lambda x: x[1:3], [(4, 0)], [(2, 0)]),
    # views, which may be given a size that is none
    ("reshape", lambda x: x.reshape(0, 1, 3), [(0, 3)], [(0, 1, 3)]),
    ("split", lambda x: mint.split(x, 2, 1), [(0, 3)], [(0, 2), (0, 1)]),
    # results that have elements
    ("sum", lambda x: x.sum(0), [(0, 3)], [(3,)]),
    ("linear", F.linear, [(2, 0), (3, 0)], [(2, 3)]),
    ("linear", F.linear, [(0, 4), (3, 4), (3,)], [(0, 3)]),
    ("matmul", mint.matmul, [(2, 0), (0, 3)], [(2, 3)]),
]


def _tensor(shape: tuple[int, ...]) -> Any:
    return Tensor.from_numpy(np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape))


@pytest.mark.parametrize(("name", "function", "shapes", "wanted"), CASES)
def test_they_give_zeros_of_the_right_shape_and_gradients_of_zeros(
    name: str, function: Callable[..., Any], shapes: list[tuple[int, ...]], wanted: list[tuple[int, ...]]
) -> None:
    op = MindSporeOp(name, name, function)
    found: list[Any] = []

    def loss(*operands: Any) -> Any:
        result = op(*operands)
        found[:] = result if isinstance(result, (list, tuple)) else [result]
        return sum((output * 1.0).sum() for output in found)

    gradients = ms.grad(loss, tuple(range(len(shapes))))(*map(_tensor, shapes))
    assert [output.shape for output in found] == wanted
    assert all(not output.asnumpy().any() for output in found)
    for gradient, shape in zip(gradients if isinstance(gradients, tuple) else (gradients,), shapes, strict=True):
        assert gradient.shape == shape
        assert not gradient.asnumpy().any()


def _reached(function: Callable[..., Any], *shapes: tuple[int, ...]) -> set[int]:
    """Which operands the backward of an op comes to."""
    op, reached = MindSporeOp("op", "op", function), set()

    def noted(place: int, tensor: Any) -> Any:
        def backward(gradient: Any) -> Any:
            reached.add(place)
            return gradient

        return MindSporeAutograd().with_gradient(tensor, lambda value: value, backward)

    def loss(*operands: Any) -> Any:
        return op(*[noted(place, tensor) for place, tensor in enumerate(operands)]).astype(ms.float32).sum()

    ms.grad(loss, tuple(range(len(shapes))))(*map(_tensor, shapes))
    return reached


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x + y,
        lambda x, y: x // y,
        lambda x, y: x > y,
        lambda x, y: ops.LayerNorm(begin_norm_axis=-1, begin_params_axis=-1)(x, y, y)[0],
        lambda x, y: ops.ceil(x) * y,
        lambda x, y: ops.argmax(x, 1),
        lambda x, y: mint.where(x > y, x, 1.0),
    ],
)
def test_the_backward_comes_to_the_same_operands_as_where_there_are_elements(function: Callable[..., Any]) -> None:
    assert _reached(function, (0, 3), (3,)) == _reached(function, (2, 3), (3,))


def test_what_has_elements_beside_them_keeps_its_values_and_gradients() -> None:
    linear, cat = MindSporeOp("Dense", "linear", F.linear), MindSporeOp("Concat", "cat", ops.cat)
    nothing, bias, rows = _tensor((2, 0)), _tensor((3,)), _tensor((2, 3))
    np.testing.assert_array_equal(linear(nothing, _tensor((3, 0)), bias).asnumpy(), [[1, 2, 3]] * 2)
    by_bias = ms.grad(lambda b: linear(nothing, _tensor((3, 0)), b).sum())(bias)
    np.testing.assert_array_equal(by_bias.asnumpy(), [2, 2, 2])
    np.testing.assert_array_equal(cat((_tensor((0, 3)), rows), 0).asnumpy(), rows.asnumpy())
    by_rows = ms.grad(lambda r: (cat((_tensor((0, 3)), r), 0) * 2).sum())(rows)
    np.testing.assert_array_equal(by_rows.asnumpy(), np.full((2, 3), 2))


def test_an_op_of_which_it_is_not_known_what_it_gives_is_refused() -> None:
    op = MindSporeOp("ReduceSum", "logsumexp", lambda x: x.sum(0))
    with pytest.raises(PlatformError, match=r"logsumexp: this rank holds no elements .* redistribute"):
        op(_tensor((0, 3)))


def _gradients_of_a_replicated_operand() -> list[str]:
    import mindspore as ms
    import numpy as np
    from mindspore import Tensor, mint

    from hp_core import DTensor, Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    random = np.random.default_rng(0)
    faults = []
    for name, function, shape in (
        ("add", lambda x, y: x + y, (1,)),
        ("maximum", mint.maximum, (3,)),
        ("linear", lambda x, y: mint.nn.functional.linear(y * 2, x, None) + x.sum(), (2, 3)),
    ):
        x, y = random.normal(size=(1, 3)).astype(np.float32), random.normal(size=shape).astype(np.float32)
        own = x[mesh.get_local_rank("tp") :][:1]
        wanted = ms.grad(lambda x, y, f=function: f(x, y).sum(), (0, 1))(Tensor(x), Tensor(y))

        def loss(own: Any, y: Any, f: Any = function) -> Any:
            x = DTensor.from_local(own, mesh, [Shard(0)], shape=(1, 3))
            return f(x, DTensor.from_local(y, mesh, [Replicate()])).sum().full_tensor()

        by_x, by_y = ms.grad(loss, (0, 1))(Tensor.from_numpy(own.copy()), Tensor(y))
        if not np.allclose(by_y.asnumpy(), wanted[1].asnumpy(), rtol=1e-5):
            faults.append(f"{name}: {by_y.asnumpy()} for {wanted[1].asnumpy()}")
        if by_x.shape != own.shape:
            faults.append(f"{name}: {by_x.shape}")
    return faults


def test_a_rank_that_holds_nothing_takes_part_in_the_backward_with_zeros() -> None:
    assert not any(run_ranks(2, _gradients_of_a_replicated_operand, timeout=60.0))
